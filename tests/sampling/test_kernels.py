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
from semspec.sampling.kernels import filter, race, top
from semspec.sampling.noise import exponential, key, uniform
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


def found(logits: Tensor, rows: SamplingRows) -> kernels.Filter:
    return kernels.Filter(logits, rows.columns, rows.use)


def ours(logits: Tensor, options: Sequence[Sampling]) -> Tensor:
    return found(logits, SamplingRows.of(options, [1] * len(options), CPU)).logits()


def agree(logits: Tensor, options: Sequence[Sampling]) -> None:
    made = ours(logits, options)
    plain = process(logits, SamplingRows.of(options, [1] * len(options), CPU))
    for row, o, one, other in zip(logits.float().tolist(), options, made, plain, strict=True):
        fewest, most = kept_by_sorting(row, o)
        left = set(one.isfinite().nonzero()[:, 0].tolist())
        assert fewest <= left <= most, (o, sorted(left ^ most))
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
    keys = torch.tensor([1, 2, 3])
    drawn = kernels.choose(made, keys)
    assert drawn[1] == -1 and torch.equal(drawn, choose(made, keys))
    assert made[[0, 2]].isfinite().any(-1).all() and not made[[0, 2]].isnan().any()


@settings(max_examples=8, deadline=None, phases=[Phase.generate])
@given(st.integers(0, 10**6), st.sampled_from([1, 64, 65, 130]), st.sampled_from(TYPES))
def test_a_draw_is_the_plain_one(seed: int, size: int, dtype: torch.dtype) -> None:
    """From weights, and from rows that are filtered on the way, some of them several times."""
    generator = torch.Generator().manual_seed(seed)
    logits = (torch.randn(3, size, generator=generator) * 5).to(dtype)
    rows = SamplingRows.of([Sampling(0.7, top_p=0.9), Sampling(), Sampling(2.0, min_p=0.01)], [1] * 3, CPU)
    at = torch.randint(3, (5,), generator=generator)
    keys = torch.randint(-(2**63), 2**63 - 1, (5,), generator=generator)
    weights = process(logits, rows)[at]
    with pytest.MonkeyPatch.context() as patch:
        for module in (filter, race):
            patch.setattr(module, "PART", 64)
        drawn, whole = kernels.choose(weights, keys), kernels.draw(found(logits, rows), keys, at)
    plain, scores = choose(weights, keys), weights - exponential(keys, size).log()
    for ours in (drawn, whole):
        close = scores.gather(1, ours[:, None]) - scores.gather(1, plain[:, None])
        assert ((ours == plain) | (close[:, 0].abs() < 2e-6)).all()


def test_probabilities_are_those_of_the_logits() -> None:
    options = [
        Sampling(0.6, top_k=3, top_p=0.9),
        Sampling(0.7),
        Sampling(),
        Sampling(1.0, top_p=0.4),
        Sampling(2, top_k=4),
    ]
    logits = torch.randn(5, 90, generator=torch.Generator().manual_seed(3)).mul(2).round()
    for some in (options, options[1:3], [*options[:4], Sampling(1.0, min_p=0.2)]):
        rows = SamplingRows.of(some, [1] * len(some), CPU)
        made = found(logits[: len(some)], rows).probs()
        torch.testing.assert_close(made, process(logits[: len(some)], rows).softmax(-1), rtol=1e-5, atol=1e-7)


def test_a_softmax_and_the_largest_values_are_torchs(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (filter, top):
        monkeypatch.setattr(module, "PART", 64)
    logits = torch.randn(3, 150, generator=torch.Generator().manual_seed(3)).mul(3).round().bfloat16()
    logits[1, 5:] = -INF
    torch.testing.assert_close(kernels.softmax(logits), logits.float().softmax(-1), rtol=1e-5, atol=1e-7)
    assert torch.equal(kernels.largest(logits.float(), 3), logits.float().topk(3).values)


def test_noise_is_that_of_the_reference() -> None:
    generator = torch.Generator().manual_seed(1)
    seed, position = (torch.randint(-(2**63), 2**63 - 1, size, generator=generator) for size in ((20, 1), (20, 9)))
    stream = torch.arange(20)[:, None] * 8 + 3
    assert torch.equal(kernels.keys(seed, position, stream), key(seed, position, stream))
    assert torch.equal(kernels.keys(seed, position, stream, uniform=True), uniform(seed, position, stream))
    columns = seed[:, 0], position[:, 4], stream[:, 0]
    assert torch.equal(kernels.keys(*columns), key(*columns))


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
