"""The few statistics the bench needs, each on one screen: shares, paired tests, and ratios with intervals.

Problems are the unit of everything here. Two answers to one problem are not two independent trials, so repeats are
pooled per problem first, and intervals come from drawing problems, not samples. All intervals are 95 %.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import comb, fsum, inf, isfinite, nan, sqrt
from typing import Any

import numpy as np
from numpy.typing import NDArray

Z = 1.96
RESAMPLES = 2000


@dataclass(frozen=True)
class Share:
    """So many of so many, with Wilson's 95 % interval, which stays honest near 0 and 1.

    `effective` is the number of independent trials that the total is worth, where that is less.
    """

    hits: int
    total: int
    effective: float | None = None

    @staticmethod
    def clustered(groups: Iterable[tuple[int, int]]) -> Share:
        """The share over all groups of (hits, total), where the trials of one group may depend on one another.

        The groups' own spread says what a trial is worth: as many as counted if answers to one problem vary as much
        as answers to different ones, as few as there are problems if they are always alike. With one trial per group,
        or none that differ, this is the plain interval over groups.
        """
        kept = [(hits, total) for hits, total in groups if total]
        hits, total, n = sum(h for h, _ in kept), sum(t for _, t in kept), len(kept)
        if n == total:
            return Share(hits, total)
        if n < 2 or hits in (0, total):
            return Share(hits, total, float(n))
        p = hits / total
        variance = n / (n - 1) * fsum((h - p * t) ** 2 for h, t in kept) / total**2
        worth = p * (1 - p) / variance if variance else total
        return Share(hits, total, min(float(total), max(float(n), worth)))

    @property
    def value(self) -> float:
        return self.hits / self.total if self.total else nan

    @property
    def interval(self) -> tuple[float, float]:
        if not self.total:
            return 0.0, 1.0
        n = self.effective or self.total
        middle = (self.value + Z * Z / (2 * n)) / (1 + Z * Z / n)
        half = Z * sqrt(self.value * (1 - self.value) / n + Z * Z / (4 * n * n)) / (1 + Z * Z / n)
        return max(0.0, middle - half), min(1.0, middle + half)

    def as_dict(self) -> dict[str, Any]:
        low, high = self.interval
        return {"share": self.value, "low": low, "high": high, "hits": self.hits, "total": self.total}

    def __str__(self) -> str:
        low, high = self.interval
        return f"{100 * self.value:.1f} % [{100 * low:.1f}, {100 * high:.1f}]"


@dataclass(frozen=True)
class Estimate:
    """A figure between the ends of its 95 % interval."""

    value: float
    low: float
    high: float

    def as_dict(self) -> dict[str, float | None]:
        """For JSON, which has no infinity: an end that is not known is None."""
        return {k: v if isfinite(v) else None for k, v in vars(self).items()}

    def __str__(self) -> str:
        return f"{self.value:.3g} [{self.low:.3g}, {self.high:.3g}]"


def mcnemar(gained: int, lost: int) -> float:
    """McNemar's exact test, two-sided: how often a fair coin splits the discordant pairs at least as unevenly."""
    n = gained + lost
    return min(1.0, 2 * sum(comb(n, i) for i in range(min(gained, lost) + 1)) / 2**n)


def more_often(gained: int, lost: int) -> float:
    """The same test, one-sided: how often a fair coin gives that many gains or more."""
    n = gained + lost
    return sum(comb(n, i) for i in range(gained, n + 1)) / 2**n


def discordant(differences: Iterable[float]) -> tuple[int, int]:
    """How many pairs went up and how many down; pairs without a difference say nothing."""
    kept = list(differences)
    return sum(d > 0 for d in kept), sum(d < 0 for d in kept)


def ratio(top: Sequence[float], bottom: Sequence[float], seed: int = 0) -> Estimate | None:
    """Total of `top` / total of `bottom` with a paired bootstrap interval; None where that cannot be divided.

    Entry i of both belongs to problem i, and problems are drawn with replacement: what makes a problem slow for both
    sides then cancels. It is a ratio of totals because a mean of ratios would let the shortest problems decide.
    """
    above, below = np.asarray(top, float), np.asarray(bottom, float)
    if above.shape != below.shape:
        raise ValueError(f"a paired ratio needs pairs, not {len(above)} and {len(below)} values")
    if not len(below) or not fsum(below):
        return None
    drawn = draws(len(above), seed)  # [resamples, problems]
    tops, bottoms = drawn @ above, drawn @ below
    divided = np.full(len(drawn), nan)
    np.divide(tops, bottoms, out=divided, where=bottoms > 0)
    divided[(bottoms == 0) & (tops > 0)] = inf
    divided = divided[~np.isnan(divided)]
    low = float(np.percentile(divided, 2.5, method="lower"))
    high = float(np.percentile(divided, 97.5, method="higher"))
    return Estimate(fsum(above) / fsum(below), low, high)


def mean(values: Sequence[float], seed: int = 0) -> Estimate | None:
    """The mean over problems with a bootstrap interval."""
    return ratio(values, np.ones(len(values)).tolist(), seed)


@lru_cache(maxsize=8)
def draws(problems: int, seed: int) -> NDArray[np.float64]:
    """How often each problem is drawn in each resample, the same for all arms of a run."""
    rng = np.random.default_rng(seed)
    chosen = rng.integers(0, problems, (RESAMPLES, problems))
    return np.stack([np.bincount(row, minlength=problems) for row in chosen]).astype(float)


def difference(differences: Sequence[float]) -> Estimate | None:
    """Mean of paired differences that lie in [-1, 1], with the interval of Bonett and Price (2012).

    Two invented pairs, one up and one down, are added for the interval. Without them, ten pairs that happen to agree
    would claim that the two sides never differ; and for a few dozen pairs the interval holds what it says.
    """
    if not differences:
        return None
    with_two = [*differences, 1.0, -1.0]
    n = len(with_two)
    middle = fsum(with_two) / n
    spread = Z * sqrt(max(0.0, fsum(d * d for d in with_two) / n - middle**2) / n)
    return Estimate(fsum(differences) / len(differences), max(-1.0, middle - spread), min(1.0, middle + spread))
