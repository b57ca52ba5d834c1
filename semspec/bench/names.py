"""Names for people: models without the paths of one machine, what a run is, groups in the order in which one counts."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from semspec.pocket.shipped import shipped_pair

_LABEL = re.compile(r"decisions: (?P<decisions>.*), cost: (?P<cost>.*) on (?P<where>.*)", re.DOTALL)


def model_name(given: str) -> str:
    """A hub id as it is, a file or folder by its own name, also in the hub's cache."""
    cached = re.search(r"models--([^/]+?)--([^/]+)/", given)
    if cached:
        return f"{cached[1]}/{cached[2]}"
    if re.fullmatch(r"[\w-][\w.-]*(/[\w-][\w.-]*)?", given) and not given.endswith(".gguf"):
        return given
    return Path(given).name.removesuffix(".gguf") or given


def pair_name(given: str) -> str:
    """Target and draft, of a run's label; `pocket` brings its draft."""
    target, _, draft = given.partition(" + ")
    names = shipped_pair(target, draft or None)
    return " with draft ".join(model_name(str(name)) for name in names if name is not None)


def task_name(given: str) -> str:
    """A task as it was given; one's own file by its name alone."""
    kind, _, options = given.partition(":")
    if kind != "jsonl":
        return given
    path, *more = options.removeprefix("path=").split(",")
    return ", ".join([Path(path).name or given, *more])


def described(summary: dict[str, Any]) -> str:
    """Whose decisions and whose cost the figures are; both in one word where they are one pair's."""
    found = _LABEL.fullmatch(summary["label"])
    if not found:
        return str(summary["label"])
    decisions, cost = pair_name(found["decisions"]), pair_name(found["cost"])
    pair = decisions if decisions == cost else f"decisions of {decisions}, cost of {cost}"
    return f"{pair} on {found['where']}"


def natural(text: str) -> list[tuple[int, int, str]]:
    """A key that sorts "3 steps" before "10 steps"."""
    parts = re.findall(r"\d+|\D+", text)
    return [(0, int(part), "") if part.isdecimal() else (1, 0, part) for part in parts]
