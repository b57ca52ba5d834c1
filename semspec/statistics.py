"""Shares, ratios and differences with their intervals, paired tests, the bootstrap, the isotonic fit.

All intervals are 95 %. The unit of an interval is whatever is independent: a problem with all its repeats, or, for
seconds, a group of problems that were decoded together and share one time. Knows numpy and SciPy, nothing of the rest.
`bench/coverage.py` simulates how often each interval holds the truth.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import exp, fsum, inf, isfinite, log, nan, prod, sqrt
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import optimize, stats

CONFIDENCE = 0.95
RESAMPLES = 400
Purses = Sequence[tuple[float, float]]
PURSES: Purses = ((0.8, 0.9), (0.2, 0.5))  # of `betting_p`: how much of the wealth, and how much of it a bet may risk

Array = NDArray[np.float64]


@lru_cache
def quantile(degrees: float | None = None) -> float:
    """Of Student's t, or of the normal distribution: how many standard errors an interval reaches to either side."""
    side = (1 + CONFIDENCE) / 2
    return float(stats.norm.ppf(side) if degrees is None else stats.t.ppf(side, degrees))


@dataclass(frozen=True)
class Share:
    """So many of so many, with Wilson's interval, which is right near 0 and 1 as well. A trial may hit in part: a score
    from 0 to 1.

    `effective` is the number of independent trials that the total is worth; `degrees` are those of Student's t where
    that number is itself an estimate."""

    hits: float
    total: int
    effective: float | None = None
    degrees: float | None = None

    @staticmethod
    def clustered(clusters: Iterable[tuple[float, int]]) -> Share:
        """The share over all clusters of (hits, total), where the trials of a cluster may depend on one another.

        The spread between clusters says what a trial is worth (the design effect). It is corrected for unequal
        clusters: the large ones pull the share towards themselves, which hides their spread (HC2), and they leave
        fewer degrees of freedom (Kish's effective number of clusters, less one). A score between 0 and 1 spreads less
        than one that is either, so a trial with such scores is worth more than one."""
        rows = np.array([(h, t) for h, t in clusters if t], float).reshape(-1, 2)
        hits, totals = rows[:, 0], rows[:, 1]
        graded = bool((hits % 1).any())
        hit, total, n = fsum(hits) if graded else int(hits.sum()), int(totals.sum()), len(rows)
        if n == total and not graded:
            return Share(hit, total)
        clusters_worth = total**2 / float((totals**2).sum())
        unanimous = bool(np.isin(hits / totals, (0.0, 1.0)).all())
        if n < 2 or hit in (0, total) or (unanimous and np.ptp(totals) == 0):  # then a cluster is one trial
            return Share(hit, total, clusters_worth)
        p, weights = hit / total, totals / total
        variance = float((((hits - p * totals) / total) ** 2 / (1 - weights)).sum())
        worth = p * (1 - p) / variance if variance else float(total)
        if worth >= total and not (graded and variance):
            return Share(hit, total)
        return Share(hit, total, max(1.0, worth), max(1.0, clusters_worth - 1))

    @property
    def value(self) -> float:
        return self.hits / self.total if self.total else nan

    @property
    def interval(self) -> tuple[float, float]:
        """Wilson's; SciPy has it for whole numbers of trials only."""
        if not self.total:
            return 0.0, 1.0
        n, z = self.effective or self.total, quantile(self.degrees)
        middle = (self.value + z * z / (2 * n)) / (1 + z * z / n)
        half = z * sqrt(self.value * (1 - self.value) / n + z * z / (4 * n * n)) / (1 + z * z / n)
        return max(0.0, middle - half), min(1.0, middle + half)

    def as_dict(self) -> dict[str, Any]:
        low, high = self.interval
        return {"share": self.value, "low": low, "high": high, "hits": self.hits, "total": self.total}

    def __str__(self) -> str:
        low, high = self.interval
        return f"{100 * self.value:.1f} % [{100 * low:.1f}, {100 * high:.1f}]"


@dataclass(frozen=True)
class Estimate:
    """A figure between the ends of its interval; both are nan where there are too few units for one."""

    value: float
    low: float = nan
    high: float = nan

    def as_dict(self) -> dict[str, float | None]:
        """For JSON, which has no nan: an end that is not known is None."""
        return {k: v if isfinite(v) else None for k, v in vars(self).items()}


# -- tests


def mcnemar(gained: int, lost: int) -> float:
    """McNemar's exact test, two-sided: how often a fair coin splits the discordant pairs at least as unevenly."""
    return float(stats.binomtest(gained, gained + lost).pvalue) if gained + lost else 1.0


def mcnemar_greater(gained: int, lost: int) -> float:
    """The same test, one-sided: how often a fair coin gives that many gains or more."""
    return float(stats.binom.sf(gained - 1, gained + lost, 0.5))


def discordant(differences: Iterable[float]) -> tuple[int, int]:
    """How many pairs went up and how many down; pairs without a difference do not count."""
    signs = np.sign(list(differences))
    return int((signs > 0).sum()), int((signs < 0).sum())


