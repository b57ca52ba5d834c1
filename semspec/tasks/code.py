"""Base of the tasks that are scored by running the model's program against tests.

It runs in a process with limits (see `sandbox`), and only if `execute=true` allows it.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass, field

from semspec.errors import BadRequest
from semspec.tasks.answers import visible
from semspec.tasks.base import STYLES, FileTask
from semspec.tasks.sandbox import run

_FENCED = re.compile(r"```[ \t]*(?:python3?|py)?[ \t]*\n(.*?)(?:```|\Z)", re.DOTALL | re.IGNORECASE)


def code_in(text: str, wanted: Collection[str] = ()) -> str:
    """The program in an output: the last fenced block with a wanted function, else all blocks, else all text.

    A block that was never closed counts too: a stop string may remove the closing fence."""
    shown = visible(text)  # a program in the reasoning is no answer
    blocks: list[str] = _FENCED.findall(shown)
    defining = [block for block in blocks if set(wanted) & set(re.findall(r"^\s*def\s+(\w+)", block, re.MULTILINE))]
    return defining[-1] if defining else "\n".join(blocks) or shown


@dataclass(frozen=True)
class CodeTask(FileTask):
    max_new_tokens = 1024

    execute: bool = field(default=False, metadata={"label": "run what the model wrote; must be true"})
    timeout: float = field(default=10.0, metadata={"label": "seconds per program", "above": 0})
    style: str = field(default="own", metadata={"label": "prompts: own, or harness", "choices": STYLES})

    def __post_init__(self) -> None:
        if not self.execute:
            raise BadRequest(
                f"task {self.name!r} is scored by running code that a model wrote, in a process with limits that is "
                f"no full sandbox; if you accept this, allow it with {self.name}:execute=true"
            )
        super().__post_init__()

    def passes(self, program: str) -> bool:
        return run(program, seconds=self.timeout).passed
