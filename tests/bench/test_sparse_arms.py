"""Methods with sparse plans of their own, in one run: the paper's table (arXiv 2512.21911) in small."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import semspec
from semspec.bench import replay as replaying
from semspec.bench.arms import parse_arm
from semspec.bench.run import Bench, Config
from semspec.errors import BadRequest
from semspec.model import ModelRunner
from semspec.sparse import AttentionPlan, PlanSwitch, SparsePlan
from tests.bench.conftest import samples
from tests.checkpoints import make_model, save
from tests.sparse.runners import check, load, read, text, with_plan
from tests.tasks.test_longbench import write

PAPER = AttentionPlan(block=8, dense_below=32, rho=0.0, recent=1, score="first")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Data, and two plans: one that skips much, one that skips nothing."""
    folder = tmp_path_factory.mktemp("longbench")
    SparsePlan(attention=PAPER).save(folder / "few")
    SparsePlan(attention=replace(PAPER, rho=1.0)).save(folder / "all")
    return write(folder)


def config(folder: Path, methods: list[str], **more: object) -> Config:
    return Config(
        "longbench", methods, data=str(folder), n=4, seed=1, max_new_tokens=12, device="cpu", context=256, **more
    )  # type: ignore[arg-type]


def test_every_method_has_its_own_plan(folder: Path, tmp_path: Path) -> None:
    few, everything = f"exact:k=3,sparse={folder / 'few'}", f"exact:k=3,sparse={folder / 'all'}"
    pair = semspec.load("pocket", device="cpu", slots=1, context=256)
    bench = Bench(config(folder, ["exact:k=3", few, everything]), pair)
    summary = bench.run(tmp_path / "run")
    arms = {arm["name"]: arm for arm in json.loads((tmp_path / "run" / "run.json").read_text())["arms"]}
    assert arms["exact:k=3"]["lossless"] and not arms[few]["lossless"] and arms[few]["sparse"] == str(folder / "few")
    tokens = {name: [s["tokens"] for s in samples(tmp_path / "run") if s["arm"] == name] for name in arms}
    assert tokens["exact:k=3"] == tokens[everything] == tokens["none"]
    assert tokens[few] != tokens["none"]
    alone = Bench(config(folder, ["exact:k=3"], sparse=str(folder / "few")))
    alone.run(tmp_path / "alone")
    assert [s["tokens"] for s in samples(tmp_path / "alone") if s["arm"] == "exact:k=3"] == tokens[few]
    assert summary["graded"] and set(summary["arms"][few]["groups"]) == {s["group"] for s in samples(tmp_path / "run")}
    assert all(0 <= s["correct"] <= 1 and isinstance(s["correct"], float) for s in samples(tmp_path / "run"))
    with pytest.raises(BadRequest, match="sparse plan, which fits one model only"):
        replaying.replay(tmp_path / "run", "tiny", tmp_path / "replayed", "cpu")


def test_what_a_plan_knew_of_the_cache_is_forgotten(tmp_path: Path) -> None:
    """A slot that is rewritten while another plan is at work. Planted: without `restart` its old means are used."""
    model = load(save(make_model("llama3.1"), tmp_path))
    runner = ModelRunner(model.transformer, 1, 512)
    plans = PlanSwitch(runner, {"few": SparsePlan(attention=PAPER), "other": SparsePlan(attention=PAPER)})
    plans.use("few")
    slot = runner.acquire()
    found = []
    for other in (False, True):
        runner.truncate(slot, 0)
        read(runner, slot, text(1 + other, 200))
        if other:
            plans.use("other")
            runner.truncate(slot, 0)
            read(runner, slot, text(3, 200))
            check(runner, slot, text(5, 4))
            runner.truncate(slot, 200)
            plans.use("few")
        found.append(check(runner, slot, text(5, 4)))
    fresh = with_plan(model, attention=PAPER)
    slot = fresh.acquire()
    read(fresh, slot, text(3, 200))
    torch.testing.assert_close(found[1], check(fresh, slot, text(5, 4)))
    plans.use("none")
    assert runner.sparsity is None


def test_a_plan_that_is_not_there_is_refused_before_a_model_is_loaded(folder: Path) -> None:
    with pytest.raises(BadRequest, match=r"has no plan\.json"):
        Bench(config(folder, ["exact:sparse=nowhere"], target="no/such-model"))
    assert parse_arm("fly:k=15,sparse=x").sparse == "x"


def test_the_table_by_one_command(semspec, folder: Path, tmp_path: Path) -> None:
    out, table = tmp_path / "run", tmp_path / "table.md"
    done = semspec(
        "bench", "--task", "longbench:sets=hotpotqa+lcc", "--data", folder, "--problems", 4, "--max-new-tokens", 8,
        "--device", "cpu", "--context", 256, "--method", "exact:k=3", "--method", f"exact:k=3,sparse={folder / 'few'}",
        "--out", out,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    done = semspec("compare", out, "--markdown", table)
    assert done.returncode == 0, done.stderr
    head = table.read_text().split("\n| ", 1)[1].splitlines()[0]
    assert "score, %" in head and "hotpotqa" in head and "lcc" in head