def holm(values: Sequence[float | None]) -> list[float | None]:
    """p values corrected for their number (Holm), None where there was no test. SciPy controls the rate of false
    discoveries only, not the chance of a single one."""
    tested = sorted((p, i) for i, p in enumerate(values) if p is not None)
    corrected: list[float | None] = [None] * len(values)
    highest = 0.0
    for rank, (p, i) in enumerate(tested):
        highest = max(highest, min(1.0, p * (len(tested) - rank)))
        corrected[i] = highest
    return corrected


# -- bounds that hold for what was not seen (learn then test, Angelopoulos et al. 2021)


def fixed_sequence(rejected: NDArray[np.bool_], starts: Iterable[int] = (0,)) -> int | None:
    """How far walks along hypotheses in a fixed order get: the last one such that all from some start to it are
    rejected; None where each walk ends at once. An order fixed beforehand needs no correction for the number of
    hypotheses, but each walk has its share of the error that is allowed."""
    found = None
    for start in starts:
        walk = rejected[start:]
        length = len(walk) if walk.all() else int(walk.argmin())
        if length and (found is None or start + length - 1 > found):
            found = int(start) + length - 1
    return found


def betting_p(values: Array, bound: float, purses: Purses = PURSES) -> float:
    """p of "the mean of independent numbers in [0, 1] is `bound` or more" (Waudby-Smith and Ramdas 2024): the inverse
    of the most that a gambler ever has who bets on the opposite, each time as the numbers before suggest.

    The wealth is in two purses, (share, cap) each. One bets up to 0.9 of what a number of 1 takes from it, and wins
    fastest where no such number comes; the other up to 0.5, and is not ruined by the few that do come.

    Why it holds. Bets are from 0 to cap / (1 - bound) and known before the number x that they are on. So a purse is
    multiplied by 1 + bet * (bound - x) >= 1 - cap > 0, whose expectation is 1 + bet * (bound - E x) <= 1 where the mean
    is the bound or more: it is a supermartingale above 0. So is the sum of purses that begin with fixed shares of 1,
    and by Ville's inequality it ever reaches 1 / p with a probability of p at most. To take the better purse afterwards
    would not be covered: that is no sum."""
    n = len(values)
    before = np.arange(1, n + 1)
    means = (0.5 + np.concatenate([[0.0], np.cumsum(values)[:-1]])) / before
    spread = (0.25 + np.concatenate([[0.0], np.cumsum((values - means) ** 2)[:-1]])) / before
    edge = np.maximum(bound - means, 0)
    wanted = edge / (spread + edge**2 + 1e-12)
    wealth = np.full(n, -inf)
    for share, cap in purses:
        bets = np.minimum(wanted, cap / (1 - bound) if bound < 1 else cap)
        wealth = np.logaddexp(wealth, log(share) + np.cumsum(np.log1p(bets * (bound - values))))
    return float(min(1.0, np.exp(-wealth.max()))) if n else 1.0


# -- estimates


def ratio(top: ArrayLike, bottom: ArrayLike, typical: Sequence[bool] | None = None) -> Estimate | None:
    """Total of `top` / total of `bottom`; entry i of both belongs to unit i. See `product_of_ratios`.

    It is a ratio of totals because a mean of ratios would let the shortest problems decide."""
    return product_of_ratios([top], [bottom], typical)


def product_of_ratios(
    tops: Sequence[ArrayLike], bottoms: Sequence[ArrayLike], typical: Sequence[bool] | None = None
) -> Estimate | None:
    """The product of the totals of `tops` over that of `bottoms`; None where that cannot be divided.

    Its logarithm has an interval of Student's t, with the standard error of the linearised statistic (the delta
    method): what makes a unit slow on both sides cancels. At 5 to 50 units it holds the truth more often than SciPy's
    bootstraps do, BCa included. Units that are not `typical` count for the value, not for the spread."""
    above, below = np.array(tops, float), np.array(bottoms, float)
    if above.shape != below.shape:
        raise ValueError(f"a paired ratio needs pairs, not {above.shape} and {below.shape} values")
    divisors = [fsum(row) for row in below]
    if not above.shape[1] or not all(divisors):
        return None
    value = prod(fsum(row) for row in above) / prod(divisors)
    used = np.ones(above.shape[1], bool) if typical is None else np.asarray(typical, bool)
    return _around(value, above[:, used], below[:, used], int(used.sum()) - 1)


def _around(value: float, above: Array, below: Array, degrees: int | None) -> Estimate:
    """The value with the interval of its logarithm, from units [tops, N] and [bottoms, N]."""
    if not value:
        return Estimate(0.0, 0.0, 0.0)  # all units agree
    rows = np.concatenate([above, below])
    n, sums = above.shape[1], rows.sum(1, keepdims=True)
    if n < 2 or not (sums > 0).all():
        return Estimate(value)
    shares = rows / sums
    influence = shares[: len(above)].sum(0) - shares[len(above) :].sum(0)
    influence /= 1 - shares.mean(0)  # a unit pulls the ratio towards itself, which hides its spread (HC3)
    half = quantile(degrees) * float(np.linalg.norm(influence))
    return Estimate(value, value * exp(-half), value * exp(half))


