from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from semspec.errors import BadRequest
from semspec.probe.features import Features, pool, resolve_layers


def ragged(counts: list[int], gaps: list[int], width: int = 3) -> tuple[torch.Tensor, torch.Tensor]:
    """States of steps with `gaps` foreign rows in front of each and one behind all; first rows."""
    first, row = [], 0
    for count, gap in zip(counts, gaps, strict=True):
        first.append(row + gap)
        row += gap + count
    torch.manual_seed(row)
    return torch.randn(row + 1, width), torch.tensor(first)


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(0, 3)), min_size=1, max_size=6))
def test_pooling_equals_a_loop_over_steps(shape: list[tuple[int, int]]) -> None:
    counts, gaps = [c for c, _ in shape], [g for _, g in shape]
    states, first = ragged(counts, gaps)
    own = [states[f : f + c] for f, c in zip(first.tolist(), counts, strict=True)]
    torch.testing.assert_close(
        pool(states, first, torch.tensor(counts), "mean"), torch.stack([s.mean(0) for s in own]), atol=1e-6, rtol=1e-5
    )
    assert torch.equal(pool(states, first, torch.tensor(counts), "last"), torch.stack([s[-1] for s in own]))


def test_a_step_pools_to_the_same_bits_alone_and_in_a_batch() -> None:
    counts = [5, 17, 2]
    states, first = ragged(counts, [0, 1, 1], width=64)
    together = pool(states, first, torch.tensor(counts), "mean")
    for i, (f, c) in enumerate(zip(first.tolist(), counts, strict=True)):
        alone = pool(states[f : f + c], torch.tensor([0]), torch.tensor([c]), "mean")
        assert torch.equal(together[i : i + 1], alone)


def plain_attention(states: list[list[float]], query: list[float]) -> list[float]:
    scores = [sum(x * q for x, q in zip(row, query, strict=True)) for row in states]
    weights = [math.exp(score - max(scores)) for score in scores]
    columns = zip(*states, strict=True)
    return [sum(w * x for w, x in zip(weights, column, strict=True)) / sum(weights) for column in columns]


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(0, 3)), min_size=1, max_size=6), st.integers(0, 99))
def test_attention_equals_plain_python(shape: list[tuple[int, int]], seed: int) -> None:
    counts, gaps = [c for c, _ in shape], [g for _, g in shape]
    states, first = ragged(counts, gaps)
    query = torch.randn(3, generator=torch.Generator().manual_seed(seed)) * 2
    found = pool(states, first, torch.tensor(counts), "attention", query)
    for b, (f, c) in enumerate(zip(first.tolist(), counts, strict=True)):
        assert found[b].tolist() == pytest.approx(plain_attention(states[f : f + c].tolist(), query.tolist()), abs=1e-5)


def test_attention_without_a_question_is_the_mean() -> None:
    states, first = ragged([5, 17, 2], [0, 1, 1])
    counts = torch.tensor([5, 17, 2])
    found = pool(states, first, counts, "attention", torch.zeros(3))
    torch.testing.assert_close(found, pool(states, first, counts, "mean"))


def test_attention_to_the_same_bits_alone_and_in_a_batch_however_sharp() -> None:
    counts = [5, 17, 2, 0, 3]
    states, first = ragged(counts, [2, 1, 1, 0, 0], width=64)
    states[0] = 1e9  # a row of nobody, which would outweigh all others
    for sharp in (0.1, 1e3):
        query = torch.randn(64, generator=torch.Generator().manual_seed(0)) * sharp
        together = pool(states, first, torch.tensor(counts), "attention", query)
        assert together.isfinite().all() and together[3].abs().max() == 0
        for i, (f, c) in enumerate(zip(first.tolist(), counts, strict=True)):
            alone = pool(states[f : f + c + 1], torch.tensor([0]), torch.tensor([c]), "attention", query)
            assert torch.equal(together[i : i + 1], alone)


def test_attention_can_be_learnt() -> None:
    """The gradient of the query is that of the definition, also where nothing has been learnt yet."""
    counts, gaps = [3, 4], [1, 0]
    states, first = ragged(counts, gaps)
    for start in (torch.zeros(3), torch.tensor([0.5, -1.0, 2.0])):
        query, same = (start.clone().requires_grad_() for _ in range(2))
        pool(states, first, torch.tensor(counts), "attention", query).square().sum().backward()
        by_hand = [
            (states[f : f + c] @ same).softmax(0) @ states[f : f + c]
            for f, c in zip(first.tolist(), counts, strict=True)
        ]
        torch.stack(by_hand).square().sum().backward()
        torch.testing.assert_close(query.grad, same.grad)
        assert query.grad is not None and query.grad.abs().max() > 1e-3


def test_evidence_follows_the_states_in_the_groups_asked_for() -> None:
    seen = torch.arange(12.0)[None]  # lowest, second, mean, number, gap, entropies, length; four of the draft's
    where = (torch.tensor([0]), torch.tensor([2]))
    features = Features((1,), evidence=("draft", "numbers"))
    assert features.evidence == ("numbers", "draft"), "in their own order"
    assert features({1: torch.ones(2, 2)}, *where, seen).tolist() == [[1, 1, 3, 8, 9, 10, 11]]
    assert Features((), evidence=("tokens",))({}, *where, seen[:, :8]).tolist() == [[0, 1, 2, 4]]


def test_layers_stand_side_by_side_in_the_order_asked_for() -> None:
    states = {1: torch.ones(2, 3), 5: torch.full((2, 2), 5.0)}
    features = Features((5, 1))(states, torch.tensor([0]), torch.tensor([2]))
    assert features.tolist() == [[5.0, 5.0, 1.0, 1.0, 1.0]]


def test_half_precision_states_are_summed_in_full() -> None:
    states = torch.full((4096, 1), 1.0, dtype=torch.bfloat16)  # in bfloat16 this sum would stop at 256
    assert pool(states, torch.tensor([0]), torch.tensor([4096]), "mean").item() == 1.0


def test_a_step_without_tokens_is_no_division_by_zero() -> None:
    assert pool(torch.ones(2, 1), torch.tensor([0, 1]), torch.tensor([0, 1]), "mean").tolist() == [[0.0], [1.0]]


def test_layers_count_from_both_ends() -> None:
    assert resolve_layers([-1, 0, 3, -2], depth=8) == (8, 0, 3, 7)
    with pytest.raises(BadRequest, match="no layer 9"):
        resolve_layers([9], depth=8)


@pytest.mark.parametrize(("layers", "pooling"), [((), "mean"), ((1, 1), "mean"), ((1,), "max")])
def test_features_that_make_no_sense_are_refused(layers: tuple[int, ...], pooling: str) -> None:
    with pytest.raises(BadRequest):
        Features(layers, pooling)


def test_evidence_that_is_not_known_is_named() -> None:
    with pytest.raises(BadRequest, match="no evidence 'mood'; give some of: tokens, numbers, entropy, length, draft"):
        Features((1,), evidence=("tokens", "mood"))
