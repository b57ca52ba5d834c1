"""One collection out of several that were made in parallel: the same in all but their problems; or, `mixed`, of other
tasks and traces as well, as the probes of SemanticSpec's released code that were trained on mathematics and science."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from semspec.errors import BadRequest
from semspec.probe_fit.data import BEFORE, Folder, plain, write_lines

EACH = ("seed", "n")  # what differs between them; all values are stored
SUBJECT = ("task", "traces")  # and between mixed ones
PLACES = ("data", "shard")  # where and how things lie, which changes nothing


def join(folders: Sequence[Folder], out: Path, mixed: bool = False) -> Folder:
    """All samples and labels, in this order. Traces are left out: nothing is sampled from them any more."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise BadRequest(f"{out} is not empty; give another --out")
    runs = [folder.run for folder in folders]
    each = (*EACH, *(SUBJECT if mixed else ()))
    _check(folders, runs, each)
    part = Folder(out.with_name(f"{out.name}.part"))
    shutil.rmtree(part.path, ignore_errors=True)  # of a join that was killed
    config = runs[0]["config"] | {key: [run["config"].get(key) for run in runs] for key in each}
    part.open(runs[0] | {"config": config})
    part.open_labels(folders[0].labelled)
    histories, shards = list[dict[str, Any]](), 0
    for number, folder in enumerate(folders):
        histories += [{"id": f"{number}:{id}", "history": text} for id, text in folder.read_histories().items()]
        for shard in folder.shards:
            shutil.copyfile(folder.samples / f"{shard:05}.safetensors", part.samples / f"{shards:05}.safetensors")
            samples = [replace(row, prefix=f"{number}:{row.prefix}") for row in folder.read_samples(shard)]
            write_lines(part.samples / f"{shards:05}.jsonl", map(plain, samples))
            part.write_labels(
                shards, [replace(row, prefix=f"{number}:{row.prefix}") for row in folder.read_labels(shard)]
            )
            shards += 1
    write_lines(part.path / "prefixes.jsonl", histories)
    if out.exists():
        out.rmdir()
    part.path.rename(out)
    return Folder(out)


def _check(folders: Sequence[Folder], runs: Sequence[dict[str, Any]], each: tuple[str, ...]) -> None:
    """Refuse what does not belong together."""
    whose: dict[tuple[Any, str], Path] = {}
    for folder, run in zip(folders, runs, strict=True):
        one, other = _same_in_all(runs[0], each), _same_in_all(run, each)
        if differs := [key for key in {**one, **other} if one.get(key) != other.get(key)]:
            raise BadRequest(
                f"{folder.path} and {folders[0].path} were collected differently: {differs[0]} differs; collect them "
                "with the same models and options, but for --seed and --problems; or join other tasks with --mixed"
            )
        if folder.labelled != folders[0].labelled:
            raise BadRequest(f"{folder.path} and {folders[0].path} were labelled differently; label them the same way")
        seed = str(run["config"].get("seed"))
        mine = {(seed, row.problem) for shard in folder.shards for row in folder.read_samples(shard)}
        for key in sorted(mine & whose.keys()):
            raise BadRequest(f"{folder.path} and {whose[key]} both have {key[1]} with seed {seed}; give each once")
        whose |= dict.fromkeys(mine, folder.path)


def _same_in_all(run: dict[str, Any], each: tuple[str, ...]) -> dict[str, Any]:
    """What must be the same. The rule that wrote traces is told by what it did, not by where its probes lie."""
    aside = (*each, *PLACES, *(("traces",) if "collected_by" in run else ()))
    config = BEFORE | run["config"]
    return {key: value for key, value in config.items() if key not in aside} | {
        k: v for k, v in run.items() if k != "config"
    }
