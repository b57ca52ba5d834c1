"""A threshold from a bound on risk: how high must a judge probe's score be, so that few of the accepted steps are bad?

Learn then test (Angelopoulos et al. 2021), with one draft step of each problem, so that trials are independent. From
some threshold down, the hypothesis "more than `risk` of the accepted steps are bad" is tested with the exact binomial
tail, until one cannot be rejected; the last one rejected is safe. Testing in a fixed order needs no correction for
having tested many, but one unlucky step ends it, so several walks begin at different thresholds and share the error
that is allowed between them.
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

import numpy as np
from scipy import stats

from semspec.errors import BadRequest
from semspec.statistics import fixed_sequence

MAX_THRESHOLDS = 200
WALKS = 6


@dataclass(frozen=True)
class Bound:
    """A threshold with what is promised and what was seen of it."""

    threshold: float
    risk: float
    confidence: float
    steps: int  # on which it was chosen
    accepted: int
    bad: int  # of the accepted


def choose_threshold(scores: list[float], bad: list[bool], risk: float, confidence: float) -> Bound:
    """The lowest threshold that is safe, over independent steps with their scores and whether they are bad."""
    if not 0 < risk < 1 or not 0 < confidence < 1:
        raise BadRequest(f"risk is {risk} and confidence {confidence}; give numbers between 0 and 1")
    level = (1 - confidence) / WALKS
    grid = thresholds(scores)
    accepted, wrong = np.array([_accepted(scores, bad, threshold) for threshold in grid]).reshape(-1, 2).T
    # Where a walk begins may depend on how many steps are accepted, but not on how many of them are bad.
    testable = np.flatnonzero(stats.binom.cdf(0, accepted, risk) <= level)
    rejected = stats.binom.cdf(wrong, accepted, risk) <= level
    found = fixed_sequence(rejected, testable[:: max(1, -(-len(testable) // WALKS))])
    if found is None:
        raise BadRequest(
            f"{len(scores)} steps do not show that any threshold keeps bad steps under {risk:g} with confidence "
            f"{confidence:g}; collect more problems, or allow more risk"
        )
    return Bound(grid[found], risk, confidence, len(scores), int(accepted[found]), int(wrong[found]))


def thresholds(scores: list[float]) -> list[float]:
    """Thresholds to try, the strictest first: scores themselves, each about as many steps below the one before.

    A judge probe is sure of most steps, so their scores crowd together below 1, where evenly spaced thresholds hardly
    tell them apart. To take them from the steps is no peeking: given the score at some rank, those above it are bad
    independently of one another and of it."""
    ranked = sorted(scores, reverse=True)
    every = max(1, -(-len(ranked) // MAX_THRESHOLDS))
    return sorted({*ranked[every - 1 :: every], *ranked[-1:]}, reverse=True)


@dataclass(frozen=True)
class Splits:
    """How a bound fared over random halves: chosen on one, tried on the other."""

    splits: int
    violated: int  # more of the other half's accepted steps were bad than the bound allows
    impossible: int  # too few steps to promise anything
    accepted: float  # share of the other half's steps, on average
    bad: float  # share of those, on average


def try_splits(scores: list[float], bad: list[bool], risk: float, confidence: float, splits: int) -> Splits:
    """Does the promise hold on these very steps? It should be violated in at most 1 - confidence of the splits, or a
    little more: the other half is a sample too, and halves overlap."""
    violated = impossible = 0
    accepted, wrong = [], []
    for seed in range(splits):
        order = list(range(len(scores)))
        Random(seed).shuffle(order)
        half, rest = order[: len(order) // 2], order[len(order) // 2 :]
        try:
            bound = choose_threshold([scores[i] for i in half], [bad[i] for i in half], risk, confidence)
        except BadRequest:
            impossible += 1
            continue
        n, failed = _accepted([scores[i] for i in rest], [bad[i] for i in rest], bound.threshold)
        violated += failed > risk * n
        accepted.append(n / len(rest))
        wrong.append(failed / max(n, 1))
    tried = max(1, len(accepted))
    return Splits(splits, violated, impossible, sum(accepted) / tried, sum(wrong) / tried)


def _accepted(scores: list[float], bad: list[bool], threshold: float) -> tuple[int, int]:
    """How many steps are accepted at this threshold, and how many of them are bad."""
    above = [b for s, b in zip(scores, bad, strict=True) if s >= threshold]
    return len(above), sum(above)


def one_each(groups: list[str], seed: int = 0) -> list[int]:
    """The index of one member of each group, at random: members of a group are not independent."""
    members: dict[str, list[int]] = {}
    for i, group in enumerate(groups):
        members.setdefault(group, []).append(i)
    rng = Random(seed)
    return [own[int(rng.random() * len(own))] for _, own in sorted(members.items())]
