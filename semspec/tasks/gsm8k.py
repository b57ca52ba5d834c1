"""`gsm8k`: grade-school word problems."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from functools import cached_property

from semspec.tasks.answers import marked
from semspec.tasks.base import STYLES, Problem, Row, ask, read_rows
from semspec.tasks.number import INSTRUCTION, NumberTask

HARNESS = (
    "Reason about the problem below and give a final answer to it.\nProblem: {}\nEnd your response with "
    '"The final answer is [answer]", where [answer] is your answer to the problem.'
)


@dataclass(frozen=True)
class Gsm8k(NumberTask):
    """The 1,319 test problems of GSM8K (Cobbe et al. 2021); a group is the number of steps of the given solution."""

    name = "gsm8k"
    filename = "gsm8k/test.jsonl"

    shots: int = field(default=0, metadata={"label": "solved examples, the first of gsm8k/train.jsonl", "min": 0})
    style: str = field(default="own", metadata={"label": "prompts: own, or harness", "choices": STYLES})

    @cached_property
    def examples(self) -> list[tuple[str, str]]:
        """Questions with their solutions, in the style of the task."""
        rows = read_rows(self.file("gsm8k/train.jsonl"))[: self.shots] if self.shots else []
        found = []
        for row in rows:
            solution = re.sub(r"<<[^<>]*>>", "", row["answer"])  # notes of a calculator
            if self.style == "harness":
                solution = re.sub(r"\n####\s*(.*)", r" The final answer is \1", solution)
            found.append((self._asked(row["question"]), solution))
        return found

    def _asked(self, question: str) -> str:
        return HARNESS.format(question) if self.style == "harness" else f"{question}\n\n{INSTRUCTION}"

    def problem(self, row: Row) -> Problem:
        solution = row["answer"]
        answer = marked(solution)
        if answer is None:
            raise row.error("has no '#### number' in its answer")
        steps = solution.count("\n")  # one line each, then the answer's line
        prompt = ask(self._asked(row["question"]), self.examples)
        return Problem(f"gsm8k/{row.index}", prompt, answer, f"{steps} steps")
