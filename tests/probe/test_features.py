from __future__ import annotations

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
