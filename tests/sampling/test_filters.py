"""Top-k and top-p among a row's best few tokens: as by sorting whole rows, with ties, gaps and limits further down."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from semspec.sampling import filters
from semspec.sampling.filters import NEG_INF, top_k_top_p

VOCAB = 24
# Few values, so that many are equal; some forbidden.
rows = st.lists(st.sampled_from([NEG_INF, -3.0, -1.0, 0.0, 0.5, 2.0]), min_size=VOCAB, max_size=VOCAB).filter(
    lambda row: max(row) > NEG_INF
)
limits = st.tuples(st.sampled_from([0, 1, 2, 4, 5, 9, VOCAB, 99]), st.sampled_from([1.0, 0.999, 0.9, 0.5, 0.2, 1e-6]))


@pytest.fixture(autouse=True)
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(filters, "FEW", 5)


def plain(row: list[float], k: int, p: float) -> list[bool]:
    """Which tokens are kept, by the definition."""
    order = sorted(range(len(row)), key=lambda i: -row[i])[: k or None]
    weights = torch.tensor(row, dtype=torch.float64).exp().tolist()
    total, mass, kept = sum(weights[i] for i in order), 0.0, set[int]()
    for i in order:
        if not kept or p >= 1 or mass / total < p - 1e-9:
            kept.add(i)
        mass += weights[i]
    return [i in kept and row[i] > NEG_INF for i in range(len(row))]


@given(st.lists(st.tuples(rows, limits), min_size=1, max_size=4))
def test_what_is_kept_is_what_the_definition_keeps(asked: list[tuple[list[float], tuple[int, float]]]) -> None:
    logits = torch.tensor([row for row, _ in asked])
    top_k, top_p = (torch.tensor([limit[i] for _, limit in asked], dtype=torch.float32) for i in (0, 1))
    found = top_k_top_p(logits, top_k, top_p)
    for i, (row, (k, p)) in enumerate(asked):
        keeps = (found[i] > NEG_INF).tolist()
        assert keeps == plain(row, k, p)
        assert torch.equal(found[i][found[i] > NEG_INF], logits[i][found[i] > NEG_INF]), "and as it was"
        alone = top_k_top_p(logits[i : i + 1], top_k[i : i + 1], top_p[i : i + 1])
        assert torch.equal(alone[0], found[i]), "rows beside it change nothing"


def sorted_rows(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    counts: list[int] = []
    real = filters._by_sorting

    def by_sorting(logits: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
        counts.append(len(logits))
        return real(logits, top_k, top_p)

    monkeypatch.setattr(filters, "_by_sorting", by_sorting)
    return counts


def test_only_rows_whose_limit_lies_further_down_are_sorted(monkeypatch: pytest.MonkeyPatch) -> None:
    counts = sorted_rows(monkeypatch)
    steep, flat = torch.arange(VOCAB) * -2.0, torch.arange(VOCAB) * -0.001
    logits = torch.stack([steep, flat, steep, flat, flat])
    top_k, top_p = torch.tensor([0.0, 0, 3, 0, 4]), torch.tensor([0.9, 0.9, 1.0, 1.0, 0.99])
    found = top_k_top_p(logits, top_k, top_p)
    assert counts == [1], "the flat one with top-p alone"
    assert [int((row > NEG_INF).sum()) for row in found] == [2, 22, 3, VOCAB, 4]


def test_a_row_with_something_that_is_no_number_stays_one(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = torch.arange(VOCAB, dtype=torch.float32).repeat(3, 1)
    logits[:2, 3] = torch.nan
    found = top_k_top_p(logits, torch.tensor([0.0, 2, 2]), torch.tensor([0.5, 1, 1]))
    assert found.isnan().any(1).tolist() == [True, True, False]


def test_a_tie_at_the_end_of_the_few_is_not_taken_for_an_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fifth of twenty equal tokens: topk may name any of them, the definition the first."""
    counts = sorted_rows(monkeypatch)
    found = top_k_top_p(torch.zeros(1, VOCAB), torch.tensor([5.0]), torch.tensor([1.0]))
    assert (found[0] > NEG_INF).nonzero()[:, 0].tolist() == [0, 1, 2, 3, 4] and counts == [1]
