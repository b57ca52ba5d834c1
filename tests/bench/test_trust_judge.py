"""Judges held against right answers: a planted one that is often right, one of places, and one that says nothing."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from bench import planted_judge as planted
from bench import trust
from bench.planted_judge import NAME, SKILL, planted_judge, reply_to
from bench.trust_judge import MEASURE, habits, judge_at, measures
from semspec import tasks
from semspec.bench.examples import asked
from semspec.bench.folder import Sample
from semspec.bench.judge_model import PROMPT, JudgeModel, Opinion
from semspec.bench.outside import outside_measures
from tests.bench.test_summary import arm, sample

N, SHARES = 150, (0, 2, 5, 10, 20, 30, 50, 70)  # problems; answers of a hundred that a method gets wrong
TASK = tasks.make("pocket:split=probe")


class Places(JudgeModel):
    """Takes the first, whatever it says."""

    def opinion(self, question: str, ours: str, theirs: str) -> Opinion:
        return Opinion((1.0, 1.0), (200, 1))


class Mute(JudgeModel):
    def opinion(self, question: str, ours: str, theirs: str) -> Opinion:
        return Opinion((None, 0.0), (200, 9))


@cache
def problems() -> list[tasks.Problem]:
    return TASK.problems(N, 901)


def made_run() -> tuple[dict[str, Any], list[Sample]]:
    roles = {"none": "target", "resampled": "resampled", "draft": "draft"}
    wrong = {"none": 0, "resampled": 1, "draft": 40} | {f"random:k=15,rate=0.{share:02}": share for share in SHARES}
    samples = []
    for name, share in wrong.items():
        for i, problem in enumerate(problems()):
            right = (i * 37) % 100 >= share
            text = f"So the answer is {int(problem.answer) + (not right)}."
            samples.append(sample(name, i, problem=problem.id, text=text, correct=right, **asked(problem)))
    return {"arms": [arm(name, roles.get(name, "method")) for name in wrong], "config": {}}, samples


def judged(folder: Path, judge: JudgeModel) -> tuple[dict[str, Any], list[Sample]]:
    run, samples = made_run()
    outside_measures(folder, run, samples, "none", judge)
    return run, samples


def test_a_planted_judge_ranks_methods_as_accuracy_does_and_is_kept(tmp_path: Path) -> None:
    with planted_judge(problems()) as url:
        run, samples = judged(tmp_path, JudgeModel(url, NAME, N, 32))
    extra = measures(tmp_path, run, samples)
    found = trust.correlations(run, samples, extra)[MEASURE.format(NAME)]
    assert found["spearman"] > 0.9 and found["low"] > 0.6 and found["problems"] == N
    about = habits(tmp_path, samples, extra)[NAME]
    assert about["requests"] == 2 * about["pairs_asked"] <= 2 * N, "of one other answer to each problem"
    told = about["of_right_and_wrong"]  # in one order 0.9, in both 0.81; in neither 0.01
    assert told["right"] == pytest.approx((SKILL + (1 - SKILL) / 2) ** 2, abs=0.1) and told["wrong"] < 0.06
    assert about["orders_contradict"] == round(told["neither"] * told["of"])
    assert about["replies"]["took the first"] == pytest.approx(0.5, abs=0.1) and about["replies"]["unreadable"] == 0
    assert trust.separated(run, samples, extra)[MEASURE.format(NAME)]["separates_random"]


def test_a_judge_of_places_ranks_nothing_and_both_judges_are_shown(tmp_path: Path) -> None:
    judged(tmp_path, Places("http://127.0.0.1:1/v1", "places", N))
    run, samples = judged(tmp_path, Mute("http://127.0.0.1:1/v1", "mute", 30))
    extra = measures(tmp_path, run, samples)
    found = trust.correlations(run, samples, extra)
    assert found["judge: places"] | {"methods": 0} == {
        "spearman": None, "low": None, "high": None, "methods": 0, "problems": N
    }  # fmt: skip
    about = habits(tmp_path, samples, extra)
    assert about["places"]["replies"]["took the first"] == 1 and about["places"]["of_right_and_wrong"]["neither"] == 1
    assert about["places"]["orders_contradict"] == about["places"]["pairs_asked"]
    assert about["places"]["tokens_read"] == 200 * about["places"]["pairs_asked"]
    assert about["mute"]["replies"]["unreadable"] == 0.5 and about["mute"]["of_right_and_wrong"]["of"] == 0
    assert not trust.separated(run, samples, extra)["judge: places"]["separates_random"]
    json.dumps([found, about], allow_nan=False)


def test_what_was_said_of_answers_that_were_made_again_tells_nothing_of_those_of_now(tmp_path: Path) -> None:
    run, samples = judged(tmp_path, Places("http://127.0.0.1:1/v1", "places", N))
    before = habits(tmp_path, samples, measures(tmp_path, run, samples))["places"]
    again = [s | ({} if s["correct"] else {"text": f"{s['text']} Or so."}) for s in samples]
    outside_measures(tmp_path, run, again, "none", Places("http://127.0.0.1:1/v1", "places", N))
    after = habits(tmp_path, again, measures(tmp_path, run, again))["places"]
    assert after["of_right_and_wrong"] == before["of_right_and_wrong"] and after["requests"] > before["requests"]


def test_methods_are_ranked_by_the_pairs_that_were_read() -> None:
    run, samples = made_run()
    values = {(s["arm"], s["problem"], 0): 0.5 * s["correct"] for s in samples}
    all_read = trust.correlations(run, samples, {"judge": values})["judge"]["spearman"]
    some = {key: value for i, (key, value) in enumerate(values.items()) if key[0] == "none" or i % 7}
    none_read_of_one = {key: value for key, value in some.items() if key[0] != "draft"}
    assert trust.correlations(run, samples, {"judge": some})["judge"]["spearman"] > 0.9 * all_read > 0.85
    assert trust.correlations(run, samples, {"judge": none_read_of_one})["judge"]["spearman"] > 0.9


def test_what_the_planted_judge_says() -> None:
    known = {asked(problem)["question"]: problem for problem in problems()}

    def said(a: int, b: int) -> list[str]:
        """To each question, of answers that are off by so much."""
        texts = [
            (question, *(f"So the answer is {int(p.answer) + off}." for off in (a, b))) for question, p in known.items()
        ]
        return [reply_to(PROMPT.format(question=q, a=first, b=second), known) for q, first, second in texts]

    assert said(0, 1).count("A") / N == pytest.approx(0.9, abs=0.08)
    assert said(1, 0).count("B") / N == pytest.approx(0.9, abs=0.08)
    assert said(1, 2).count("A") / N == pytest.approx(0.5, abs=0.13)
    assert said(0, 1) == said(0, 1), "the same prompt, the same reply"
    assert "not know" in reply_to(PROMPT.format(question="?", a="1", b="2"), known)


def test_a_judge_is_a_server_or_planted_or_none() -> None:
    class Bench:
        problems = problems()[:3]

    with judge_at(None, "", 3, 8, Bench) as judge:  # type: ignore[arg-type]
        assert judge is None
    with judge_at(planted.NAME, "", 3, 8, Bench) as judge:  # type: ignore[arg-type]
        assert judge and judge.model == NAME and judge.prefer("unknown", "a", "b") is None
    with judge_at("http://localhost:1/v1", "m", 3, 8, Bench) as judge:  # type: ignore[arg-type]
        assert judge and (judge.model, judge.problems, judge.parallel) == ("m", 3, 8)
