"""Base of the competition tasks: one file format, a boxed answer, and the scorer for formulas."""

from __future__ import annotations

from semspec.tasks.answers import same_math
from semspec.tasks.base import FileTask, Problem, Row, ask

INSTRUCTION = "Please reason step by step, and put your final answer within \\boxed{}."


class ContestTask(FileTask):
    def problem(self, row: Row) -> Problem:
        answer = row["answer"]
        answer = f"{answer:g}" if isinstance(answer, float) else str(answer)  # amc23 writes 27.0
        id_ = row.get("unique_id") or f"{self.name}/{row.get('id', row.index)}"
        group = f"level {row['level']}" if "level" in row else ""
        question = row["question"] if "question" in row and "problem" not in row else row["problem"]
        return Problem(id_, ask(f"{question}\n\n{INSTRUCTION}"), answer, group)

    def score(self, problem: Problem, text: str) -> bool:
        return same_math(text, problem.answer)
