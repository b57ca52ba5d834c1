"""What the tasks whose answer is one number share: what is asked for, and the scorer."""

from __future__ import annotations

from semspec.tasks.answers import same_number
from semspec.tasks.base import FileTask, Problem

INSTRUCTION = "Think step by step. End with the final number alone behind four hashes, as in: #### 42"


class NumberTask(FileTask):
    max_new_tokens = 1024

    def score(self, problem: Problem, text: str) -> bool:
        return same_number(text, problem.answer)
