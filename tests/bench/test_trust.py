"""The check of calibrations by splits passes a careful choice and finds a careless one; shares of a run are joined."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from bench import trust
from bench.trust import LADDERS, calibrations, outcomes_of, splits, whole_run
from tests.bench import test_measures
from tests.bench.test_measures import made_up, swapped


def table(problems: int = 400) -> np.ndarray:
    """Settings that lose more and more, each what the one before loses; the bound of 5 % lies between two of them."""
    seen = np.random.default_rng(3).random(problems)
    return np.stack([(seen < share).astype(float) for share in (0.0, 0.02, 0.045, 0.055, 0.08, 0.2)])


def test_a_careful_choice_holds_on_the_other_half_and_a_careless_one_does_not() -> None:
    found = splits(table(), 0.05, 1.0, seed=1)
    assert found["broken_surely"] <= 0.05 * found["splits"] + 3 * np.sqrt(0.05 * 0.95 * found["splits"])
    assert found["careless_broken"] > 3 * max(1, found["broken"]) and found["careless_broken"] > 0.3 * found["splits"]
    assert sum(found["chosen"]) + found["none_safe"] == found["splits"]


def test_a_calibrator_that_looks_at_nothing_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trust, "loosest_safe", lambda losses, *_: len(losses) - 1)
    assert splits(table(), 0.05, 1.0, seed=1)["broken_surely"] == trust.SPLITS


def test_a_result_says_when_where_and_by_what_it_was_made(tmp_path: Path) -> None:
    trust.report({"problems": 3}, tmp_path / "result.json")
    found = json.loads((tmp_path / "result.json").read_text())
    assert found["problems"] == 3 and found["created"].startswith("20") and found["versions"]["semspec"]
    assert "git" in found and "cpu" in found["hardware"]


def sample(arm: str, problem: str, correct: bool, number: int) -> dict[str, object]:
    text = f"</think>\n\nThe answer is {number}."
    return {"arm": arm, "problem": problem, "repeat": 0, "correct": correct, "text": text, "index": 0}


def test_shares_become_one_run_of_problems_that_all_arms_have(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    methods = [m for ladder in LADDERS.values() for m in ladder]
    roles = {"none": "target", "resampled": "resampled", "resampled 2": "resampled", "draft": "draft"}
    arms = [{"name": name, "role": roles.get(name, "method")} for name in (*roles, *methods)]
    for share in range(2):
        folder = tmp_path / f"share-{share:02}"
        folder.mkdir()
        (folder / "run.json").write_text(json.dumps({"arms": arms, "config": {}}))
        rows = [
            sample(arm["name"], f"p{share}{i}", arm["name"] != "draft", 7 + (arm["name"] == "draft"))
            for i in range(3)
            for arm in arms[: None if i or share else -1]  # the last arm has not answered p00 yet
        ]
        (folder / "samples.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    run, samples = whole_run(tmp_path)
    assert {s["problem"] for s in samples} == {"p01", "p02", "p10", "p11", "p12"}
    outcomes = outcomes_of(run, samples, {})
    assert outcomes["accuracy"]["none"] == [1.0] * 5 and outcomes["accuracy"]["draft"] == [0.0] * 5
    assert outcomes["number"][methods[0]] == [1.0] * 5 and outcomes["number"]["draft"] == [0.0] * 5
    monkeypatch.setattr(trust, "SPLITS", 3)
    assert calibrations(outcomes)["fly"]["with answers, 0.1"]["none_safe"] == 3  # five problems show nothing


@pytest.mark.parametrize(("n", "seen"), [(400, True), (150, False)])
def test_damage_in_two_answers_of_a_hundred_is_found_or_too_little_to_be_seen(
    n: int, seen: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One digit swapped: with 400 prompts the number finds it, with 150 it says that it shows only larger losses."""
    monkeypatch.setattr(test_measures, "N", n)
    damaged = lambda i: f"There are {10 * i + 3 * (i % 50 == 27)} apples."  # noqa: E731
    run, samples = made_up(**{trust.DAMAGED: damaged, "random:rate=0.5": swapped(5)})
    number = trust.damage(run, samples, {})["number"]
    assert number["difference"] == pytest.approx(-0.02) and number["found"] == seen
    assert (number["visible_from"] > 0.02) != seen


def test_a_measure_that_follows_accuracy_ranks_methods_as_accuracy_does() -> None:
    """The likelihood here is of another order on purpose: its rank correlation shows that."""
    shares = {f"random:rate=0.{i}": i for i in range(2, 9)}
    run, samples = made_up(**{name: swapped(share) for name, share in shares.items()})
    for one in samples:
        number = int("".join(filter(str.isdigit, one["text"])))
        one["correct"] = number == 10 * one["index"]
        level = -float(shares.get(one["arm"], 1))
        one["likelihood"] = {"one": level, "request": level, "lowest": level, "tokens": 9}
    found = trust.correlations(run, samples, {})
    assert found["number"]["spearman"] > 0.95 and found["number"]["low"] > 0.7
    assert found["likelihood"]["spearman"] < -0.8 and found["likelihood"]["methods"] == 8
