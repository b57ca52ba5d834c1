"""`gsm8k`: grade-school word problems."""

from __future__ import annotations

from dataclasses import dataclass

from semspec.tasks.answers import marked
from semspec.tasks.base import Problem, Row
from semspec.tasks.number import NumberTask


@dataclass(frozen=True)
class Gsm8k(NumberTask):
    """The 1,319 test problems of GSM8K (Cobbe et al. 2021); a group is the number of steps of the given solution."""

    name = "gsm8k"
    filename = "gsm8k/test.jsonl"

    def problem(self, row: Row) -> Problem:
        solution = row["answer"]
        answer = marked(solution)
        if answer is None:
            raise row.error("has no '#### number' in its answer")
        steps = solution.count("\n")  # one line each, then the answer's line
        return Problem(f"gsm8k/{row.index}", self.prompt(row["question"]), answer, f"{steps} steps")
