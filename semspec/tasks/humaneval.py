"""`humaneval`: functions to complete, scored by their tests."""

from __future__ import annotations

import re
from dataclasses import dataclass

from semspec.tasks.base import Problem, Row, ask
from semspec.tasks.code import CodeTask, code_in

INSTRUCTION = "Complete this Python function. Answer with the whole function in one code block."

HARNESS = "Write a solution to the problem below, and make sure that it passes the tests:"


@dataclass(frozen=True)
class HumanEval(CodeTask):
    """The 164 functions of HumanEval (Chen et al. 2021), asked for in chat."""

    name = "humaneval"
    filename = "humaneval/HumanEval.jsonl.gz"

    def problem(self, row: Row) -> Problem:
        parts = {key: row[key] for key in ("prompt", "test", "entry_point")}
        question = f"{INSTRUCTION}\n\n```python\n{parts['prompt'].rstrip()}\n```"
        if self.style == "harness":
            question = f"{HARNESS}\n```{parts['prompt']}"
        return Problem(row["task_id"], ask(question), parts)

    def score(self, problem: Problem, text: str) -> bool:
        prompt, function = problem.answer["prompt"], problem.answer["entry_point"]
        code = code_in(text, [function])
        # The prompt is a program by itself (a function with only a docstring) and has imports and helpers that the
        # answer may leave out; a whole function replaces the empty one, a bare body goes on where the prompt ends.
        between = "\n\n" if re.search(r"^def\s", code, re.MULTILINE) else ""
        return self.passes(f"{prompt}{between}{code}\n\n{problem.answer['test']}\n\ncheck({function})\n")
