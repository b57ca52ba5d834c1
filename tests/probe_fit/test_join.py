from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from semspec.errors import BadRequest
from semspec.probe.features import Features
from semspec.probe_fit.data import Folder, write
from semspec.probe_fit.join import join
from semspec.probe_fit.rows import load_rows
from tests.probe_fit.test_train import known

SEEN = Features((2,))


def part(path: Path, seed: int, name: str) -> Folder:
    """A labelled collection of problems with names of their own."""
    made = known(path, problems=4, seed=seed)
    made.write_shard(0, [replace(s, problem=f"{name}-{s.problem}") for s in made.read_samples(0)], made.read_states(0))
    write(path / "prefixes.jsonl", "\n".join(json.dumps({"id": s.prefix, "history": f"{name} {s.prefix}"}) for s in made.read_samples(0)))  # noqa: E501  # fmt: skip
    return made


def test_a_joined_collection_has_the_rows_of_all(tmp_path: Path) -> None:
    one, other = part(tmp_path / "a", 1, "a"), part(tmp_path / "b", 2, "b")
    rows = load_rows(join([one, other], tmp_path / "all"), "target", SEEN, "cross")
    alone = [load_rows(folder, "target", SEEN, "cross") for folder in (one, other)]
    assert torch.equal(rows.features, torch.cat([r.features for r in alone]))
    assert torch.equal(rows.labels, torch.cat([r.labels for r in alone]))
    assert rows.problems == [p for r in alone for p in r.problems]
    assert len(set(rows.prefixes)) == sum(len(set(r.prefixes)) for r in alone), "prefixes stay apart"
    histories = Folder(tmp_path / "all").read_histories()
    assert histories[rows.prefixes[0]].startswith("a ") and histories[rows.prefixes[-1]].startswith("b ")


def test_the_same_problems_with_another_seed_are_others(tmp_path: Path) -> None:
    """Tasks of few problems have no others; and where data lie, or how probes are called, is no difference."""
    folders = [part(tmp_path / name, i, "a") for i, name in enumerate("ab")]
    for i, folder in enumerate(folders):
        config = {"seed": i, "n": 4, "data": f"/there/{i}", "shard": i, "traces": f"semantic+:probes={i}"}
        write(
            folder.path / "run.json", json.dumps(folder.run | {"config": config, "collected_by": {"judge_probe": "x"}})
        )
    joined = join(folders, tmp_path / "all").run
    assert joined["config"]["seed"] == [0, 1] and joined["collected_by"] == {"judge_probe": "x"}
    write(folders[1].path / "run.json", json.dumps(folders[1].run | {"collected_by": {"judge_probe": "y"}}))
    with pytest.raises(BadRequest, match="collected_by differs"):
        join(folders, tmp_path / "more")


def test_what_does_not_belong_together_is_not_joined(tmp_path: Path) -> None:
    one = part(tmp_path / "a", 1, "a")
    for twice in ([one, part(tmp_path / "same", 2, "a")], [one, one]):
        with pytest.raises(BadRequest, match="both have a-p0 with seed None"):
            join(twice, tmp_path / "all")
    assert not list(tmp_path.glob("all*")), "nothing is left of it"
    other = part(tmp_path / "b", 2, "b")
    run = other.run
    write(other.path / "run.json", json.dumps(run | {"models": run["models"] | {"draft": "another"}}))
    with pytest.raises(BadRequest, match="models differs"):
        join([one, other], tmp_path / "more")
    write(other.path / "run.json", json.dumps(run | {"config": {"temperature": 0.9}}))
    with pytest.raises(BadRequest, match="temperature differs; collect them with the same"):
        join([one, other], tmp_path / "more")
    write(other.path / "run.json", json.dumps(run))
    write(other.labels / "run.json", json.dumps({"clusters": "otherwise"}))
    with pytest.raises(BadRequest, match="labelled differently"):
        join([one, other], tmp_path / "more")
    with pytest.raises(BadRequest, match="not empty"):
        join([one], tmp_path / "b")


def test_other_tasks_are_joined_only_if_they_may_be_mixed(tmp_path: Path) -> None:
    folders = [part(tmp_path / name, i, name) for i, name in enumerate("ab")]
    for folder, task in zip(folders, ("math500", "gpqa"), strict=True):
        config = {"seed": 0, "n": 4, "task": task, "traces": f"s1k-{task}.jsonl"}
        write(folder.path / "run.json", json.dumps(folder.run | {"config": config}))
    with pytest.raises(BadRequest, match=r"task differs.*--mixed"):
        join(folders, tmp_path / "all")
    joined = join(folders, tmp_path / "all", mixed=True)
    assert joined.run["config"]["task"] == ["math500", "gpqa"]
    alone = [load_rows(folder, "target", SEEN, "own") for folder in folders]
    assert load_rows(joined, "target", SEEN, "own").problems == [p for rows in alone for p in rows.problems]
