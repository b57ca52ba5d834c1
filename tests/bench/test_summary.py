"""Figures of runs that were made up by hand, so that every number is known beforehand."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from math import exp, sqrt
from pathlib import Path
from typing import Any

import pytest

from semspec.bench.compare_to import compare_to
from semspec.bench.folder import load_run
from semspec.bench.summary import rounds_of, summarise
from semspec.bench.table import Grid, notes
from semspec.errors import BadRequest
from semspec.loop.stats import Stats

LABEL = "decisions: pocket, cost: pocket on CPU"
LOOP = [*range(10), *([1, 2, 3, 4, 5] * 20)]


def arm(name: str, role: str = "method", lossless: bool = False) -> dict[str, Any]:
    return {"name": name, "role": role, "verifier": name, "lossless": lossless, "num_draft_tokens": 8}


def run_of(*methods: str) -> dict[str, Any]:
    arms = [arm("none", "target", True), *(arm(name, lossless=name == "exact") for name in methods)]
    return {"created": "now", "finished": True, "config": {"task": "pocket"}, "arms": arms, "label": LABEL}


def sample(name: str, i: int = 0, **changes: Any) -> dict[str, Any]:
    """One output of 20 tokens in 1 second, right, different for every problem."""
    stats = changes.pop("stats", None) or Stats.pooled([])
    tokens = changes.get("tokens", [100 * i + t for t in range(20)])
    made = {
        "arm": name, "problem": f"p/{i}", "index": i, "repeat": 0, "group": "all", "seed": i, "text": f"answer {i}",
        "tokens": tokens, "origins": "t" * len(tokens), "finish_reason": "stop", "correct": True, "seconds": 1.0,
        "batch": 1, "prompt_tokens": 9, "verifier": name, "lossless": True, "stats": stats.to_dict(), "passes": [],
    }  # fmt: skip
    return made | changes


def many(n: int, **arms: Callable[[int], dict[str, Any]]) -> list[dict[str, Any]]:
    """For each arm a function from the problem's number to what is special about its sample."""
    return [sample(name, i, **special(i)) for i in range(n) for name, special in arms.items()]


def plain(i: int) -> dict[str, Any]:
    return {}


def figures(run: dict[str, Any], samples: list[dict[str, Any]], name: str) -> dict[str, Any]:
    summary = summarise(run, samples)
    json.dumps(summary, allow_nan=False)
    return summary["arms"][name]


def test_a_lossless_arm_in_half_the_time() -> None:
    found = figures(run_of("exact"), many(10, none=plain, exact=lambda i: {"seconds": 0.5}), "exact")
    assert found["speedup"] == found["time_ratio"] == {"value": 2.0, "low": 2.0, "high": 2.0}
    assert found["speedup_refused"] is None and found["quality"] == "equivalent"
    assert found["identical_outputs"]["share"] == 1.0 and found["length_ratio"]["value"] == 1.0
    assert found["mcnemar_p"] == 1.0 and found["retention"]["value"] == 1.0
    assert found["retention"]["low"] < 0.9, "ten problems that agree do not show that all would"
    assert found["seconds_per_problem"]["value"] == found["seconds_per_correct"]["value"] == 0.5
    assert found["accuracy"]["hits"] == found["accuracy"]["total"] == 10


