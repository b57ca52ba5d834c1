"""Filters and draws by kernels: what sorting keeps, by a reference in plain Python, ties and odd rows included."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor

pytest.importorskip("triton", reason="Triton is not installed (it is for Linux only)")

from semspec.sampling import kernels
from semspec.sampling.draw import SamplingRows, choose, process
from semspec.sampling.kernels import filter, race
from semspec.sampling.noise import exponential
from semspec.types import Sampling
from tests.chi import chi_square, count
from tests.interpreter import allow_new_numpy

allow_new_numpy()
CPU = torch.device("cpu")
INF = math.inf
TYPES = [torch.float32, torch.bfloat16, torch.float16]


def kept_by_sorting(row: Sequence[float], o: Sampling) -> list[set[int]]:
    """Which tokens are kept, in plain Python: those that must be and those that may be, where rounding decides."""
    top = max(row)
    order = sorted(range(len(row)), key=lambda i: (-row[i], i))
    order = [i for i in order if row[i] > -INF][: o.top_k or None]
    scaled = [(row[i] - top) / o.temperature for i in order]
    total, before, answers = sum(map(math.exp, scaled)), 0.0, [set[int](), set[int]()]
    for rank, (i, own) in enumerate(zip(order, scaled, strict=True)):
        for answer, slack in zip(answers, (-1e-5, 1e-5), strict=True):
            enough = o.top_p < 1 and rank > 0 and before / total >= o.top_p + slack
            likely = row[i] == top or o.min_p == 0 or own >= math.log(o.min_p) - slack
            if likely and not enough:
                answer.add(i)
        before += math.exp(own)
    return answers


def ours(logits: Tensor, options: Sequence[Sampling]) -> Tensor:
    rows = SamplingRows.of(options, [1] * len(options), CPU)
    return kernels.process(logits, rows.columns, rows.use)


def agree(logits: Tensor, options: Sequence[Sampling]) -> None:
    made = ours(logits, options)
    plain = process(logits, SamplingRows.of(options, [1] * len(options), CPU))
    for row, o, one, other in zip(logits.float().tolist(), options, made, plain, strict=True):
        fewest, most = kept_by_sorting(row, o)
        found = set(one.isfinite().nonzero()[:, 0].tolist())
        assert fewest <= found <= most, (o, sorted(found ^ most))
        both = one.isfinite() & other.isfinite()
        torch.testing.assert_close(one[both], other[both], rtol=1e-5, atol=1e-5)


@settings(max_examples=8, deadline=None, phases=[Phase.generate])
@given(
    st.data(), st.sampled_from([1, 2, 63, 64, 65, 150]), st.sampled_from(TYPES), st.integers(0, 10**6),
    st.sampled_from([0.5, 4.0, 1e4]), st.booleans(),
)  # fmt: skip
def test_what_is_kept_is_what_sorting_keeps(
    data: st.DataObject, size: int, dtype: torch.dtype, seed: int, spread: float, coarse: bool
) -> None:
    one = st.builds(
        Sampling, st.sampled_from([1e-6, 0.3, 0.6, 1.0, 5.0]), top_k=st.sampled_from([0, 1, 2, 5, 60, 10**9]),
        top_p=st.sampled_from([1e-6, 0.1, 0.5, 0.95, 0.999, 1.0]), min_p=st.sampled_from([0.0, 0.0, 0.2, 1.0]),
    )  # fmt: skip
    options = data.draw(st.lists(one, min_size=1, max_size=2))
    logits = torch.randn(len(options), size, generator=torch.Generator().manual_seed(seed)) * spread
    logits = (logits.round() if coarse else logits).to(dtype)  # coarse: ties everywhere
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(filter, "PART", 64)
        agree(logits, options)


K, P = Sampling(1.0, top_k=12), Sampling(0.7, top_p=0.6)
ODD = {
    "all but one impossible": ([-INF] * 40 + [2.0] + [-INF] * 29, torch.bfloat16, [K, P]),
    "all the same": ([1.0] * 70, torch.bfloat16, [K, P, Sampling(1.0, top_k=1), Sampling(2.0, top_k=25, top_p=0.8)]),
    "zeros of both signs": ([0.0, -0.0] * 35, torch.bfloat16, [K, P]),
    "around zero": ([1e-30 * (-1) ** i * i for i in range(60)], torch.float32, [K, Sampling(1, top_p=0.5, min_p=1.0)]),
    "the largest numbers": ([1e38, -1e38, 1.0, 1e38, -1e38] * 12, torch.float32, [Sampling(1, top_k=40), P]),
    "ties at the threshold": ([3.0, 1.0, 2.0, 2.0, 2.0, 2.0, 1.0] * 10, torch.bfloat16, [K, P, Sampling(1, top_k=71)]),
    "cold": ([3.0, 1.0, 2.0, 2.0, 3.0, 2.0, 1.0], torch.bfloat16, [Sampling(1e-6, top_p=0.9), Sampling(1e-6, top_k=2)]),
}


@pytest.mark.parametrize("name", ODD)
def test_odd_rows(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(filter, "PART", 64)
    row, dtype, options = ODD[name]
    agree(torch.tensor([row] * len(options), dtype=dtype), options)


def test_rows_without_filters_are_left_alone_beside_others() -> None:
    options = [Sampling(0.6, top_k=3, top_p=0.9), Sampling(0.7), Sampling(), Sampling(1.0, min_p=0.3)]
    logits = torch.randn(4, 50, generator=torch.Generator().manual_seed(3)).to(torch.bfloat16)
    logits[2, 7] = logits[2, 30] = 9.0  # greedy: the first of equals
    made, plain = ours(logits, options), process(logits, SamplingRows.of(options, [1] * 4, CPU))
    torch.testing.assert_close(made, plain)
    assert made[2].isfinite().nonzero().tolist() == [[7]]


@pytest.mark.parametrize("where", ["nan", "infinite", "nothing"])
def test_a_row_that_is_no_distribution_is_found_out(where: str) -> None:
    logits = torch.randn(3, 80)
    logits[1] = {"nan": logits[1], "infinite": logits[1], "nothing": torch.full((80,), -INF)}[where]
    logits[1, 70] = {"nan": math.nan, "infinite": INF, "nothing": -INF}[where]
    made = ours(logits, [Sampling(0.6, top_p=0.9), Sampling(0.6, top_k=5), Sampling()])
    key = torch.tensor([1, 2, 3])
    drawn = kernels.choose(made, key)
    assert drawn[1] == -1 and torch.equal(drawn, choose(made, key))
    assert made[[0, 2]].isfinite().any(-1).all() and not made[[0, 2]].isnan().any()


@settings(max_examples=10, deadline=None, phases=[Phase.generate])
@given(st.integers(0, 10**6), st.sampled_from([1, 64, 65, 130]), st.booleans())
def test_a_draw_is_the_plain_one(seed: int, size: int, picked: bool) -> None:
    generator = torch.Generator().manual_seed(seed)
    weights = torch.randn(3, size, generator=generator) * 5
    weights[weights < -4] = -INF
    weights[:, 0] = 0.0
    rows = torch.randint(3, (5,), generator=generator) if picked else None
    key = torch.randint(-(2**63), 2**63 - 1, (5 if picked else 3,), generator=generator)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(race, "PART", 64)
        drawn, plain = kernels.choose(weights, key, rows), choose(weights, key, rows)
    own = weights if rows is None else weights[rows]
    scores = own - exponential(key, size).log()
    close = scores.gather(1, drawn[:, None]) - scores.gather(1, plain[:, None])
    assert ((drawn == plain) | (close[:, 0].abs() < 2e-6)).all()


def drawn(options: Sampling, rows: int, bias: float = 0.0) -> float:
    """How likely draws like these are, if they are from the row's distribution; a bias makes one token likelier."""
    logits = torch.tensor([0.0, 1.0, -1.0, 2.0, -INF, 0.5, 0.4, -0.2])
    wanted = process(logits[None], SamplingRows.of([options], [1], CPU)).softmax(-1)[0].double()
    logits[0] += bias
    made = ours(logits[None], [options]).expand(rows, -1).contiguous()
    seen = count(kernels.choose(made, torch.arange(rows) * 7919), len(logits))
    assert not seen[wanted == 0].any()
    return chi_square(seen[wanted > 0], wanted[wanted > 0])


def test_draws_follow_what_filters_leave_and_a_planted_bias_is_seen() -> None:
    options = Sampling(0.8, top_k=6, top_p=0.93)
    assert drawn(options, 250) > 1e-3 and drawn(options, 250, bias=1.0) < 1e-3
