"""Two one-sided tests (TOST): is a difference beyond a margin ruled out, in either direction?

An arm that spoils a few answers badly and leaves the others alone has differences of a long tail. Where few of the
spoilt ones were drawn, the mean is near 0 *and* the spread small, so a test that takes the spread as found calls such
an arm equivalent too often: by Student's t in 6 to 9 % of runs in which just the margin is lost, and in up to 14 % at
50 problems, where 5 are allowed. Here right and wrong are tested with the spread that a loss of the margin would have
(Tango 1998; where none is gained, exactly), and graded differences with their skewness taken into account (Hall 1992).
No skewness shows in answers of which none is spoilt: with so few that this may be chance, nothing is ruled out.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import sqrt

import numpy as np
from scipy import stats

from semspec.statistics import Array, padded

Margin = float | Sequence[float]


def equivalence_p(
    ours: Sequence[float], theirs: Sequence[float], margin: Margin, usual: float | None = None, worst: float = 1.0
) -> float | None:
    """The larger p of "we lose at least the margin" and "we gain at least the margin".

    A margin that is itself estimated is given by problem, so that what is uncertain about it is a part of the test.
    `usual`: as in `semspec.statistics.difference`; `worst`: the most that one answer loses."""
    if not len(ours):
        return None
    gaps = np.subtract(ours, theirs, dtype=float)
    if isinstance(margin, float | int) and np.isin(gaps, (-1.0, 0.0, 1.0)).all() and (usual is None or gaps.any()):
        gained, lost = int((gaps > 0).sum()), int((gaps < 0).sum())
        return max(_few_enough(lost, gained, len(gaps), margin), _few_enough(gained, lost, len(gaps), margin))
    invented = padded(ours, theirs, usual)[len(gaps) :]
    margins = np.broadcast_to(np.asarray(margin, float), gaps.shape)
    more = np.full(len(invented), margins.mean())
    within = [np.concatenate([side * gaps + margins, side * invented + more]) for side in (1, -1)]
    # So often are all answers drawn good ones, where the margin is lost by a few that lose the worst.
    missed = min(1.0, max(0.0, 1 - float(margins.mean()) / worst)) ** len(gaps)
    return max(missed, *(_not_above_zero(one) for one in within))


def _few_enough(lost: int, gained: int, n: int, margin: float) -> float:
    """p of "the share of pairs lost is that of pairs gained and the margin, or more". The score counts standard errors
    as they would be if just the margin were lost: the likeliest share of lost pairs is then the root of a square
    equation. Where nothing is gained, so few losses have an exact probability, too, which is larger if they are few."""
    b, c = -(2 * n - gained + lost) * margin - gained - lost, lost * margin * (1 + margin)
    share = (sqrt(max(b * b - 8 * n * c, 0.0)) - b) / (4 * n)
    variance = n * (2 * share - margin * (1 + margin))
    score = (gained - lost + n * margin) / sqrt(variance) if variance > 0 else 0.0
    exact = 0.0 if gained else float(stats.binom.cdf(lost, n, margin))
    return max(float(stats.norm.sf(score)), exact)


def _not_above_zero(values: Array) -> float:
    """p of "the mean is 0 or less", by Hall's transformation of Student's t."""
    n, mean, spread = len(values), float(values.mean()), float(values.std())
    if not spread:
        return float(mean <= 0)
    t, skewness = mean / spread * sqrt(n), float(((values - mean) ** 3).mean()) / spread**3
    by = skewness / sqrt(n)
    return float(stats.t.sf(t + by * t * t / 3 + by * by * t**3 / 27 + by / 6, n - 1))
