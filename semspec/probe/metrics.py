"""How good predictions of a probability are. Vectors [N] of predictions and of labels, which are shares in [0, 1]."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import torch
from torch import Tensor

NAN = float("nan")
TINY = 1e-12  # a spread below this is rounding
BINS = 10
LIKELY = 0.5  # labels from here on are those of a step that one would bet on
LOST = 0.01  # of right steps, what a threshold may cost


def mse(predicted: Tensor, labels: Tensor) -> float:
    return float((predicted.double() - labels.double()).square().mean())


def r2(predicted: Tensor, labels: Tensor) -> float:
    """The share of the labels' variance that is explained; negative: worse than always predicting their mean."""
    labels = labels.double()
    spread = (labels - labels.mean()).square().sum()
    return float(1 - (predicted.double() - labels).square().sum() / spread) if spread > TINY else NAN


def correlation(predicted: Tensor, labels: Tensor) -> float:
    """Pearson's."""
    a, b = predicted.double() - predicted.double().mean(), labels.double() - labels.double().mean()
    size = a.norm() * b.norm()
    return float(a @ b / size) if size > TINY else NAN


def reliability(predicted: Tensor, labels: Tensor, bins: int = BINS) -> list[tuple[float, float, int]]:
    """For each bin of predictions that is not empty: mean prediction, mean label, how many."""
    bin_of = (predicted.double() * bins).long().clamp(0, bins - 1)
    rows = []
    for b in range(bins):
        inside = bin_of == b
        if inside.any():
            rows.append(
                (float(predicted[inside].double().mean()), float(labels[inside].double().mean()), int(inside.sum()))
            )
    return rows


def ece(predicted: Tensor, labels: Tensor, bins: int = BINS) -> float:
    """Expected calibration error: how far, on average, predictions of a bin are from what happens there."""
    return sum(n * abs(x - y) for x, y, n in reliability(predicted, labels, bins)) / len(predicted)


def auroc(scores: Tensor, positive: Tensor) -> float:
    """The chance that a positive scores above a negative; ties count half."""
    return within_auroc(scores, positive, [0] * len(scores))


def within_auroc(scores: Tensor, positive: Tensor, groups: Sequence[Hashable]) -> float:
    """The same, among pairs of one group only: what is left when the groups themselves say nothing."""
    wins, pairs = wins_within(scores, positive, numbered(groups))
    return float(wins.sum() / pairs.sum()) if pairs.any() else NAN


def refused(scores: Tensor, right: Tensor) -> float:
    """The share of the wrong steps below the highest threshold that rejects at most LOST of the right ones."""
    values, rank = scores.double().unique(return_inverse=True)
    wrong, good = torch.bincount(rank + len(values) * right, minlength=2 * len(values)).view(2, -1).double()
    return float(refused_by_rank(wrong, good))


def refused_by_rank(wrong: Tensor, right: Tensor) -> Tensor:
    """The same from how many wrong and right steps have each score [S], the lowest first; not a number without both."""
    rejected = right.cumsum(0) <= LOST * right.sum() + TINY
    some = (wrong.sum() > 0) & (right.sum() > 0)
    return torch.where(some, (wrong * rejected).sum() / wrong.sum().clamp_min(TINY), NAN)


def wins_within(scores: Tensor, positive: Tensor, group: Tensor) -> tuple[Tensor, Tensor]:
    """[N], [N] bool, [N] -> for each row how many negatives of its group it scores above, ties counting half, and how
    many there are [N]; 0 for rows that are negative themselves."""
    ranks = scores.double().unique(return_inverse=True)[1]
    height = len(scores) + 1  # more than there are ranks, so that groups do not overlap
    position = group * height + ranks
    bad = position[~positive].sort().values
    begin, end = (torch.searchsorted(bad, (group + shift) * height) for shift in (0, 1))
    below, up_to = (torch.searchsorted(bad, position, right=right) for right in (False, True))
    return ((below + up_to).double() / 2 - begin) * positive, (end - begin).double() * positive


def numbered(groups: Sequence[Hashable]) -> Tensor:
    """[N] groups by number, in the order in which they appear"""
    numbers: dict[Hashable, int] = {}
    return torch.tensor([numbers.setdefault(group, len(numbers)) for group in groups], dtype=torch.long)


def summary(
    predicted: Tensor,
    labels: Tensor,
    groups: Sequence[Hashable],
    valid: Tensor | None = None,
    scores: Tensor | None = None,
) -> dict[str, float | int | None]:
    """All of them, for a card. Positive: a label of at least LIKELY; with `valid`, also a step that is right.

    Scores are what steps are ranked by, if not the predictions themselves."""
    likely, scores = labels >= LIKELY, predicted if scores is None else scores
    values: dict[str, float] = {
        "mse": mse(predicted, labels),
        "r2": r2(predicted, labels),
        "correlation": correlation(predicted, labels),
        "ece": ece(predicted, labels),
        "auroc": auroc(scores, likely),
        "within_prefix_auroc": within_auroc(scores, likely, groups),
    }
    if valid is not None:
        values["valid_auroc"] = auroc(scores, valid)
        values["valid_within_prefix_auroc"] = within_auroc(scores, valid, groups)
        values["wrong_refused"] = refused(scores, valid)
    rounded = {name: None if value != value else round(value, 4) for name, value in values.items()}
    return {"n": len(predicted), **rounded}
