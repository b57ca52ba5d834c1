"""The verdict on an arm beside its difference: equivalent, worse, better or unclear.

Equivalent: two one-sided tests (TOST) rule out a difference beyond the margin, in either direction. Worse and better: a
difference is shown, and it may lie beyond the margin. Each of the two tests is corrected for the number of arms (Holm).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import ceil, log, log1p
from typing import TypeGuard

from semspec.bench.pairs import Figures
from semspec.errors import BadRequest
from semspec.statistics import holm

ALPHA = 0.05
POINTS = 0.03  # of accuracy
ROUNDED = 1e-9  # what sums of shares that are 0 are off by, and more
SHARE = 0.15  # of the distance from the target to the draft: about as much as 3 points on the pocket pair
MIN_PROBLEMS = 5  # in common with the target alone; with fewer there is no verdict on speed or quality


@dataclass(frozen=True)
class Margin:
    """How much may be lost: points of accuracy, or a share of the distance from the target to the draft alone. Measures
    without right answers have no points of accuracy, so for them it is always a share."""

    points: float | None = None
    share: float | None = None

    @staticmethod
    def parse(text: str | None) -> Margin:
        """ "3" is three points of accuracy, "15%" a share of the distance to the draft."""
        if text is None:
            return Margin()
        number, percent = text.strip().removesuffix("%"), text.strip().endswith("%")
        try:
            value = float(number) / 100
        except ValueError:
            value = 0.0
        if not 0 < value < 1:
            raise BadRequest(
                f"the margin is {text!r}; give points of accuracy, as 3, or a share of the distance from the target to "
                "the draft, as 15%"
            )
        return Margin(share=value) if percent else Margin(points=value)

    def of_accuracy(self, distance: float | None) -> float | None:
        """`distance`: what the draft alone loses; None where that is not known."""
        if self.share is None:
            return self.points or POINTS
        return self.share * abs(distance) if _some(distance) else None

    def of_measure(self, distance: float | None) -> float | None:
        return (self.share or SHARE) * abs(distance) if _some(distance) else None

    def words(self) -> str:
        if self.share is None:
            return f"{100 * (self.points or POINTS):g} points"
        return f"{100 * self.share:g} % of the distance from the target to the draft"


def _some(distance: float | None) -> TypeGuard[float]:
    return distance is not None and abs(distance) > ROUNDED


def correct(figures: Mapping[str, Figures], arms: Iterable[str], p: str) -> None:
    """Add p values that are corrected for the number of arms, under the name of the uncorrected ones with _holm."""
    names = list(arms)
    for name, corrected in zip(names, holm([figures[name].get(p) for name in names]), strict=True):
        figures[name][f"{p}_holm"] = corrected


def problems_alike(share: float | None, arms: int) -> int:
    """How many answers must be the same, token for token, and none another, so that more changed ones than this share
    are ruled out: the margin, where a changed one is lost. Corrected for the number of arms."""
    return ceil(log(ALPHA / max(1, arms)) / log1p(-min(share or POINTS, 1 - ROUNDED)))


def decide(p_differs: float | None, p_equivalent: float | None, loses: bool) -> str:
    """Both p values corrected. A shown difference within the margin is equivalent: the margin is what may be lost."""
    if p_equivalent is not None and p_equivalent < ALPHA:
        return "equivalent"
    if p_differs is not None and p_differs < ALPHA:
        return "worse" if loses else "better"
    return "unclear"
