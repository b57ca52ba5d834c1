"""`amc23`: competition problems between math500 and aime24."""

from __future__ import annotations

from dataclasses import dataclass

from semspec.tasks.contest import ContestTask


@dataclass(frozen=True)
class Amc23(ContestTask):
    """40 problems of AMC 2023, those whose answer is a number."""

    name = "amc23"
    max_new_tokens = 8192
    filename = "math/amc23.jsonl"
