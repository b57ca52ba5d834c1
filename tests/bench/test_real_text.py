"""The table of all rules on real text: no prompt comes twice, and runs are put together as one."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from bench.real_text import TASKS, methods, pooled
from semspec.tasks import make
from semspec.verify import CONTROLS, LOSSLESS, LOSSY, STEP_RULES
from semspec.verify import make as make_rule
from tests.bench.test_measures import made_up, same, swapped


def test_no_prompt_is_drawn_from_both_benchmarks(tmp_path: Path) -> None:
    shared = {"question_id": 81, "category": "writing", "turns": ["Compose.", "Again."]}
    for name, rows in (("mt_bench", [shared]), ("spec_bench", [shared, {"category": "rag", "turns": ["Look."]}])):
        (tmp_path / name).mkdir()
        (tmp_path / name / "question.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for turns in (0, 1):
        drawn = [p for task in TASKS.values() for p in make(task.format(turns), tmp_path).problems(None, 0)]
        said = [str(p.prompt) for p in drawn]
        assert len(said) == len(set(said)) == 2


def test_no_rule_is_left_out() -> None:
    """But those that need probes or a referee, what accepts nothing, and `traversal`, which is `block` on a chain."""
    taken = {make_rule(method.split(":")[0]).name for method in methods(0.7, draft=True, head=False, k=None)}
    ours = {rule.name for rule in (*LOSSLESS, *LOSSY, *CONTROLS, *STEP_RULES)}
    assert ours - taken == {"none", "traversal", "semantic", "semantic+", "oracle", "accept-no-step"}


def test_batches_of_several_runs_stay_apart(tmp_path: Path) -> None:
    """Seconds have intervals over batches, so the first of one run must not be counted as one with that of another."""
    coin: Callable[[int], str] = swapped(3)
    folders = [tmp_path / "a", tmp_path / "b"]
    for folder in folders:
        run, samples = made_up(**{"fly": same, "random:rate=0.5": coin})
        run["config"] |= {"n": 60, "batch": 7}
        folder.mkdir()
        (folder / "run.json").write_text(json.dumps(run))
        rows = [s | {"problem": f"{folder.name}/{s['problem']}"} for s in samples]
        (folder / "samples.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = pooled(folders, "none")
    assert found["problems"] == 120 and found["task"] == "jsonl and jsonl"
    assert found["arms"]["fly"]["seconds_per_problem"]["low"] is not None
