"""Draws by the kernel: the token that the same noise picks in float64, from the distribution that sampling.py says."""

from __future__ import annotations

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor

pytest.importorskip("triton", reason="Triton is not installed (it is for Linux only)")

from semspec.model.kernels import COUNT, FIELDS, SEED, START, STEP, STREAM, sample
from semspec.sampling.draw import SamplingRows, draw_rows, process
from semspec.sampling.noise import exponential
from semspec.sampling.noise import key as noise_key
from tests.interpreter import allow_new_numpy

allow_new_numpy()
ROUNDING = 2e-6  # of a sum of weights that is 1


def states(rows: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    state = torch.randint(0, 5000, (FIELDS, rows), generator=generator)
    state[SEED] = torch.randint(-(2**63), 2**63 - 1, (rows,), generator=generator)
    state[COUNT], state[STEP] = torch.randint(0, 3, (rows,), generator=generator), 1
    return state


@settings(max_examples=40, deadline=None, phases=[Phase.generate])
@given(
    rows=st.integers(1, 5), size=st.sampled_from([3, 40, 1024, 1025, 3000]), seed=st.integers(0, 10**6),
    temperatures=st.lists(st.sampled_from([0.0, 0.05, 0.6, 1.0, 3.0]), min_size=5, max_size=5),
    least=st.sampled_from([0.0, 0.0, 0.1, 1.0]), dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)  # fmt: skip
def test_a_draw_is_that_of_the_reference(
    rows: int, size: int, seed: int, temperatures: list[float], least: float, dtype: torch.dtype
) -> None:
    wide = torch.randn(rows, size + 7, generator=torch.Generator().manual_seed(seed)).mul(4).to(dtype)
    wide[:, size:] = 1e4  # behind the vocabulary there may be anything
    logits = wide[:, :size]
    options = torch.tensor([temperatures[:rows], [0.0] * rows, [1.0] * rows, [least] * rows])
    state, kept = states(rows, seed), torch.full((3, rows, size), 7.0)
    tokens = sample.sample(logits, options, state, kept)
    assert torch.equal(tokens, sample.sample(logits, options, state, None))
    assert (kept[[0, 2]] == 7.0).all(), "only the row of this step is written"

    columns = SamplingRows(options[0], options[1].long(), options[2], options[3], False, False, least > 0)
    key = (state[SEED], state[START] + state[COUNT], state[STREAM])
    wanted, expected = draw_rows(logits, columns, key, keep=True)
    assert expected is not None
    torch.testing.assert_close(kept[1], expected, rtol=1e-5, atol=1e-5)
    scores = process(logits, columns) - exponential(noise_key(*key), size).log()
    for row, (token, other) in enumerate(zip(tokens.tolist(), wanted.tolist(), strict=True)):
        if options[0, row] == 0.0:
            assert token == int(logits[row].float().argmax())
        assert token == other or abs(scores[row, token] - scores[row, other]) < ROUNDING


def test_what_is_not_a_number_is_no_token() -> None:
    logits = torch.randn(3, 1500)
    logits[1, 1200] = float("nan")
    options = torch.tensor([[0.7, 0.7, 0.0], [0.0] * 3, [1.0] * 3, [0.0] * 3])
    tokens = sample.sample(logits, options, states(3, 1), None).tolist()
    assert tokens[1] == -1 and tokens[0] >= 0 and tokens[2] >= 0


def test_draws_follow_the_distribution() -> None:
    rows, size = 1000, 6
    logits = torch.tensor([[0.0, 1.0, -1.0, 2.0, float("-inf"), 0.5]]).expand(rows, size).contiguous()
    options = torch.tensor([[0.7], [0.0], [1.0], [0.0]]).expand(4, rows).contiguous()
    state = torch.zeros(FIELDS, rows, dtype=torch.long)
    state[SEED], state[COUNT] = 11, 1
    state[START] = torch.arange(rows)
    seen = sample.sample(logits, options, state, None).bincount(minlength=size)
    wanted = (logits[0] / 0.7).softmax(0) * rows
    there = wanted > 0
    assert not seen[~there].any()
    assert float(((seen - wanted)[there] ** 2 / wanted[there]).sum()) < 18.5  # chi square, 4 degrees: p = 0.001
