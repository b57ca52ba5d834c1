"""`gsm8k`: grade-school word problems."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from semspec.errors import BadRequest
from semspec.tasks.answers import marked
from semspec.tasks.base import Problem, ask, field, read_rows
from semspec.tasks.number import INSTRUCTION, NumberTask


@dataclass(frozen=True)
class Gsm8k(NumberTask):
    """The 1,319 test problems of GSM8K (Cobbe et al. 2021); a group is the number of steps of the given solution."""

    name = "gsm8k"
    path: ClassVar[str] = "gsm8k/test.jsonl"

    def load(self) -> list[Problem]:
        path = self.file(self.path)
        problems = []
        for i, row in enumerate(read_rows(path)):
            solution = field(row, "answer", path, i)
            answer = marked(solution)
            if answer is None:
                raise BadRequest(f"row {i + 1} of {path} has no '#### number' in its answer")
            steps = solution.count("\n")  # one line each, and the answer's own
            problems.append(
                Problem(
                    f"gsm8k/{i}", ask(f"{field(row, 'question', path, i)}\n\n{INSTRUCTION}"), answer, f"{steps} steps"
                )
            )
        return problems
