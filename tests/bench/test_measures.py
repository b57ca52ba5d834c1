"""Quality without right answers: what each measure sees, and what it says it cannot see."""

from __future__ import annotations

import json
from collections.abc import Callable
from io import StringIO
from math import exp, log
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

import semspec
from semspec import pocket as pocket_world
from semspec.bench.agreement import WORDS, agreements, by_number, by_words, final_text
from semspec.bench.calibrate import calibrate
from semspec.bench.controls import coin_for, relaxing_rate
from semspec.bench.folder import load_run
from semspec.bench.likelihood import likelihoods, summed_up
from semspec.bench.measures import compare_measures
from semspec.bench.outside import outside_measures
from semspec.bench.run import Bench, Config
from semspec.bench.summary import summarise
from semspec.bench.table import Grid, notes
from semspec.bench.terminal import render
from semspec.bench.verdict import Margin
from semspec.errors import BadRequest
from semspec.model.prefix_cache import PrefixCache
from semspec.options import Options
from tests.bench.test_summary import arm, sample
from tests.fakes import FakeRunner

N = 60


def table(logits: list[int]) -> list[float]:
    """Depends on the last token and on how many came before."""
    return [0.3 * ((logits[-1] * 7 + token * 3 + len(logits)) % 11) for token in range(13)]


@pytest.mark.parametrize("temperature", [0.0, 0.5])
def test_likelihoods_are_the_targets_own(temperature: float) -> None:
    texts = [([1, 2], [3, 4, 5, 6] * 50), ([5], [7]), ([2, 2], [])]
    found = likelihoods(FakeRunner(table, 13, slots=2), texts, temperature)
    for (prompt, written), rows in zip(texts, found, strict=True):
        assert len(rows) == len(written)
        for i, row in enumerate(rows):
            logits = table(prompt + written[:i])
            for heat, value in zip((1.0, temperature or 1.0), row, strict=True):
                whole = log(sum(exp(x / heat) for x in logits))
                assert value == pytest.approx(logits[written[i]] / heat - whole, abs=1e-4)
    assert summed_up(found[2]) is None
    one = summed_up(found[0])
    assert one is not None and one["lowest"] == min(row[0] for row in found[0]) and one["tokens"] == 200


# -- made-up runs


