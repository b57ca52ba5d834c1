"""Runs: arms that take turns, samples that survive a kill, passes that can be made again."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import typer

import semspec
from semspec.bench import replay as replaying
from semspec.bench.ablate import ablation
from semspec.bench.arms import arms_for, parse_arm
from semspec.bench.folder import load_run
from semspec.bench.record import Recorder
from semspec.bench.run import Bench, Config
from semspec.bench.shapes import SHAPES
from semspec.cli import bench as commands
from semspec.errors import BadRequest
from semspec.loop.repetition import RepetitionGuard
from semspec.tasks.pocket import Pocket
from semspec.verify import make
from tests.bench.conftest import CONFIG, samples


def decided(folder: Path) -> list[dict]:
    """A run's samples in a fixed order, without what depends on the machine's speed."""
    rows = samples(folder)
    for row in rows:
        row.pop("seconds")
        row["stats"].pop("seconds")
    return sorted(rows, key=lambda s: (s["arm"], s["index"], s["repeat"]))


def untimed(summary: object) -> object:
    """A summary without figures that depend on the machine's speed."""
    if isinstance(summary, dict):
        timed = ("seconds", "speedup", "time_ratio", "pareto", "core_share")
        return {k: untimed(v) for k, v in summary.items() if not any(word in k for word in timed)}
    return [untimed(v) for v in summary] if isinstance(summary, list) else summary


def test_every_arm_gets_the_same_problems_and_seeds_in_turn(finished: Path):
    rows = samples(finished)
    names = ["none", "draft", "exact:k=3", "sampling"]
    assert {s["arm"] for s in rows} == set(names) and len(rows) == 4 * 6
    for i in range(6):
        same = [s for s in rows if s["index"] == i]
        assert len({(s["problem"], s["seed"]) for s in same}) == 1
    assert [s["arm"] for s in rows[:8]] == [*names, *names[1:], names[0]], "whose turn is first rotates"
    by_arm = {s["arm"]: s for s in rows if s["index"] == 2}
    assert by_arm["exact:k=3"]["tokens"] == by_arm["none"]["tokens"] != by_arm["draft"]["tokens"]
    assert all(len(s["origins"]) == len(s["tokens"]) == s["stats"]["tokens"] for s in rows)
    run = json.loads((finished / "run.json").read_text())
    assert run["finished"] and run["versions"]["torch"] and run["hardware"]["cores"]
    assert run["label"] == "decisions: pocket, cost: pocket on CPU"


def test_a_batch_decides_as_single_runs_do(pocket: semspec.Pair, finished: Path, tmp_path: Path):
    Bench(replace(CONFIG, batch=4), pocket).run(tmp_path)
    one, many = decided(finished), decided(tmp_path)
    assert [s["tokens"] for s in one] == [s["tokens"] for s in many]


KILLED = """
import os, signal, sys
from pathlib import Path
from semspec.bench.record import Recorder
from semspec.bench.replay_verify import Verification
from semspec.bench.run import Bench, Config
from semspec.bench.shapes import SHAPES
from tests.bench.conftest import CONFIG
bench = Bench(CONFIG)
out = Path(sys.argv[1])
measure, count = bench._measure, 0
def counted(*a):
    global count
    count += 1
    if count == 8:  # in the middle of a line
        with (out / "samples.jsonl").open("a") as file:
            file.write('{"arm": "exact:k=3", "problem": "pock')
        os.kill(os.getpid(), signal.SIGKILL)
    return measure(*a)
bench._measure = counted
bench.run(out)
"""


def test_a_killed_run_goes_on_where_it_was(pocket: semspec.Pair, finished: Path, tmp_path: Path):
    killed = subprocess.run(
        [sys.executable, "-c", KILLED, str(tmp_path / "killed")], capture_output=True, text=True, timeout=300
    )
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert len((tmp_path / "killed" / "samples.jsonl").read_text().splitlines()) == 8  # seven and a broken one
    resumed = Bench(CONFIG, pocket).run(tmp_path / "killed")
    whole = json.loads((finished / "summary.json").read_text())
    assert decided(tmp_path / "killed") == decided(finished)
    assert untimed(json.loads(json.dumps(resumed))) == untimed(whole)
    before = (tmp_path / "killed" / "samples.jsonl").stat().st_mtime_ns
    Bench(CONFIG, pocket).run(tmp_path / "killed")
    assert (tmp_path / "killed" / "samples.jsonl").stat().st_mtime_ns == before, "nothing is run twice"


def test_another_config_is_not_mixed_into_a_folder(pocket: semspec.Pair, finished: Path):
    with pytest.raises(BadRequest, match=r"temperature was 0\.6 and is 0\.9"):
        Bench(replace(CONFIG, temperature=0.9), pocket).run(finished)