def test_scores_of_a_graded_task_are_means() -> None:
    def scored(base: float) -> Callable[[int], dict[str, Any]]:
        return lambda i: {"correct": base + 0.01 * (i % 5), "group": "ab"[i % 2], "tokens": [i, int(100 * base)]}

    samples = many(20, none=scored(0.5), fly=scored(0.3))
    summary = summarise(run_of("fly"), samples)
    fly = summary["arms"]["fly"]
    assert summary["graded"] and fly["accuracy"]["share"] == pytest.approx(0.32)
    assert 0.30 < fly["accuracy"]["low"] < 0.32 < fly["accuracy"]["high"] < 0.34
    assert fly["accuracy_difference"]["value"] == pytest.approx(-0.2) and fly["lost"] == 20
    assert fly["quality"] == "worse"
    assert fly["seconds_per_correct"]["value"] == pytest.approx(1 / 0.32)
    assert fly["groups"]["a"]["share"] == pytest.approx(0.32) and set(fly["groups"]) == {"a", "b"}
    heads = Grid.of_run(summary).headings
    assert heads["accuracy"] == "score, %" and heads["group a"] == "a"
    assert str(Grid.of_run(summary).rows()["fly"]["group b"]).startswith("32.0")
    assert not summarise(run_of("fly"), many(5, none=plain, fly=plain))["graded"]


def test_identical_arms_give_a_ratio_of_one_within_the_interval() -> None:
    rng = random.Random(3)
    noise = many(
        40, none=lambda i: {"seconds": rng.uniform(0.9, 1.1)}, exact=lambda i: {"seconds": rng.uniform(0.9, 1.1)}
    )
    found = figures(run_of("exact"), noise, "exact")
    assert found["speedup"]["low"] <= 1.0 <= found["speedup"]["high"]
    assert found["speedup"]["low"] < found["speedup"]["high"]


def test_a_worse_arm_keeps_its_speedup_and_is_called_worse() -> None:
    found = figures(run_of("fly"), many(20, none=plain, fly=lambda i: {"seconds": 0.25, "correct": i >= 8}), "fly")
    assert found["quality"] == "worse" and (found["gained"], found["lost"]) == (0, 8)
    assert found["mcnemar_p"] == 2 / 2**8
    assert found["quality_reasons"] == ["right answers lost on 8 problems and gained on 0 (p = 0.0078)"]
    assert found["speedup"]["value"] == 4.0
    assert found["retention"]["value"] == 0.6 and found["accuracy_difference"]["value"] == pytest.approx(-0.4)
    assert found["seconds_per_correct"]["value"] == pytest.approx(20 * 0.25 / 12)


def test_a_better_arm_and_one_too_close_to_tell() -> None:
    close = {"correct": True, "tokens": [1, 2]}
    samples = many(20, none=lambda i: {"correct": i >= 8}, fly=plain, exact=lambda i: close | {"correct": i >= 6})
    assert figures(run_of("fly", "exact"), samples, "fly")["quality"] == "better"
    assert figures(run_of("fly", "exact"), samples, "exact")["quality"] == "unclear"


def test_the_same_needs_a_loss_to_be_ruled_out() -> None:
    def flips(share: int) -> Any:
        return lambda i: {"correct": i % share != 0, "tokens": [i, i]}

    few = many(40, none=lambda i: {"correct": i % 10 != 1}, fly=flips(10))
    assert figures(run_of("fly"), few, "fly")["quality"] == "unclear", "four lost, four gained, of forty"
    lots = many(2000, none=lambda i: {"correct": i % 100 != 1}, fly=flips(100))
    assert figures(run_of("fly"), lots, "fly")["quality"] == "equivalent", "the same shares, of two thousand"


