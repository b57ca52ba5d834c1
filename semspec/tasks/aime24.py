"""`aime24`: hard competition problems, long to think about."""

from __future__ import annotations

from dataclasses import dataclass

from semspec.tasks.contest import ContestTask


@dataclass(frozen=True)
class Aime24(ContestTask):
    """The 30 problems of AIME 2024; answers are whole numbers from 0 to 999."""

    name = "aime24"
    max_new_tokens = 16384
    filename = "math/aime24.jsonl"
