"""One collection out of several that were made beside one another: the same in all but their problems."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from semspec.errors import BadRequest
from semspec.fit.data import Folder, plain, write_lines

MAY_DIFFER = ("seed", "n")


def join(folders: Sequence[Folder], out: Path) -> Folder:
    """All samples and labels, in this order. Traces, from which nothing is sampled any more, are left behind."""
    runs, about = [folder.run for folder in folders], [folder.labelled for folder in folders]
    for folder, run, made in zip(folders, runs, about, strict=True):
        if differs := [key for key in runs[0] if _same(run[key]) != _same(runs[0][key])]:
            raise BadRequest(f"{folder.path} and {folders[0].path} were collected differently: {differs[0]} differs")
        if made != about[0]:
            raise BadRequest(f"{folder.path} and {folders[0].path} were labelled differently; label them the same way")
    if out.exists() and any(out.iterdir()):
        raise BadRequest(f"{out} is not empty; give another --out")
    joined, histories, whose = Folder(out), list[dict[str, Any]](), dict[str, Path]()
    joined.open(
        runs[0] | {"config": runs[0]["config"] | {key: [r["config"].get(key) for r in runs] for key in MAY_DIFFER}}
    )
    joined.open_labels(about[0])
    place = 0
    for number, folder in enumerate(folders):
        histories += [{"id": f"{number}:{id}", "history": text} for id, text in folder.read_histories().items()]
        for shard in folder.shards:
            samples = [replace(row, prefix=f"{number}:{row.prefix}") for row in folder.read_samples(shard)]
            for problem in {row.problem for row in samples}:
                if whose.setdefault(problem, folder.path) != folder.path:
                    raise BadRequest(
                        f"{folder.path} and {whose[problem]} both have problem {problem}; give other seeds"
                    )
            shutil.copyfile(folder.samples / f"{shard:05}.safetensors", joined.samples / f"{place:05}.safetensors")
            labels = [replace(row, prefix=f"{number}:{row.prefix}") for row in folder.read_labels(shard)]
            joined.write_labels(place, labels)
            write_lines(joined.samples / f"{place:05}.jsonl", map(plain, samples))
            place += 1
    write_lines(joined.path / "prefixes.jsonl", histories)
    return joined


def _same(part: Any) -> Any:
    """A part of a run's description, without what may differ."""
    return {key: value for key, value in part.items() if key not in MAY_DIFFER} if isinstance(part, dict) else part