@pytest.mark.parametrize(("n", "lost"), [(210, 2), (260, 3)])
def test_the_target_sampled_beside_greedy_arms_takes_no_verdict_from_them(n: int, lost: int) -> None:
    """It is no comparison: with one more, these losses would no longer be ruled out."""
    fly = lambda i: {"correct": i >= lost, "tokens": [i, 3], "seconds": 0.5}  # noqa: E731
    other = lambda i: {"correct": i % 5 > 0, "finish_reason": "length", "tokens": LOOP, "seconds": 0.1}  # noqa: E731
    alone = summarise(run_of("fly"), many(n, none=plain, fly=fly))
    run = run_of("fly")
    run["arms"] += [arm("resampled", "resampled"), arm("resampled 2", "resampled")]
    samples = many(n, none=plain, fly=fly, resampled=other, **{"resampled 2": other})
    found = summarise(run, samples)
    fly_alone, fly_beside = ({**s["arms"]["fly"], "measures": None} for s in (alone, found))
    assert fly_beside == fly_alone and fly_alone["quality"] == "equivalent"
    assert found["pareto"] == alone["pareto"] == ["fly", "none"]
    spread = found["arms"]["resampled"]
    assert spread["quality"] == "spread" and spread["speedup"] is None and "mcnemar_p_holm" not in spread
    assert not any("comparisons" in note or "resampled" in note for note in notes(found))
    assert list(compare_to(run, samples, "fly")) == ["none"]
    run["config"]["temperature"] = 0.7
    sampled = summarise(run, samples)
    assert sampled["arms"]["fly"]["quality"] == "unclear" and sampled["arms"]["resampled"]["quality"] == "worse"
    assert list(compare_to(run, samples, "fly")) == ["none", "resampled"], "one row, however many samples"


def test_a_looping_arm_is_flagged_and_gets_no_speedup() -> None:
    looping = many(12, none=plain, loopy=lambda i: {"seconds": 0.2, **({"tokens": LOOP} if i % 2 else {})})
    found = figures(run_of("loopy"), looping, "loopy")
    assert found["loop_rate"]["share"] == 0.5 and found["accuracy"]["share"] == 1.0
    assert found["speedup"] is None and found["time_ratio"]["value"] == pytest.approx(5.0)
    assert found["speedup_refused"] == "loops in 50.0 % of outputs, the target alone in 0.0 %"
    assert found["quality"] == "worse"


def test_a_target_that_loops_itself_is_no_fault_of_the_arm() -> None:
    both = many(12, none=lambda i: {"tokens": LOOP}, exact=lambda i: {"tokens": LOOP})
    found = figures(run_of("exact"), both, "exact")
    assert found["loop_rate"]["share"] == 1.0 and found["quality"] == "equivalent" and found["speedup"]


def test_an_arm_that_runs_into_the_limit_is_worse() -> None:
    capped = many(12, none=plain, fly=lambda i: {"finish_reason": "length" if i < 6 else "stop"})
    found = figures(run_of("fly"), capped, "fly")
    assert found["cap_rate"]["share"] == 0.5 and found["quality"] == "worse" and found["speedup"]
    assert "length limit in 50.0 %" in found["quality_reasons"][0]


def test_an_unscored_task_has_no_speedup() -> None:
    unscored = many(10, none=lambda i: {"correct": None}, fly=lambda i: {"correct": None, "seconds": 0.5})
    found = figures(run_of("fly"), unscored, "fly")
    assert found["quality"] == "unmeasured" and found["accuracy"] is None and found["mcnemar_p"] is None
    assert found["speedup"] is None and found["time_ratio"]["value"] == 2.0
    assert found["speedup_refused"] == "the task has no scorer, so quality is not known"
    assert found["seconds_per_correct"] is None


def test_four_problems_in_common_are_too_few() -> None:
    samples = [s for s in many(10, none=plain, fly=plain) if s["arm"] == "none" or s["index"] < 4]
    found = figures(run_of("fly"), samples, "fly")
    assert found["problems_in_common"] == 4 and found["quality"] == "unmeasured"
    assert found["speedup"] is None and found["speedup_refused"].startswith("4 problems in common")


def test_a_run_that_has_just_begun() -> None:
    found = figures(run_of("fly"), [], "fly")
    assert found["samples"] == 0 and found["speedup"] is None and found["time_ratio"] is None
    assert found["accuracy"] is None and found["loop_rate"] is None


def test_only_problems_in_common_are_compared() -> None:
    samples = many(10, none=lambda i: {"seconds": 100.0 if i >= 6 else 1.0}, fly=lambda i: {"seconds": 0.5})
    samples = [s for s in samples if s["arm"] == "none" or s["index"] < 6]
    assert figures(run_of("fly"), samples, "fly")["speedup"]["value"] == 2.0


