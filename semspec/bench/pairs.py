"""Samples of an arm beside those of another on the same problem and repeat, hence the same prompt and seed."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from math import fsum
from typing import Any

from semspec.bench.folder import Sample
from semspec.statistics import Estimate

Row = tuple[Sample, ...]  # a sample, or those of an arm and of the target alone
Figures = dict[str, Any]


def by_problem(rows: Iterable[Row]) -> list[list[Row]]:
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(row[0]["problem"], []).append(row)
    return list(groups.values())


def paired(ours: list[Sample], theirs: list[Sample]) -> list[Row]:
    """Samples of the same problem and repeat."""
    others = {(s["problem"], s["repeat"]): s for s in theirs}
    return [(s, other) for s in ours if (other := others.get((s["problem"], s["repeat"]))) is not None]


def sides_by_problem(pairs: list[Row], value: Callable[[Sample], float | None]) -> dict[str, tuple[float, float]]:
    """Of each problem, the mean of either side over its repeats, where both are known."""
    known = by_problem(row for row in pairs if value(row[0]) is not None and value(row[1]) is not None)

    def mean(group: list[Row], side: int) -> float:
        return fsum(value(row[side]) or 0.0 for row in group) / len(group)

    return {str(group[0][0]["problem"]): (mean(group, 0), mean(group, 1)) for group in known}


def both_sides(pairs: list[Row], value: Callable[[Sample], float | None]) -> tuple[list[float], list[float]]:
    """The same as two lists."""
    return two_lists(sides_by_problem(pairs, value).values())


def two_lists(sides: Iterable[tuple[float, float]]) -> tuple[list[float], list[float]]:
    known = list(sides)
    return [ours for ours, _ in known], [theirs for _, theirs in known]


def quotient(count: float, whole: float | None) -> float | None:
    return count / whole if whole else None


def plain(estimate: Estimate | None) -> dict[str, float | None] | None:
    return estimate.as_dict() if estimate else None
