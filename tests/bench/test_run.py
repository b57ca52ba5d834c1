"""Runs: arms that take turns, samples that survive a kill, passes that can be made again."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
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
from semspec.bench.run import Bench, Config
from semspec.cli import bench as commands
from semspec.errors import BadRequest, ModelError
from semspec.loop.repetition import RepetitionGuard
from semspec.model import memory_plan as plan
from semspec.model.config import Shape
from semspec.types import Sampling
from semspec.verify import make

CONFIG = Config(
    task="pocket:steps=3",
    methods=["exact:k=3", "sampling"],
    n=6,
    temperature=0.6,
    max_new_tokens=24,
    device="cpu",
    context=512,
)


@pytest.fixture(scope="module")
def pocket() -> semspec.Pair:
    return semspec.load("pocket", device="cpu", slots=4, context=512)


@pytest.fixture(scope="module")
def finished(pocket: semspec.Pair, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a whole run; tests only read it."""
    folder = tmp_path_factory.mktemp("run")
    Bench(CONFIG, pocket).run(folder)
    return folder


def samples(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]


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
        timed = ("seconds", "speedup", "time_ratio", "pareto")
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
from semspec.bench.run import Bench, Config
from tests.bench.test_run import CONFIG
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


def test_a_replay_makes_exactly_the_recorded_passes(finished: Path, tmp_path: Path):
    _, recorded = load_run(finished)
    passes = [p for s in recorded for p in s["passes"]]
    summary = replaying.replay(finished, "tiny", tmp_path, device="cpu")
    assert summary["replayed_passes"] == {m: sum(p[0] == m for p in passes) for m in ("target", "draft")}
    run, again = load_run(tmp_path)
    assert run["label"] == "decisions: pocket, cost: tiny on CPU"
    assert [s["tokens"] for s in again] == [s["tokens"] for s in recorded]
    assert all(s["seconds"] > 0 and s["seconds"] != s["seconds_recorded"] for s in again)
    assert all(sum(s["stats"]["seconds"].values()) == s["seconds"] for s in again)
    assert all(s["stats"]["seconds"]["draft"] == 0 for s in again if s["arm"] == "none"), "each model has its own"
    player = replaying.Replay("tiny", 1, 1024, "cpu")
    player.play(passes)
    assert player.executed == passes


def test_a_replay_computes_in_vain_what_a_gpu_would():
    player = replaying.Replay("tiny", 2, 64, "cpu")
    target = player.runners["target"]
    rows = [[1, 9, 3, 40], [1, 9, 5, 40]]
    assert replaying.written(target, rows) == [3, 5], "a processor stops at once"
    target.computed = lambda wrote, n: min(n, wrote + 4)  # type: ignore[method-assign]
    assert replaying.written(target, rows) == [3, 9]
    assert replaying.written(target, [[1, 9, 5]]) == [5], "runs of older versions"
    player.play([["target", "roll", rows]])
    assert [target.length(slot) for slot in (0, 1)] == [9 + 1 + 3 - 1, 9 + 1 + 9 - 1]


def test_a_replay_draws_as_the_run_did(monkeypatch: pytest.MonkeyPatch):
    player = replaying.Replay("tiny", 1, 64, "cpu", sampling=Sampling(0.6))
    rolled = []
    monkeypatch.setattr(player.runners["draft"], "decode", rolled.extend)
    player.play([["draft", "roll", [row]] for row in ([1, 9, 3, 40, 1, 0], [1, 9, 3, 40, 0, 0], [1, 9, 3, 40, 0, 1])])
    assert [(r.sampling.temperature, r.keep_logits) for r in rolled] == [(0.6, True), (0.6, False), (0.0, False)]


def test_warming_up_meets_every_size_once():
    passes = [["target", "score", [[9, at, 9]]] for at in range(5)] + [["target", "score", [[8, 0, 8]]]]
    passes += [["draft", "roll", [[1, at, 300 + at, 400]]] for at in range(5)]
    found = replaying.once_each(passes)
    assert [p[2] for p in found] == [[[9, 0, 9]], [[8, 0, 8]], [[1, 0, replaying.BRIEF, 400]]]


@pytest.mark.parametrize(
    ("shape", "billions"), [("32B/1.5B", (32.8, 1.54)), ("8B/1B", (8.03, 1.24)), ("30B-A3B/0.6B", (30.5, 0.60))]
)
def test_named_shapes_have_the_sizes_of_the_models_they_stand_for(shape: str, billions: tuple[float, float]):
    sizes = [Shape.of(config).parameters / 1e9 for config in replaying.SHAPES[shape]]
    assert sizes == pytest.approx(billions, rel=0.01)


def test_recorded_passes_account_for_every_token(finished: Path):
    for s in samples(finished):
        scored = [rows for model, kind, rows in s["passes"] if model == "target" and kind == "score"]
        if s["arm"] == "exact:k=3":
            assert sum(keep > 0 for rows in scored for _, _, keep in rows) == s["stats"]["target_passes"]
            assert sum(keep - 1 for rows in scored for _, _, keep in rows) == s["stats"]["drafted"]
        if s["arm"] == "none":
            written = sum(out for model, kind, rows in s["passes"] for _, _, out, *_ in rows if kind == "roll")
            assert len(s["tokens"]) <= written + 1


