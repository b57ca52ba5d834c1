"""Does a sample come from a distribution? Pearson's chi-square test, with bins too small to trust merged."""

from __future__ import annotations

import torch
from torch import Tensor

SMALLEST = 5.0  # expected count below which a bin is merged with others


def chi_square(counts: Tensor, probs: Tensor) -> float:
    """The p-value of observing `counts` when outcomes have the given probabilities; both of the same shape.

    An outcome that is impossible and was observed all the same gives 0.
    """
    counts, expected = counts.flatten().double(), probs.flatten().double()
    if counts[expected == 0].any():
        return 0.0
    expected = expected / expected.sum() * counts.sum()
    expected, order = expected.sort()
    counts = counts[order]
    merged = int((expected.cumsum(0) < SMALLEST).sum()) + 1  # the fewest smallest bins that together are big enough
    merged = max(merged, int((expected < SMALLEST).sum()))
    counts = torch.cat([counts[:merged].sum()[None], counts[merged:]])
    expected = torch.cat([expected[:merged].sum()[None], expected[merged:]])
    assert len(counts) > 1, "too few observations to test anything"
    statistic = ((counts - expected) ** 2 / expected).sum()
    freedom = torch.tensor((len(counts) - 1) / 2, dtype=torch.float64)
    return torch.special.gammaincc(freedom, statistic / 2).item()


def count(outcomes: Tensor, kinds: int) -> Tensor:
    """How often each of `kinds` outcomes occurs."""
    return torch.bincount(outcomes.flatten(), minlength=kinds)
