"""`gpqa`: questions that need a specialist, with four choices."""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random

from semspec.tasks.answers import same_choice
from semspec.tasks.base import FileTask, Problem, Row, ask

RIGHT = "Correct Answer"
WRONG = tuple(f"Incorrect Answer {i}" for i in (1, 2, 3))
LETTERS = "ABCD"
INSTRUCTION = "Please reason step by step, and put the letter of your final answer within \\boxed{}."


@dataclass(frozen=True)
class Gpqa(FileTask):
    """The 198 questions of GPQA-Diamond (Rein et al. 2023), with the budget of SemanticSpec; a group is the field."""

    name = "gpqa"
    filename = "gpqa/gpqa_diamond.csv"
    max_new_tokens = 14000

    order: int = field(default=0, metadata={"label": "seed of the order of each question's choices"})

    def problem(self, row: Row) -> Problem:
        rng = Random(f"{self.order}/{row.index}")
        choices = sorted((RIGHT, *WRONG), key=lambda _: rng.random())
        listed = "\n".join(f"({letter}) {row[name].strip()}" for letter, name in zip(LETTERS, choices, strict=True))
        question = f"{row['Question'].strip()}\n\n{listed}\n\n{INSTRUCTION}"
        id_ = f"gpqa/{row.get('Record ID') or row.index}"
        return Problem(id_, ask(question), LETTERS[choices.index(RIGHT)], row.get("High-level domain", ""))

    def score(self, problem: Problem, text: str) -> bool:
        return same_choice(text, problem.answer)