def test_methods_are_read_with_their_draft_length_and_drafter():
    arm = parse_arm("exact:k=4,drafter=ngram")
    assert (arm.verifier, arm.num_draft_tokens, arm.drafter, arm.lossless) == ("exact", 4, "ngram", True)
    options = parse_arm("block:k=auto,draft_min_p=0.4").options()
    assert (options.num_draft_tokens, options.draft_min_p, options.draft_max_entropy) == ("auto", 0.4, None)
    assert [a.name for a in arms_for(["exact", "none", "exact"], True, 8, "auto")] == ["none", "draft", "exact"]
    assert [a.name for a in arms_for(["exact"], False, 8, "auto")] == ["none", "exact"]
    for given, spec, used in [(None, "fly", 15), (None, "exact", 8), (4, "fly", 4), (4, "fly:k=6", 6)]:
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
    ]:
        with pytest.raises(BadRequest, match=message):
            parse_arm(spec)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"batch": 0}, "batch is 0; give 1 or more"),
        ({"repeats": 0}, "repeats is 0; give 1 or more"),
        ({"n": None}, "the pocket world has no end"),
        ({"task": "magic"}, "there is no task 'magic'"),
        ({"methods": ["magic"]}, "there is no verifier 'magic'"),
    ],
)
def test_bad_configs_are_refused_before_a_model_is_loaded(changes: dict, message: str):
    began = time.perf_counter()
    with pytest.raises(BadRequest, match=message):
        Bench(replace(CONFIG, target="/nowhere", **changes))
    assert time.perf_counter() - began < 5


def test_figures_are_printed_where_no_plots_can_be_drawn(
    finished: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    def refuse(*_: object) -> None:
        raise BadRequest("install matplotlib")

    monkeypatch.setattr("semspec.bench.report.write_report", refuse)
    commands.finish([finished], finished)
    out, err = capsys.readouterr()
    assert "no report: install matplotlib" in err and "exact:k=3" in err
    document = json.loads(out.splitlines()[-1])
    assert document["report"] is None and document["runs"][0]["arms"]["exact:k=3"]["speedup"]


def test_an_ablation_changes_one_setting_at_a_time():
    methods = ablation("fly")
    assert len(methods) == 1 + 1 + 4 + 4 + 1 and methods[0] == "exact:k=15,drafter=model"
    base, *changed = (parse_arm(method) for method in methods[1:])
    assert (base.verifier, base.num_draft_tokens, base.drafter) == ("fly:window=6,theta=0.3", 15, "model")
    for arm in changed:
        differs = [arm.drafter != base.drafter]
        differs += [
            getattr(make(arm.verifier), name) != getattr(make(base.verifier), name) for name in ("window", "theta")
        ]
        assert sum(differs) == 1
    assert len(ablation("fly", every=True)) == 1 + 5 * 5 * 2
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
    monkeypatch.setattr(commands, "finish", lambda folders, out: None)
    command = typer.main.get_command(commands.app)
    command(["--task", "pocket:steps=3", "--n", "5", "--out", str(tmp_path), "ablate", "fly"], standalone_mode=False)
    config, out = asked
    assert config == Config(task="pocket:steps=3", methods=ablation("fly"), n=5) and out == tmp_path
    with pytest.raises(BadRequest, match="say where to keep the run with --out"):
        command(["ablate", "fly"], standalone_mode=False)


def test_the_command_prints_a_table_a_report_and_one_json_line(tmp_path: Path):
    words = "bench --task pocket:steps=3 --n 5 --method exact:k=2 --max-new-tokens 24 --device cpu --context 512 --out"
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
    """Each is recorded with its fate and whether it was valid; the oracle refuses all bad ones."""
    ahead = ["oracle:steps=3,ahead=0", "random-step:rate=1,steps=3,ahead=0,keep=true,draft_min_p=0.3"]
    config = Config("pocket:steps=3", ["oracle", "random-step:rate=1", "random-step:rate=0", *ahead], n=6)
    summary = Bench(replace(config, temperature=0.6, device="cpu", context=512), pocket).run(tmp_path / "run")
    _, rows = load_run(tmp_path / "run")
    for sample in rows:
        fates = Counter(j["fate"] for j in sample["judged"])
        counted = {k: n for k, n in sample["stats"]["fates"].items() if k != "target"}
        assert fates == counted and (sample["arm"] in ("none", "draft")) <= (not fates)
        if sample["arm"].startswith("oracle"):
            assert all((j["fate"] == "accepted") <= j["valid"] for j in sample["judged"])
    arms = summary["arms"]
    assert arms["none"]["steps_accepted"] is None
    assert arms["random-step:rate=0"]["steps_accepted"]["share"] == 0
    refused = arms["oracle"]["invalid_refused"]
    assert refused is None or refused["share"] == 1


def test_a_replay_that_cannot_fit_is_refused_before_anything_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "available", lambda device: 10**9)
    with pytest.raises(ModelError, match="GB too much"):
        replaying.Replay("32B/1.5B", 1, 1024, "cpu")
    assert replaying.Replay("tiny", 1, 64, "cpu").runners


def test_what_a_replay_takes_is_what_was_planned() -> None:
    target = replaying.Replay("tiny", 2, 64, "cpu").runners["target"]
    planned = replaying.planned("target", replaying.SHAPES["tiny"][0], 2, 64, target.device, torch.float32)
    assert planned.kv == target.cache.keys.nbytes + target.cache.values.nbytes
