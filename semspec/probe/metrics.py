"""How good predictions of a probability are. Vectors [N] of predictions and of labels, which are shares in [0, 1]."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import torch
from torch import Tensor

NAN = float("nan")


def mse(said: Tensor, labels: Tensor) -> float:
    return float((said.double() - labels.double()).square().mean())


def r2(said: Tensor, labels: Tensor) -> float:
    """The share of the labels' variance that is explained; negative: worse than always saying their mean."""
    labels = labels.double()
    spread = (labels - labels.mean()).square().sum()
    return float(1 - (said.double() - labels).square().sum() / spread) if spread > 0 else NAN


def correlation(said: Tensor, labels: Tensor) -> float:
    """Pearson's."""
    a, b = said.double() - said.double().mean(), labels.double() - labels.double().mean()
    size = a.norm() * b.norm()
    return float(a @ b / size) if size > 0 else NAN


def reliability(said: Tensor, labels: Tensor, bins: int = 10) -> list[tuple[float, float, int]]:
    """For each bin of predictions that is not empty: mean prediction, mean label, how many."""
    place = (said.double() * bins).long().clamp(0, bins - 1)
    rows = []
    for b in range(bins):
        inside = place == b
        if inside.any():
            rows.append((float(said[inside].double().mean()), float(labels[inside].double().mean()), int(inside.sum())))
    return rows


def ece(said: Tensor, labels: Tensor, bins: int = 10) -> float:
    """Expected calibration error: how far, on average, predictions of a bin are from what happens there."""
    return sum(n * abs(x - y) for x, y, n in reliability(said, labels, bins)) / len(said)


def auroc(scores: Tensor, positive: Tensor) -> float:
    """The chance that a positive scores above a negative; ties count half."""
    wins, pairs = _wins(scores, positive)
    return wins / pairs if pairs else NAN


def within_auroc(scores: Tensor, positive: Tensor, groups: Sequence[Hashable]) -> float:
    """The same, among pairs of one group only: what is left when the groups themselves say nothing."""
    members: dict[Hashable, list[int]] = {}
    for i, group in enumerate(groups):
        members.setdefault(group, []).append(i)
    found = [_wins(scores[rows], positive[rows]) for rows in members.values()]
    pairs = sum(n for _, n in found)
    return sum(wins for wins, _ in found) / pairs if pairs else NAN


def _wins(scores: Tensor, positive: Tensor) -> tuple[float, int]:
    """How many of the (positive, negative) pairs are in the right order, and how many there are."""
    good, bad = scores[positive].double(), scores[~positive].double().sort().values
    below = torch.searchsorted(bad, good, right=False)
    below_or_equal = torch.searchsorted(bad, good, right=True)
    return float((below + below_or_equal).double().sum() / 2), len(good) * len(bad)


def summary(
    said: Tensor, labels: Tensor, groups: Sequence[Hashable], valid: Tensor | None = None, threshold: float = 0.5
) -> dict[str, float | int | None]:
    """All of them, for a card. Positive: a label of at least the threshold; with `valid`, also a step that is right."""
    likely = labels >= threshold
    values: dict[str, float] = {
        "mse": mse(said, labels),
        "r2": r2(said, labels),
        "correlation": correlation(said, labels),
        "ece": ece(said, labels),
        "auroc": auroc(said, likely),
        "within_prefix_auroc": within_auroc(said, likely, groups),
    }
    if valid is not None:
        values["valid_auroc"] = auroc(said, valid)
        values["valid_within_prefix_auroc"] = within_auroc(said, valid, groups)
    rounded = {name: None if value != value else round(value, 4) for name, value in values.items()}
    return {"n": len(said), **rounded}
