"""What the competition tasks share: one file format, a boxed answer, and the scorer for formulas."""

from __future__ import annotations

from typing import ClassVar

from semspec.tasks.answers import same_math
from semspec.tasks.base import FileTask, Problem, ask, field, read_rows

INSTRUCTION = "Please reason step by step, and put your final answer within \\boxed{}."


class ContestTask(FileTask):
    path: ClassVar[str]

    def load(self) -> list[Problem]:
        path = self.file(self.path)
        problems = []
        for i, row in enumerate(read_rows(path)):
            answer = field(row, "answer", path, i)
            answer = f"{answer:g}" if isinstance(answer, float) else str(answer)  # amc23 writes 27.0
            name = row.get("unique_id") or f"{self.name}/{row.get('id', i)}"
            group = f"level {row['level']}" if "level" in row else ""
            problems.append(Problem(name, ask(f"{field(row, 'problem', path, i)}\n\n{INSTRUCTION}"), answer, group))
        return problems

    def score(self, problem: Problem, text: str) -> bool:
        return same_math(text, problem.answer)