def difference(
    ours: Sequence[float], theirs: Sequence[float], bounded: bool = True, usual: float | None = None
) -> Estimate | None:
    """Mean of paired differences, of numbers in [0, 1] if `bounded`, with the interval of Bonett and Price (2012).

    Two invented pairs, one up and one down, count for the interval. Without them, ten pairs that happen to agree would
    claim that the two sides never differ. `usual`: how large differences are where sides do differ, if not 1."""
    if not len(ours):
        return None
    gaps, middle, error, degrees = _padded(ours, theirs, usual)
    half, most = quantile(degrees) * error, 1.0 if bounded else inf
    return Estimate(fsum(gaps) / len(gaps), max(-most, middle - half), min(most, middle + half))


def paired_p(ours: Sequence[float], theirs: Sequence[float]) -> float | None:
    """How often chance alone gives paired differences whose mean is as far from 0, by the interval of `difference`."""
    if not len(ours):
        return None
    _, middle, error, degrees = _padded(ours, theirs)
    return 2 * _tail(abs(middle) / error, degrees)


def padded(ours: Sequence[float], theirs: Sequence[float], usual: float | None = None) -> Array:
    """The differences, and two invented ones after them."""
    gaps, size, _ = _gaps(ours, theirs, usual)
    return np.array([*gaps, size, -size])


def _padded(
    ours: Sequence[float], theirs: Sequence[float], usual: float | None = None
) -> tuple[Array, float, float, int | None]:
    """The differences, their mean with the two invented ones, its standard error, and the degrees of freedom."""
    values, degrees = padded(ours, theirs, usual), _gaps(ours, theirs, usual)[2]
    return values[:-2], float(values.mean()), float(values.std()) / sqrt(len(values)), degrees


def _tail(errors: float, degrees: int | None) -> float:
    """The chance to lie that many standard errors above."""
    return float(stats.norm.sf(errors) if degrees is None else stats.t.sf(errors, degrees))


def paired_ratio(ours: Sequence[float], theirs: Sequence[float]) -> Estimate | None:
    """Ratio of the totals of paired numbers in [0, 1], such as shares of right answers. For the interval four pairs
    are invented, one of each outcome, for the same reason as in `difference`."""
    if not len(ours) or not fsum(theirs):
        return None
    _, size, degrees = _gaps(ours, theirs)
    above, below = np.array([[*ours, size, size, 0, 0]], float), np.array([[*theirs, size, 0, size, 0]], float)
    padded = _around(float(above.sum() / below.sum()), above, below, degrees)
    return Estimate(fsum(ours) / fsum(theirs), padded.low, padded.high)


def _gaps(
    ours: Sequence[float], theirs: Sequence[float], usual: float | None = None
) -> tuple[Array, float, int | None]:
    """The differences; the size of an invented one: as those that there are, a usual one or else a whole trial where
    there are none; and the degrees of freedom: none for whole trials, whose spread follows from their number."""
    gaps = np.subtract(ours, theirs, dtype=float)
    some = gaps[gaps != 0]
    size = float(np.sqrt((some**2).mean())) if len(some) else usual or 1.0
    return gaps, size, None if np.isin(gaps, (-1.0, 0.0, 1.0)).all() else len(gaps) + 1


# -- what has no formula


def bootstrap(units: int, figures: Callable[[Array], Array], seed: int = 0) -> tuple[Array, Array]:
    """The ends of the BCa intervals of several figures [F], nan where a draw has no figure.

    `figures` maps draws [D, units], which say how often each unit is in a draw, to the figures of each draw [F, D]."""

    def statistic(drawn: NDArray[np.int_], axis: int) -> Array:
        flat = drawn.reshape(-1, drawn.shape[-1])
        counts = np.zeros((len(flat), units))
        np.add.at(counts, (np.arange(len(flat))[:, None], flat), 1)
        found = figures(counts)
        return found.reshape(len(found), *drawn.shape[:-1])

    with np.errstate(all="ignore"), warnings.catch_warnings():
        warnings.simplefilter("ignore", stats.DegenerateDataWarning)
        found = stats.bootstrap(
            (np.arange(units),), statistic, n_resamples=RESAMPLES, vectorized=True, axis=-1, method="BCa",
            confidence_level=CONFIDENCE, rng=np.random.default_rng(seed),
        )  # fmt: skip
    drawn = found.bootstrap_distribution  # [F, draws]
    low, high = np.quantile(drawn, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2], axis=-1)
    bca = found.confidence_interval
    # BCa has no answer where nearly all draws agree; their percentiles have, and are nan where a draw is.
    unknown = np.isnan(bca.low) | np.isnan(bca.high) | np.isnan(low)
    return np.where(unknown, low, bca.low), np.where(unknown, high, bca.high)


def isotonic(y: Array, weights: Array) -> tuple[Array, NDArray[np.int_]]:
    """The non-decreasing least-squares fit of y, and where its plateaus begin, with their common end."""
    fit = optimize.isotonic_regression(y, weights=weights).x
    starts = np.flatnonzero(np.diff(fit, prepend=-np.inf) > 1e-12)
    return fit, np.append(starts, len(fit))
