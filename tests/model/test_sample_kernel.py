"""Draws of a roll by the kernel: the token that the same noise picks in PyTorch, from the same distribution."""

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
from semspec.types import Sampling
from tests.interpreter import allow_new_numpy

allow_new_numpy()
ROUNDING = 2e-6  # of a sum of weights that is 1


def states(rows: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    state = torch.randint(0, 5000, (FIELDS, rows), generator=generator)
    state[SEED] = torch.randint(-(2**63), 2**63 - 1, (rows,), generator=generator)
    state[COUNT], state[STEP] = torch.randint(0, 3, (rows,), generator=generator), 1
    return state


CPU = torch.device("cpu")
SOME = [Sampling(), Sampling(0.05), Sampling(0.6), Sampling(3.0), Sampling(1.0, min_p=0.1), Sampling(0.7, min_p=1.0)]
FILTERS = [Sampling(0.6, top_p=0.9), Sampling(1.0, top_k=2), Sampling(1.3, top_k=7, top_p=0.7, min_p=0.02)]


@settings(max_examples=10, deadline=None, phases=[Phase.generate])
@given(
    options=st.lists(st.sampled_from(SOME), min_size=1, max_size=5) | st.just(FILTERS),
    size=st.sampled_from([3, 40, 2048, 2049]), seed=st.integers(0, 10**6),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)  # fmt: skip
def test_a_draw_is_that_of_the_reference(options: list[Sampling], size: int, seed: int, dtype: torch.dtype) -> None:
    rows = len(options)
    wide = torch.randn(rows, size + 7, generator=torch.Generator().manual_seed(seed)).mul(4).to(dtype)
    wide[:, size:] = 1e4  # behind the vocabulary there may be anything
    logits = wide[:, :size]
    columns = SamplingRows.of(options, [1] * rows, CPU)
    given = columns.columns if len(columns.columns) else torch.zeros(rows, 4)
    state, kept = states(rows, seed), torch.full((3, rows, size), 7.0)
    tokens = sample.sample(logits, given, columns.use, state, kept)
    assert (kept[[0, 2]] == 7.0).all(), "only the row of this step is written"

    key = (state[SEED], state[START] + state[COUNT], state[STREAM])
    wanted, expected = draw_rows(logits, columns, key, keep=True)
    assert expected is not None
    torch.testing.assert_close(kept[1], expected, rtol=1e-5, atol=1e-5)
    scores = process(logits, columns) - exponential(noise_key(*key), size).log()
    for row, (token, other) in enumerate(zip(tokens.tolist(), wanted.tolist(), strict=True)):
        if options[row].greedy:
            assert token == int(logits[row].float().argmax())
        assert token == other or abs(scores[row, token] - scores[row, other]) < ROUNDING


def test_what_is_kept_changes_no_draw() -> None:
    logits, columns = torch.randn(4, 300), SamplingRows.of([Sampling(0.8, top_p=0.8)], [4], CPU)
    drawn = [
        sample.sample(logits, columns.columns, columns.use, states(4, 3), kept)
        for kept in (None, torch.empty(3, 4, 300))
    ]
    assert torch.equal(*drawn)


def test_what_is_not_a_number_stays_within_the_vocabulary() -> None:
    logits = torch.randn(3, 1500)
    logits[1, 1200] = float("nan")
    rows = SamplingRows.of([Sampling(0.7), Sampling(0.7, top_p=0.9), Sampling()], [1] * 3, CPU)
    tokens = sample.sample(logits, rows.columns, rows.use, states(3, 1), None).tolist()
    assert all(0 <= token < 1500 for token in tokens), "the runner finds it out"