def made_up(**arms: Callable[[int], str]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Texts without right answers; the target answers problem i with the number 10 i, other seeds nearly always."""
    roles = {"none": "target", "draft": "draft", "resampled": "resampled", "resampled 2": "resampled"}
    texts: dict[str, Callable[[int], str]] = {
        "none": lambda i: f"There are {10 * i} apples.",
        "resampled": lambda i: f"We count {10 * i + (i % 20 == 0)} apples.",
        "resampled 2": lambda i: f"All of them: {10 * i} apples.",
        "draft": lambda i: f"There are {10 * i + (i % 3 == 0)} apples.",
        **arms,
    }
    run = {"arms": [arm(name, roles.get(name, "method")) for name in texts], "config": {"task": "jsonl"}}
    samples = [
        sample(name, i, text=text(i), correct=None, tokens=[i, *map(ord, text(i))], question=f"How many? {i}")
        for i in range(N)
        for name, text in texts.items()
    ]
    return run, samples


def same(i: int) -> str:
    return f"Counted: {10 * i} apples."


def swapped(share: int) -> Callable[[int], str]:
    return lambda i: f"Counted: {10 * i + 3 * (i % share == 1)} apples."


def test_the_number_sees_swapped_digits_and_the_words_say_that_they_do_not() -> None:
    run, samples = made_up(**{"fly": same, "random:rate=0.5": swapped(5), "typical": swapped(6)})
    summary = summarise(run, samples)
    arms, about = summary["arms"], summary["measures"]
    assert summary["deciding_measure"] == "number" and about["number"]["separates_random"] is True
    assert arms["typical"]["quality"] == "worse" and arms["fly"]["quality"] != "worse"
    assert arms["fly"]["measures"]["number"]["difference"]["value"] == 0
    assert arms["typical"]["measures"]["number"]["difference"]["value"] == pytest.approx(-10 / N, abs=0.03)
    assert arms["typical"]["speedup"] is not None, "quality is known"
    assert "resampled 2" not in arms and arms["resampled"]["measures"]["number"]["value"] > 0.9
    assert about["meaning"]["by"] == WORDS and any(WORDS in note for note in notes(summary))
    cells = Grid.of_run(summary).rows()["typical"]
    assert cells["measure number"].text.startswith("-0.1") and "accuracy" not in cells


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_the_target_sampled_beside_greedy_arms_shows_a_spread_and_has_no_verdict(temperature: float) -> None:
    spoilt = lambda i: f"zzz {i} qqq {10 * i + 1}"  # noqa: E731
    run, samples = made_up(**{"resampled": spoilt, "fly": same, "random:rate=0.5": swapped(2)})
    run["config"]["temperature"] = temperature
    summary = summarise(run, samples)
    found = summary["arms"]["resampled"]
    assert found["quality"] == ("worse" if temperature else "spread") and bool(found["quality_reasons"]) == bool(
        temperature
    )
    for own in found["measures"].values():
        assert ("verdict" in own) == ("p_holm" in own) == bool(temperature)
    tests = [p for a in summary["arms"].values() if (p := a["measures"]["number"].get("p_holm")) is not None]
    assert len(tests) == 3 + bool(temperature), "the draft, fly and random"
    shown = Grid.of_run(summary).rows()["resampled"]
    assert shown["arm"].more == ("target, other seeds" if temperature else "target at temperature 0.7")
    assert shown["quality"].text.partition(",")[0] == found["quality"]


@pytest.mark.parametrize("width", [82, 100, 120, 140, 160, 200])
def test_a_terminal_shows_whole_figures_and_names_of_arms_at_any_width(width: int) -> None:
    run, samples = made_up(**{"fly": same, "random:rate=0.5": swapped(5), "typical:k=15,epsilon=0.09": swapped(6)})
    for s in samples:
        lowest = -2.0 - (s["arm"] == "fly")
        s["likelihood"] = {"one": -1.0, "request": -1.0, "tokens": 9, "lowest": lowest}
    summary = summarise(run, samples)
    out = StringIO()
    Console(file=out, width=width).print(render([summary]))
    shown = out.getvalue()
    assert max(map(len, shown.splitlines())) <= width
    narrow = Grid.of_run(summary, narrow=True).rows()
    for name, row in narrow.items():
        assert name[:12] in shown
        for key, cell in row.items():
            assert key == "arm" or all(part in shown for part in str(cell).split("\n")), (key, cell)
    headings = [line for line in shown.splitlines() if "least likely token" in line and "meaning" in line]
    assert bool(headings) == (width >= 100), "measures have a table of their own where one table is too wide"


def test_a_measure_that_cannot_tell_random_from_the_target_says_so() -> None:
    run, samples = made_up(**{"fly": same, "random:rate=0.5": same, "accept-all": swapped(2)})
    summary = summarise(run, samples)
    assert summary["measures"]["number"]["separates_random"] is False
    assert summary["arms"]["fly"]["quality"] == "unclear" and "random" in summary["arms"]["fly"]["speedup_refused"]
    assert summary["arms"]["accept-all"]["quality"] == "worse", "what is shown is shown"
    assert any(note.startswith("On this data random cannot be told") for note in notes(summary))


def test_the_verdict_rests_on_a_measure_that_sees_the_control() -> None:
    """`random` spoils words and no number; so words decide, though the number is preferred."""
    spoilt = lambda i: f"zzz {i} qqq {10 * i}"  # noqa: E731
    run, samples = made_up(**{"fly": same, "random:rate=0.5": spoilt, "typical": spoilt})
    summary = summarise(run, samples)
    assert summary["measures"]["number"]["separates_random"] is False
    assert summary["deciding_measure"] == "meaning" and summary["arms"]["typical"]["quality"] == "worse"


@pytest.mark.parametrize(("n", "quality"), [(20, "unclear"), (300, "equivalent")])
def test_a_few_answers_that_are_the_same_are_no_equivalence(
    n: int, quality: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However they are measured: the draft loses all of an answer now and then, and so might this."""
    monkeypatch.setattr("tests.bench.test_measures.N", n)
    run, samples = made_up(**{"fly": lambda i: f"There are {10 * i} apples.", "random:rate=0.5": swapped(2)})
    summary = summarise(run, samples)
    assert summary["arms"]["fly"]["identical_outputs"]["share"] == 1 and summary["deciding_measure"] == "number"
    assert summary["arms"]["fly"]["quality"] == quality
    assert summary["measures"]["number"]["may_change"] == pytest.approx(0.15 / 3, abs=0.005)


def test_texts_without_spaces_have_words_in_common_too() -> None:
    def alike(ours: str, theirs: str) -> float:
        return by_words(sample("fly", 0, text=ours), sample("none", 0, text=theirs))

    assert 0.7 < alike("小明有七个苹果。", "小明一共有七个苹果。") < 1 and alike("天空是蓝色的", "我吃饭") == 0
    assert alike("คำตอบคือเจ็ด", "คำตอบ คือ เจ็ด") == 1 and alike("Ответ: семь.", "ответ семь") == 1


def test_agreement_is_with_other_seeds_only() -> None:
    _, samples = made_up(fly=same)
    others = {s["problem"]: [s] for s in samples if s["arm"] == "resampled"}
    values = agreements(samples, others, by_number(samples))
    assert ("resampled", "p/0", 0) not in values, "not with itself"
    assert values["none", "p/0", 0] == 0 and values["none", "p/1", 0] == 1
    words = agreements(samples, others, by_words)
    assert 0 < words["fly", "p/1", 0] < 1
    assert final_text("<think>\n5 + 5\n</think>\n10") == "10" and final_text("<think> 5") == "<think> 5"


def test_likelihood_lies_so_many_deviations_outside_the_targets_samples() -> None:
    run, samples = made_up(fly=same)
    for s in samples:
        level = {"none": -1.0, "resampled": -1.1, "resampled 2": -0.9, "draft": -2.0, "fly": -1.3}[s["arm"]]
        s["likelihood"] = {"one": level + 0.01 * (s["index"] % 3), "request": level, "lowest": 3 * level, "tokens": 9}
    found, _ = compare_measures(run, samples, Margin())
    fly = found["fly"]["likelihood"]
    assert fly["difference"]["value"] == pytest.approx(-0.3) and fly["of_distance"] == pytest.approx(0.3)
    assert fly["spread"]["value"] == pytest.approx(-0.3 / (0.02**0.5), abs=0.05) and fly["verdict"] == "worse"
    assert "likelihood at the temperature" not in found["fly"], "the run is greedy"


# -- real runs of the pocket pair


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    rows = [{"question": pocket_world.problem(i, 3, "probe").text} for i in range(6)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def config(prompts: Path, **changes: Any) -> Config:
    given: dict[str, Any] = {
        "task": f"jsonl:path={prompts}", "methods": ["fly:k=15", "exact:k=4"], "max_new_tokens": 24, "device": "cpu",
        "context": 512, "batch": 4, "resamples": 2,
    }  # fmt: skip
    return Config(**given | changes)


def test_prompts_without_answers_get_controls_and_measures(pocket: semspec.Pair, prompts: Path, tmp_path: Path) -> None:
    bench = Bench(config(prompts, temperature=0.7), pocket)
    summary = bench.run(tmp_path)
    coin = next(arm.name for arm in bench.arms if arm.control and arm.role == "method")
    assert coin.startswith("random:k=15,rate=") and list(summary["arms"])[:3] == ["none", "resampled", "draft"]
    run, samples = load_run(tmp_path)
    by = {(s["arm"], s["problem"]): s for s in samples}
    assert all(s["likelihood"]["tokens"] == len(s["tokens"]) for s in samples)
    one = samples[0]["problem"]
    assert len({tuple(by[a, one]["tokens"]) for a in ("none", "resampled", "resampled 2")}) == 3, "other seeds"
    assert by["exact:k=4", one]["likelihood"] == pytest.approx(by["none", one]["likelihood"], rel=1e-4)
    assert summary["arms"]["exact:k=4"]["quality"] == "equivalent"
    assert "likelihood at the temperature" in summary["measures"] and summary["deciding_measure"]
    assert outside_measures(tmp_path, run, samples, encoder="none") == ({}, {})
    again = Bench(config(prompts, temperature=0.7), pocket)
    again.run(tmp_path)
    assert [a.name for a in again.arms] == [a.name for a in bench.arms], "a run that goes on keeps its control"


def test_prompts_that_are_read_once_for_all_arms_change_no_text(prompts: Path, tmp_path: Path) -> None:
    texts = []
    for shared in (False, True):
        changes = {"n": 3, "batch": 3, "max_new_tokens": 6, "methods": ["exact:k=4", "random:rate=0.5"]}
        bench = Bench(config(prompts, shared_prompts=shared, **changes))
        bench.run(tmp_path / str(shared))
        _, samples = load_run(tmp_path / str(shared))
        texts.append({(s["arm"], s["problem"]): s["tokens"] for s in samples})
    assert texts[0] == texts[1]
    target = bench.pair.target
    assert isinstance(target, PrefixCache) and target.hits > 0.8 * target.queries


def test_without_a_draft_alone_the_unit_of_a_margin_is_what_accept_all_writes() -> None:
    run, samples = made_up(**{"fly": same, "random:rate=0.5": swapped(5), "accept-all:k=5": swapped(2)})
    run["arms"] = [arm for arm in run["arms"] if arm["role"] != "draft"]
    samples = [s for s in samples if s["arm"] != "draft"]
    found, about = compare_measures(run, samples, Margin())
    assert about["number"]["separates_draft"] is True
    gap = abs(found["accept-all:k=5"]["number"]["difference"]["value"])
    assert about["number"]["margin"] == pytest.approx(0.15 * gap) and gap > 0.1


def test_a_control_relaxes_as_often_as_the_loosest_method(pocket: semspec.Pair) -> None:
    from semspec.bench.arms import parse_arm

    prompt = [{"role": "user", "content": pocket_world.problem(3, 4, "probe").text}]

    def answer(one: Any) -> list[Any]:
        return [pocket.generate(prompt, one.options(max_new_tokens=150))]

    fly = answer(parse_arm("fly:k=15"))
    rate = relaxing_rate(fly, "token")
    coin = coin_for([parse_arm("exact:k=4"), parse_arm("fly:k=15")], answer)
    assert coin is not None and 0 < rate < 1 and coin.name == f"random:k=15,rate={max(0.01, round(rate, 2)):g}"
    assert relaxing_rate(answer(parse_arm("accept-all:k=15")), "token") == 1.0
    assert coin_for([parse_arm("exact")], answer) is None
    assert coin_for([parse_arm("fly:k=15"), parse_arm("random:rate=0.3")], answer) is None


def test_calibration_makes_a_profile_that_is_used_and_refused_elsewhere(
    pocket: semspec.Pair, pair: semspec.Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = config(Path(), task="pocket:steps=3,split=probe", n=12, methods=["fly:theta=0.9", "fly:theta=0.3"])
    bench = Bench(Config(**vars(settings) | {"entropy": True, "max_new_tokens": 110}), pocket)
    with pytest.raises(BadRequest, match="whatever they say"):
        calibrate(bench, tmp_path, 0.01, 0.95, lambda done, total: None)
    other = Bench(Config(**vars(settings) | {"methods": ["fly:draft_min_p=0.3,theta=0.9"]}), pocket)
    with pytest.raises(BadRequest, match="and no others"):
        calibrate(other, tmp_path, 0.6, 0.8, lambda done, total: None)
    with pytest.raises(BadRequest, match="the draft alone cannot be told from the target"):
        calibrate(bench, tmp_path, 0.6, 0.8, lambda done, total: None)  # the problems are so easy
    monkeypatch.setattr("semspec.bench.calibrate.no_loss_in_answers", lambda own, control: None)
    profile, choice = calibrate(bench, tmp_path, 0.6, 0.8, lambda done, total: None)
    assert choice.method in settings.methods and choice.measure == "accuracy" and profile.problems == 12
    profile.save(tmp_path / "profile.json")
    read = semspec.Profile.load(tmp_path / "profile.json")
    assert read == profile
    assert (read.dtype, read.kv_dtype, read.draft_dtype, read.max_new_tokens) == (*["float32"] * 3, 110)
    prompt = bench.problems[0].prompt
    result = pocket.generate(prompt, Options(**read.settings(), max_new_tokens=130))
    assert result.drift is not None and not result.drift.unlike and result.verifier == "fly"
    hot = pocket.generate(prompt, Options(**read.settings(), max_new_tokens=40, temperature=1.0))
    assert hot.drift.otherwise == ("temperature",) and hot.drift.unlike
    strange = pocket.generate("zzz zzz zzz", Options(**read.settings(), max_new_tokens=40))
    assert abs(strange.drift.entropy) > abs(result.drift.entropy), "the target is at a loss"
    with pytest.raises(BadRequest, match="calibrated with the target"):
        pair.generate("hello", Options(**read.settings()))
    with pytest.raises(BadRequest, match="another verifier"):
        Options(verifier="exact", profile=read)