def test_repeats_are_pooled_before_problems_are_paired() -> None:
    """Three equal repeats of a greedy run are the evidence of one."""
    once = many(10, none=plain, fly=lambda i: {"correct": i >= 3})
    thrice = [s | {"repeat": r} for s in once for r in range(3)]
    single, pooled = (figures(run_of("fly"), samples, "fly") for samples in (once, thrice))
    for key in ("mcnemar_p", "lost", "accuracy_difference", "retention", "speedup", "quality"):
        assert pooled[key] == single[key]
    assert pooled["accuracy"]["low"] == pytest.approx(single["accuracy"]["low"])
    assert (pooled["samples"], pooled["problems"]) == (30, 10)


def test_a_problem_is_lost_where_its_share_of_right_repeats_is_lower() -> None:
    samples = [
        sample(name, i, repeat=r, correct=name == "none" or r > 0 or i >= 6)
        for name in ("none", "fly") for i in range(8) for r in range(3)
    ]  # fmt: skip
    found = figures(run_of("fly"), samples, "fly")
    assert (found["lost"], found["gained"], found["mcnemar_p"]) == (6, 0, 2 / 64)
    assert found["accuracy"]["hits"] == 18 and found["retention"]["value"] == 0.75


def test_drafts_are_pooled_over_steps_and_per_request_under_two_names() -> None:
    short, long = Stats(), Stats()
    short.observe(4, 4)
    for _ in range(3):
        long.observe(4, 0)
    long.observe(2, 1, relaxed=1)
    short.target_passes, long.target_passes = 1, 4
    samples = [sample("none"), sample("fly", 0, stats=short), sample("fly", 1, stats=long)]
    found = figures(run_of("fly"), samples, "fly")
    assert found["tau_pooled"] == 1 + 5 / 5
    # Two problems, 5 of 1 and 5 of 4: at one degree of freedom; the second weighs 0.65 of all, the first 0.35.
    assert found["tau_interval"]["value"] == 2.0
    assert found["tau_interval"]["high"] == pytest.approx(
        2 * exp(12.7062 * 0.3 * sqrt(1 / 0.65**2 + 1 / 0.35**2)), rel=1e-4
    )
    assert found["tau_per_request_mean"] == (5 + 1.25) / 2
    assert found["acceptance_rate"] == 5 / 18
    assert found["acceptance_histogram"] == {"0": 3, "1": 1, "4": 1}
    assert found["accepted_per_position"] == [2, 1, 1, 1]
    assert found["drafted_per_position"] == [5, 5, 4, 4]
    assert found["acceptance_per_position"] == [2 / 5, 1 / 5, 1 / 4, 1 / 4]
    branching = Stats()
    branching.observe(30, 3, longest=6)
    tree = figures(run_of("fly"), [sample("none"), sample("fly", 0, stats=branching)], "fly")
    assert tree["acceptance_rate"] == 3 / 6 and tree["tau_pooled"] == 4
    assert found["target_passes"] == 5 and found["tokens_per_target_pass"] == 10 / 5
    assert found["relaxed_share"] == 1 / 5 and found["divergence"] == 1 / 10


def test_files_of_older_versions_call_rounds_steps() -> None:
    assert rounds_of({"stats": {"rounds": 3, "steps": 3}}) == rounds_of({"stats": {"steps": 3}}) == 3


def test_the_draft_alone_makes_no_passes_of_the_target() -> None:
    run = run_of()
    run["arms"].append(arm("draft", "draft"))
    found = figures(run, many(5, none=plain, draft=plain), "draft")
    assert found["target_passes"] is None and found["tokens_per_target_pass"] is None


def test_longer_outputs_show_in_the_length_ratio() -> None:
    found = figures(run_of("fly"), many(6, none=plain, fly=lambda i: {"tokens": list(range(30))}), "fly")
    assert found["length_ratio"]["value"] == 1.5 and found["tokens"] == 180
    assert found["identical_outputs"]["share"] == 0.0


