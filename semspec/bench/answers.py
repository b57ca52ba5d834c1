"""Right answers of an arm beside those of the target alone, by problem."""

from __future__ import annotations

from collections.abc import Mapping
from math import fsum

from semspec.bench.pairs import Figures, Row, both_sides, plain, sides_by_problem, two_lists
from semspec.bench.tost import equivalence_p
from semspec.bench.verdict import ROUNDED
from semspec.statistics import difference, discordant, mcnemar


def right_answers(pairs: list[Row]) -> tuple[list[float], list[float]]:
    """By problem, the share of right answers of either side, where both were scored."""
    return both_sides(pairs, lambda s: s["correct"])


def margins_by_problem(draft: list[Row], share: float) -> dict[str, float] | None:
    """A margin that is a share of what the draft loses, as that share of each problem's loss; None where it is 0."""
    sides = sides_by_problem(draft, lambda s: s["correct"])
    lost = fsum(ours - theirs for ours, theirs in sides.values())
    each = {problem: share * (ours - theirs) * (1 if lost > 0 else -1) for problem, (ours, theirs) in sides.items()}
    return each if abs(lost) > ROUNDED else None


def paired_test(pairs: list[Row], limit: float | None = None, unit: Mapping[str, float] | None = None) -> Figures:
    """On how many problems the one side is better and worse than the other, whether that may be chance, and whether a
    difference beyond the limit is ruled out. `unit`: the limit by problem, where it is an estimate."""
    sides = sides_by_problem(pairs, lambda s: s["correct"])
    ours, theirs = two_lists(sides.values())
    gained, lost = discordant(a - b for a, b in zip(ours, theirs, strict=True))
    p = None if limit is None else equivalence_p(ours, theirs, limit)
    if unit is not None:
        common = [problem for problem in sides if problem in unit]
        p = equivalence_p(*two_lists(sides[p] for p in common), [unit[p] for p in common])
    return {
        "gained": gained if ours else None,
        "lost": lost if ours else None,
        "mcnemar_p": mcnemar(gained, lost) if ours else None,
        "equivalence_p": p,
        "accuracy_difference": plain(difference(ours, theirs)),
    }