def test_time_that_goes_into_capturing_graphs_is_not_measured(
    pocket: semspec.Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """A pass of a size that was not met before takes 100 s, as a capture would; the warm-up meets few of them."""
    sizes, now = set[tuple](), [0.0]

    def clock() -> float:
        now[0] += 0.01
        return now[0]

    def met(self: Recorder, requests: list, inner: Callable) -> list:
        size = (self.name, len(requests), tuple(len(r.tokens) for r in requests))
        if size not in sizes:
            sizes.add(size)
            now[0] += 100
        return inner(self, requests)

    for name in ("score", "decode"):
        inner = getattr(Recorder, name)
        monkeypatch.setattr(Recorder, name, lambda self, requests, inner=inner: met(self, requests, inner))
    monkeypatch.setattr(Recorder, "capture_seconds", property(lambda self: 100.0 * len(sizes)))
    Bench(replace(CONFIG, n=3), pocket, clock=clock).run(tmp_path)
    assert len(sizes) > 8 and all(s["seconds"] < 1 for s in samples(tmp_path))


def test_methods_are_read_with_their_draft_length_and_drafter():
    arm = parse_arm("exact:k=4,drafter=ngram")
    assert (arm.verifier, arm.num_draft_tokens, arm.drafter, arm.lossless) == ("exact", 4, "ngram", True)
    options = parse_arm("block:k=auto,draft_min_p=0.4").options()
    assert (options.num_draft_tokens, options.draft_min_p, options.draft_max_entropy) == ("auto", 0.4, None)
    assert [a.name for a in arms_for(["exact", "none", "exact"], True, 8, "auto")] == ["none", "draft", "exact"]
    assert [a.name for a in arms_for(["exact"], False, 8, "auto")] == ["none", "exact"]
    for given, spec, used in [(None, "fly", 15), (None, "exact", "auto"), (4, "fly", 4), (4, "fly:k=6", 6)]:
        arm = parse_arm(spec, given)
        assert arm.to_dict()["num_draft_tokens"] == arm.options().draft_length() == used, "what is used is recorded"
    assert parse_arm("fly:loop_repeats=0,loop_period=64").options().repetition_guard() == RepetitionGuard(0, 64)
    for spec, message in [
        ("exact:loop_repeats=2.5", "loop_repeats is '2.5'; give a whole number"),
        ("exact:k=0", "give a draft length of 1 or more"),
        ("magic", "there is no verifier 'magic'"),
        ("exact:draft_min_p=low", "draft_min_p is 'low'; give a number"),
        ("exact:draft_min_p=2", "draft_min_p is 2.0; give a probability"),
        ("exact:drafter=magic", "there is no drafter 'magic'"),
        ("exact:drafter=model:tree=30,tree=4", "drafter=model:tree=30;depth=6"),
    ]:
        with pytest.raises(BadRequest, match=message):
            parse_arm(spec)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"batch": 0}, "batch is 0; give 1 or more"),
        ({"repeats": 0}, "repeats is 0; give 1 or more"),
        ({"n": None}, "pocket makes its problems from the seed and has no end"),
        ({"task": "magic"}, "there is no task 'magic'"),
        ({"methods": ["magic"]}, "there is no verifier 'magic'"),
    ],
)
def test_bad_configs_are_refused_before_a_model_is_loaded(changes: dict, message: str):
    with pytest.raises(BadRequest, match=message):  # and not that there is no such target
        Bench(replace(CONFIG, target="/nowhere", **changes))