def batched(n: int, batch: int, rng: random.Random) -> dict[str, Any]:
    """The summary of a run whose batches each take their own time, whatever the arm; every problem has its share."""
    slow = [[rng.uniform(0.5, 2.0) for _ in range(0, n, batch)] for _ in range(2)]
    samples = many(n, none=lambda i: {"seconds": slow[0][i // batch]}, fly=lambda i: {"seconds": slow[1][i // batch]})
    run = run_of("fly")
    return summarise(run | {"config": run["config"] | {"batch": batch}}, samples)["arms"]["fly"]


def test_intervals_of_seconds_are_over_batches_not_over_problems() -> None:
    """192 problems in six batches are six observations of time: the truth, a ratio of 1, is in 95 % of intervals. Over
    problems it was in fewer than half."""
    rng = random.Random(0)
    ratios = [batched(192, 32, rng)["time_ratio"] for _ in range(60)]
    assert sum(r["low"] <= 1.0 <= r["high"] for r in ratios) >= 53
    one = batched(20, 32, rng)
    for key in ("time_ratio", "target_time_ratio", "seconds_per_problem", "seconds_per_correct"):
        assert one[key] is None or (one[key]["low"], one[key]["high"]) == (None, None), "one batch has no spread"


def test_an_incomplete_batch_counts_for_the_value_alone() -> None:
    """Three batches of 4 problems in 4 s, and one problem in 2 s."""
    samples = many(13, none=lambda i: {"seconds": 1.0 if i < 12 else 2.0})
    found = summarise(run_of() | {"config": {"batch": 4}}, samples)["arms"]["none"]["seconds_per_problem"]
    assert found == {"value": pytest.approx(14 / 13), "low": pytest.approx(14 / 13), "high": pytest.approx(14 / 13)}


def test_many_arms_do_not_make_one_worse_by_chance() -> None:
    """Six lost and none gained is p = 0.03 for one arm; among ten it shows nothing."""
    names = [f"m{i}" for i in range(10)]
    arms = {name: (lambda i, name=name: {"correct": i >= (6 if name == "m0" else 0), "tokens": [i]}) for name in names}
    samples = many(60, none=plain, **arms)
    alone = [s for s in samples if s["arm"] in ("none", "m0")]
    assert figures(run_of("m0"), alone, "m0")["quality"] == "worse"
    assert figures(run_of(*names), samples, "m0")["quality"] == "unclear"


def test_the_pareto_front() -> None:
    speeds = {"none": (10, 1.0), "exact": (10, 0.5), "fast": (8, 0.2), "slow": (7, 0.6), "same": (8, 0.2)}
    arms = {
        name: (lambda i, right=right, seconds=seconds: {"correct": i < right, "seconds": seconds})
        for name, (right, seconds) in speeds.items()
    }
    summary = summarise(run_of("exact", "fast", "slow", "same"), many(10, **arms))
    assert summary["pareto"] == ["fast", "same", "exact"]


def test_the_order_of_recording_does_not_matter() -> None:
    rng = random.Random(0)
    samples = many(20, none=plain, fly=lambda i: {"seconds": rng.random(), "correct": rng.random() < 0.7})
    mixed = rng.sample(samples, len(samples))
    assert json.dumps(summarise(run_of("fly"), samples)) == json.dumps(summarise(run_of("fly"), mixed))


def test_groups_have_their_own_accuracy() -> None:
    samples = many(10, none=lambda i: {"group": "easy" if i < 4 else "hard", "correct": i < 7})
    groups = figures(run_of(), samples, "none")["groups"]
    assert [(name, g["hits"], g["total"]) for name, g in groups.items()] == [("easy", 4, 4), ("hard", 3, 6)]


def test_samples_of_no_known_arm_are_refused() -> None:
    with pytest.raises(BadRequest, match="'magic'"):
        summarise(run_of(), [sample("magic")])
    with pytest.raises(BadRequest, match="target alone"):
        summarise({"arms": [arm("fly")]}, [])


def write(folder: Path, samples: list[dict[str, Any]], tail: str = "") -> Path:
    (folder / "run.json").write_text(json.dumps(run_of("fly")))
    (folder / "samples.jsonl").write_text("".join(json.dumps(s) + "\n" for s in samples) + tail)
    return folder


@pytest.mark.parametrize("tail", ['{"arm": "fly", "prob', "12", '{"arm": "fly"}\n', "\n\n"])
def test_a_damaged_last_line_is_left_out(tmp_path: Path, tail: str) -> None:
    samples = many(3, none=plain, fly=plain)
    run, loaded = load_run(write(tmp_path, samples, tail))
    assert loaded == samples and run["label"] == LABEL


def test_a_character_cut_in_half_is_a_damaged_line(tmp_path: Path) -> None:
    write(tmp_path, [sample("none")])
    with (tmp_path / "samples.jsonl").open("ab") as file:
        file.write('{"arm": "none", "text": "é'.encode()[:-1])
    assert len(load_run(tmp_path)[1]) == 1


def test_what_was_recorded_twice_counts_once(tmp_path: Path) -> None:
    samples = many(6, none=plain, fly=plain)
    run, loaded = load_run(write(tmp_path, [*samples, samples[1] | {"seconds": 99.0}]))
    assert loaded == samples
    assert summarise(run, [*samples, samples[1]]) == summarise(run, samples)


def test_a_damaged_line_in_the_middle_is_not_passed_over(tmp_path: Path) -> None:
    line = json.dumps(sample("none", 1)) + "\n"
    with pytest.raises(BadRequest, match=r"line 2 of .*samples\.jsonl is damaged"):
        load_run(write(tmp_path, [sample("none")], '{"arm"\n' + line))


def test_folders_that_are_no_runs(tmp_path: Path) -> None:
    with pytest.raises(BadRequest, match=r"is not a run: it has no run\.json"):
        load_run(tmp_path)
    (tmp_path / "run.json").write_text("{")
    (tmp_path / "samples.jsonl").write_text("")
    with pytest.raises(BadRequest, match="cannot be read as a run"):
        load_run(tmp_path)
    (tmp_path / "run.json").write_text("{}")
    with pytest.raises(BadRequest, match="lists no arms"):
        load_run(tmp_path)
    write(tmp_path, []).joinpath("samples.jsonl").unlink()
    with pytest.raises(BadRequest, match=r"it has no samples\.jsonl"):
        load_run(tmp_path)


def test_the_targets_own_time_is_told_apart_from_the_drafts() -> None:
    def spent(score: float, verify: float, draft: float, name: str = "verify") -> dict[str, Any]:
        stats = Stats.pooled([])
        stats.seconds = {"score": score, name: verify, "draft": draft}
        return {"stats": stats}

    samples = many(10, none=lambda i: spent(1.0, 0.2, 0.0), exact=lambda i: spent(0.25, 0.05, 3.0))
    assert figures(run_of("exact"), samples, "exact")["target_time_ratio"]["value"] == pytest.approx(4.0)
    older = many(10, none=lambda i: spent(1.0, 0.2, 0.0, "judge"), exact=lambda i: spent(0.25, 0.05, 3.0, "judge"))
    assert figures(run_of("exact"), older, "exact")["target_time_ratio"]["value"] == pytest.approx(4.0)


@pytest.mark.parametrize("key", ["outcome", "fate"])
def test_outcomes_of_steps_are_read_under_their_former_name_too(key: str) -> None:
    steps = [{key: outcome, "valid": None} for outcome in ("accepted", "rejected", "refused", "handed over")]
    samples = many(4, none=plain, fly=lambda i: plain(i) | {"drafted_steps": steps})
    assert figures(run_of("fly"), samples, "fly")["steps_accepted"]["share"] == pytest.approx(1 / 3)
