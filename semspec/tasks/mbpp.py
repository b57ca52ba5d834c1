"""`mbpp`: small programs to write, scored by their tests."""

from __future__ import annotations

import re
from dataclasses import dataclass

from semspec.tasks.base import Problem, Row, ask
from semspec.tasks.code import CodeTask, code_in


@dataclass(frozen=True)
class Mbpp(CodeTask):
    """The test part of MBPP (Austin et al. 2021), tasks 11 to 510, each shown with its tests."""

    name = "mbpp"
    filename = "mbpp/mbpp.jsonl"

    def problem(self, row: Row) -> Problem | None:
        tests = "\n".join(row["test_list"])
        question = (
            f"{row['text']} It must pass these tests:\n\n```python\n{tests}\n```\n\n"
            "Answer with the whole program in one code block."
        )
        if self.style == "harness":
            question = f"{row['text']} Your code must satisfy this assertion:\n{row['test_list'][0]}"
        problem = Problem(f"mbpp/{row['task_id']}", ask(question), f"{row.get('test_setup_code', '')}\n{tests}\n")
        return problem if 11 <= row["task_id"] <= 510 else None

    def score(self, problem: Problem, text: str) -> bool:
        called = re.findall(r"(\w+)\s*\(", problem.answer)
        return self.passes(f"{code_in(text, called)}\n\n{problem.answer}")