def test_figures_are_printed_where_no_plots_can_be_drawn(
    finished: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    def refuse(*_: object) -> None:
        raise BadRequest("install matplotlib")

    monkeypatch.setattr("semspec.bench.report.write_report", refuse)
    commands.finish([finished], finished)
    out, err = capsys.readouterr()
    assert f"no report: install matplotlib; then `semspec compare {finished}` draws it" in err and "exact:k=3" in err
    document = json.loads(out.splitlines()[-1])
    assert document["report"] is None and document["runs"][0]["arms"]["exact:k=3"]["speedup"]


def test_an_ablation_changes_one_setting_at_a_time():
    methods = ablation("fly")
    assert len(methods) == 1 + 1 + 4 + 4 + 4 + 2 and methods[0] == "exact:k=15,drafter=cascade"
    base, *changed = (parse_arm(method) for method in methods[1:])
    assert (base.verifier, base.num_draft_tokens, base.drafter) == ("fly:window=6,theta=0.3", 15, "cascade")
    for arm in changed:
        differs = [arm.drafter != base.drafter, arm.num_draft_tokens != base.num_draft_tokens]
        differs += [
            getattr(make(arm.verifier), name) != getattr(make(base.verifier), name) for name in ("window", "theta")
        ]
        assert sum(differs) == 1
    assert len(ablation("fly", every=True)) == 1 + 5 * 5 * 5 * 3
    with pytest.raises(BadRequest, match="there is no ablation of 'exact'; there are some of: fly"):
        ablation("exact")


def test_every_idea_of_semantic_plus_can_be_turned_off():
    beside, *methods = ablation("semantic+:probes=some/folder")
    assert parse_arm(beside).lossless
    full, *others = (parse_arm(method) for method in methods)
    options = vars(make(full.verifier))
    assert options | {"probes": ""} == vars(make("semantic+")) and options["probes"] == "some/folder"
    changed = [{k: v for k, v in vars(make(arm.verifier)).items() if v != options[k]} for arm in others]
    assert changed == [
        {"keep": False}, {"rewrite": "sampling"}, {"rewrite": "typical"}, {"rewrite": ""}, {"rewrite_tokens": 5},
        {"sample": True}, {"lead": 1}, {"steps": 4}, {"part": True}, {},
    ]  # fmt: skip
    assert [arm.draft_min_p for arm in (full, *others)] == [0.0] * 10 + [0.4]


def test_an_ablation_is_a_bench_with_these_methods(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    asked = []
    monkeypatch.setattr(Bench, "__init__", lambda self, config, report: asked.append(config))
    monkeypatch.setattr(Bench, "run", lambda self, out, progress: asked.append(out))
    monkeypatch.setattr(commands, "finish", lambda folders, out, trust, as_json: None)
    command = typer.main.get_command(commands.app)
    command(
        ["--task", "pocket:steps=3", "--problems", "5", "--out", str(tmp_path), "ablate", "fly"], standalone_mode=False
    )
    config, out = asked
    assert config == Config(task="pocket:steps=3", methods=ablation("fly"), n=5) and out == tmp_path
    with pytest.raises(BadRequest, match="say where to keep the run with --out"):
        command(["ablate", "fly"], standalone_mode=False)


def test_the_command_prints_a_table_a_report_and_one_json_line(tmp_path: Path):
    words = "bench --task pocket:steps=3 --problems 5 --method exact:k=2 --max-new-tokens 24 --device cpu --out"
    done = subprocess.run(
        [sys.executable, "-m", "semspec", *words.split(), str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=300,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout.splitlines()[-1])
    assert Path(document["report"]).is_file() and "exact:k=2" in done.stderr
    again = subprocess.run(
        [sys.executable, "-m", "semspec", "compare", str(tmp_path)], capture_output=True, text=True, timeout=300
    )
    assert again.returncode == 0 and json.loads(again.stdout.splitlines()[-1])["runs"] == document["runs"]


def test_a_step_rule_is_judged_by_its_steps(pocket: semspec.Pair, tmp_path: Path) -> None:
    """Each is recorded with its outcome and whether it was valid; the oracle refuses all bad ones."""
    ahead = ["oracle:steps=3,ahead=0", "random-step:rate=1,steps=3,ahead=0,keep=true,draft_min_p=0.3"]
    config = Config("pocket:steps=3", ["oracle", "random-step:rate=1", "random-step:rate=0", *ahead], n=6)
    summary = Bench(replace(config, temperature=0.6, device="cpu", context=512), pocket).run(tmp_path / "run")
    _, rows = load_run(tmp_path / "run")
    for sample in rows:
        outcomes = Counter(j["outcome"] for j in sample["drafted_steps"])
        counted = {k: n for k, n in sample["stats"]["step_outcomes"].items() if k != "target"}
        assert outcomes == counted and (sample["arm"] in ("none", "draft")) <= (not outcomes)
        if sample["arm"].startswith("oracle"):
            assert all((j["outcome"] == "accepted") <= j["valid"] for j in sample["drafted_steps"])
    arms = summary["arms"]
    assert arms["none"]["steps_accepted"] is None
    assert arms["random-step:rate=0"]["steps_accepted"]["share"] == 0
    refused = arms["oracle"]["invalid_refused"]
    assert refused is None or refused["share"] == 1


def test_what_a_replay_takes_is_what_was_planned() -> None:
    target = replaying.Replay("tiny", 2, 64, "cpu").runners["target"]
    planned = replaying.planned("target", SHAPES["tiny"][0], 2, 64, target.device, torch.float32)
    assert planned.kv == target.cache.keys.nbytes + target.cache.values.nbytes


def test_a_run_records_questions_once(finished: Path) -> None:
    lines = [json.loads(line) for line in (finished / "samples.jsonl").read_text().splitlines()]
    asked = [s for s in lines if "question" in s]
    assert {s["arm"] for s in asked} == {"none"} and len(asked) == len({s["problem"] for s in lines})
    story = Pocket(steps=3).problems(6, 0)[asked[0]["index"]]
    assert asked[0]["question"] == story.prompt[-1]["content"] and asked[0]["answer"] == story.answer


def test_no_arm_finds_what_another_has_read(finished: Path) -> None:
    _, samples = load_run(finished)
    assert len({s["arm"] for s in samples}) > 1 and all(s["stats"]["cached_tokens"] == 0 for s in samples)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (
            {"question": "word " * 600},
            r"1 of 4 prompts do not fit into the context of 512 .*: jsonl/3; the longest",
        ),
        ({"prompt": ""}, "problem jsonl/3: the prompt is empty"),
        ({"messages": [{"role": "user"}]}, "problem jsonl/3: a chat message needs a role and a content"),
    ],
)
def test_a_prompt_that_cannot_be_read_is_told_before_any_is_answered(tmp_path: Path, row: dict, message: str) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(json.dumps(one) + "\n" for one in [*({"question": f"Why {i}?"} for i in range(3)), row]))
    small = semspec.load("pocket", context=512, device="cpu")
    with pytest.raises(BadRequest, match=message):
        Bench(Config(task=f"jsonl:path={file}", methods=["fly"], device="cpu"), small)
