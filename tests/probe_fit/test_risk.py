"""Thresholds from a bound on risk: the bound holds as often as promised, and a careless one is found out."""

from __future__ import annotations

from random import Random

import pytest

import semspec.probe_fit.risk
from semspec.errors import BadRequest
from semspec.probe_fit.risk import Bound, choose_threshold, one_each, thresholds, try_splits


def world(rng: Random, n: int) -> tuple[list[float], list[bool]]:
    """Steps that are bad the more often the less a judge thinks of them."""
    scores = [rng.random() for _ in range(n)]
    return scores, [rng.random() < 0.3 * (1 - score) ** 2 for score in scores]


def true_risk(threshold: float) -> float:
    """The chance that a step of at least this score is bad in that world."""
    return 0.1 * (1 - threshold) ** 2


def broken(choose: object, runs: int = 200) -> float:
    """How often the promise of 5 % is broken."""
    rng, count, silent = Random(1), 0, 0
    for _ in range(runs):
        scores, bad = world(rng, 1500)
        try:
            count += true_risk(choose(scores, bad)) > 0.05  # type: ignore[operator]
        except BadRequest:  # nothing promised, nothing broken
            silent += 1
    assert silent < 0.1 * runs
    return count / runs


def careless(scores: list[float], bad: list[bool]) -> float:
    """Takes what was seen for what is: the lowest threshold with at most 5 % bad among those that are accepted."""
    for threshold in (i / 200 for i in range(201)):
        above = [b for s, b in zip(scores, bad, strict=True) if s >= threshold]
        if above and sum(above) / len(above) <= 0.05:
            return threshold
    return 1.0


def test_the_bound_holds_as_often_as_promised_and_a_careless_one_does_not() -> None:
    careful = broken(lambda scores, bad: choose_threshold(scores, bad, risk=0.05, confidence=0.95).threshold)
    assert careful < 0.05 + 0.025 and broken(careless) > 0.3


def test_splits_of_one_collection_keep_the_promise_and_catch_a_careless_calibrator(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    scores, bad = world(Random(5), 3000)
    careful = try_splits(scores, bad, 0.05, 0.95, 200)
    assert (
        careful.violated < 0.05 * 200
        and not careful.impossible
        and 0.4 < careful.accepted < 0.75
        and careful.bad < 0.05
    )
    monkeypatch.setattr(
        semspec.probe_fit.risk, "choose_threshold", lambda s, b, r, c: Bound(careless(s, b), r, c, len(s), 0, 0)
    )
    assert try_splits(scores, bad, 0.05, 0.95, 200).violated > 0.3 * 200
    monkeypatch.undo()
    assert try_splits(scores[:60], bad[:60], 0.02, 0.95, 10).impossible == 10


def test_it_is_not_needlessly_strict() -> None:
    scores, bad = world(Random(3), 20_000)
    bound = choose_threshold(scores, bad, risk=0.05, confidence=0.95)
    assert 0.29 < bound.threshold < 0.4 and bound.steps == 20_000, "0.293 is the least that is safe"
    assert bound.accepted == sum(score >= bound.threshold for score in scores) and bound.bad < 0.05 * bound.accepted


def test_thresholds_are_where_the_steps_are() -> None:
    """A judge that is sure of nearly all: its scores differ in the fourth digit, and so do the thresholds."""
    rng = Random(7)
    scores = [0.999 + 0.001 * rng.random() for _ in range(20_000)]
    bad = [rng.random() < 120 * (1 - score) for score in scores]  # from 12 % down to none
    grid = thresholds(scores)
    assert grid == sorted(set(grid), reverse=True) and grid[-1] == min(scores) and len(grid) == 200
    bound = choose_threshold(scores, bad, risk=0.02, confidence=0.95)
    assert 0.99966 < bound.threshold < 0.9998 and bound.bad <= 0.02 * bound.accepted, (
        "0.99967 is the least that is safe"
    )
    assert thresholds([0.5, 0.5, 0.9]) == [0.9, 0.5] and thresholds([]) == []


def test_too_few_steps_are_said_to_be_too_few() -> None:
    with pytest.raises(BadRequest, match="collect more problems, or allow more risk"):
        choose_threshold([0.9] * 20, [False] * 20, risk=0.02, confidence=0.95)
    with pytest.raises(BadRequest, match="give numbers between 0 and 1"):
        choose_threshold([0.9], [False], risk=0, confidence=0.95)


def test_one_of_each_group() -> None:
    groups = ["a", "b", "a", "c", "b", "a"]
    assert [groups[i] for i in one_each(groups)] == ["a", "b", "c"]
    assert len({tuple(one_each(groups, seed)) for seed in range(30)}) > 2
