"""A threshold from a bound on risk: how sure must a judge be, so that few of the steps it lets stand are bad?

Learn then test (Angelopoulos et al. 2021), with one draft step of each problem, so that trials are independent. From
some threshold down, the hypothesis "more than `risk` of the steps that stand are bad" is tested with the exact binomial
tail, until one cannot be rejected; the last one rejected is safe. Testing in a fixed order needs no correction for
having tested many, but one unlucky step ends it, so several walks begin at different thresholds and share the error
that is allowed between them.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import exp, lgamma, log, log1p
from random import Random

from semspec.errors import BadRequest

TRIED = 200  # thresholds
WALKS = 6


@dataclass(frozen=True)
class Bound:
    """A threshold with what is promised and what was seen of it."""

    least: float
    risk: float
    confidence: float
    steps: int  # on which it was chosen
    stood: int
    bad: int


def binomial_tail(bad: int, n: int, risk: float) -> float:
    """The chance of seeing so few bad ones, or fewer, among n, if each is bad with this probability."""
    if risk <= 0 or n == 0:
        return 1.0
    if risk >= 1:
        return float(bad >= n)
    logs = [
        lgamma(n + 1) - lgamma(k + 1) - lgamma(n - k + 1) + k * log(risk) + (n - k) * log1p(-risk)
        for k in range(bad + 1)
    ]
    return min(1.0, sum(exp(term) for term in logs))


def choose_least(scores: list[float], bad: list[bool], risk: float, confidence: float) -> Bound:
    """The lowest threshold that is safe, over independent steps with their scores and whether they are bad."""
    if not 0 < risk < 1 or not 0 < confidence < 1:
        raise BadRequest(f"risk is {risk} and confidence {confidence}; give numbers between 0 and 1")
    level = (1 - confidence) / WALKS
    grid = thresholds(scores)
    counts = [_stood(scores, bad, least) for least in grid]
    # Where a walk begins may depend on how many steps stand, but not on how many of them are bad.
    testable = [i for i, (n, _) in enumerate(counts) if binomial_tail(0, n, risk) <= level]
    found: Bound | None = None
    for start in testable[:: max(1, -(-len(testable) // WALKS))]:
        for least, (n, wrong) in zip(grid[start:], counts[start:], strict=True):
            if binomial_tail(wrong, n, risk) > level:
                break
            if found is None or least < found.least:
                found = Bound(least, risk, confidence, len(scores), n, wrong)
    if found is None:
        raise BadRequest(
            f"{len(scores)} steps do not show that any threshold keeps bad steps under {risk:g} with confidence "
            f"{confidence:g}; collect more problems, or allow more risk"
        )
    return found


def thresholds(scores: list[float]) -> list[float]:
    """Thresholds to try, the strictest first: scores themselves, each about as many steps below the one before.

    A judge is sure of most steps, so their scores crowd together below 1, where evenly spaced thresholds hardly tell
    them apart. To take them from the steps is no peeking: given the score at some rank, those above it are bad
    independently of one another and of it."""
    ranked = sorted(scores, reverse=True)
    every = max(1, -(-len(ranked) // TRIED))
    return sorted({*ranked[every - 1 :: every], *ranked[-1:]}, reverse=True)


@dataclass(frozen=True)
class Splits:
    """How a bound fared over random halves: chosen on one, tried on the other."""

    splits: int
    broken: int  # more of the other half's standing steps were bad than the bound allows
    refused: int  # too few steps to promise anything
    stood: float  # share of the other half's steps, on average
    bad: float  # share of those, on average


def try_splits(scores: list[float], bad: list[bool], risk: float, confidence: float, splits: int) -> Splits:
    """Does the promise hold on these very steps? It should break in at most 1 - confidence of the splits, or a little
    more: the other half is a sample too, and halves overlap."""
    broken = refused = 0
    stood, wrong = [], []
    for seed in range(splits):
        order = list(range(len(scores)))
        Random(seed).shuffle(order)
        mine, other = order[: len(order) // 2], order[len(order) // 2 :]
        try:
            bound = choose_least([scores[i] for i in mine], [bad[i] for i in mine], risk, confidence)
        except BadRequest:
            refused += 1
            continue
        n, fell = _stood([scores[i] for i in other], [bad[i] for i in other], bound.least)
        broken += fell > risk * n
        stood.append(n / len(other))
        wrong.append(fell / max(n, 1))
    tried = max(1, len(stood))
    return Splits(splits, broken, refused, sum(stood) / tried, sum(wrong) / tried)


def _stood(scores: list[float], bad: list[bool], least: float) -> tuple[int, int]:
    """How many steps stand at this threshold, and how many of them are bad."""
    above = [b for s, b in zip(scores, bad, strict=True) if s >= least]
    return len(above), sum(above)


def one_each(groups: list[str], seed: int = 0) -> list[int]:
    """The place of one member of each group, at random: members of a group are not independent."""
    members: dict[str, list[int]] = {}
    for i, group in enumerate(groups):
        members.setdefault(group, []).append(i)
    rng = Random(seed)
    return [places[int(rng.random() * len(places))] for _, places in sorted(members.items())]
