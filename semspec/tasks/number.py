"""Base of the word problems whose answer is one number: the instruction and the scorer."""

from __future__ import annotations

from semspec.tasks.answers import same_number
from semspec.tasks.base import FileTask, Problem, ask
from semspec.text.tokenizer import Prompt

INSTRUCTION = "Think step by step. End with the final number alone behind four hashes, as in: #### 42"


class NumberTask(FileTask):
    max_new_tokens = 1024

    def prompt(self, question: str) -> Prompt:
        return ask(f"{question}\n\n{INSTRUCTION}")

    def score(self, problem: Problem, text: str) -> bool:
        return same_number(text, problem.answer)
