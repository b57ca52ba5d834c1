"""`spec-bench`: prompts of six kinds, for speed on many kinds of text."""

from __future__ import annotations

from dataclasses import dataclass

from semspec.errors import BadRequest
from semspec.tasks.base import Problem
from semspec.tasks.chat import ChatTask

SINGLE_TURN = ("translation", "summarization", "qa", "math_reasoning", "rag")
CATEGORIES = ("mt_bench", *SINGLE_TURN)


@dataclass(frozen=True)
class SpecBench(ChatTask):
    """The 480 prompts of Spec-Bench (Xia et al. 2024), 80 of each category; those of `mt_bench` have two turns."""

    name = "spec-bench"
    path = "spec_bench/question.jsonl"

    category: str = ""  # one of CATEGORIES; empty: all

    def __post_init__(self) -> None:
        if self.category and self.category.replace("-", "_") not in CATEGORIES:
            raise BadRequest(f"spec-bench has no category {self.category!r}; choose one of {', '.join(CATEGORIES)}")

    def load(self) -> list[Problem]:
        wanted = self.category.replace("-", "_")
        return [problem for problem in super().load() if wanted in ("", problem.group)]

    def group(self, category: str) -> str:
        return category if category in SINGLE_TURN else "mt_bench"  # the file names its eight parts
