"""`mbpp`: small programs to write, judged by their tests."""

from __future__ import annotations

import re
from dataclasses import dataclass

from semspec.tasks.base import Problem, ask, field, read_rows
from semspec.tasks.code import CodeTask, code_in


@dataclass(frozen=True)
class Mbpp(CodeTask):
    """The test part of MBPP (Austin et al. 2021), tasks 11 to 510, each shown with its tests."""

    name = "mbpp"
    path = "mbpp/mbpp.jsonl"

    def load(self) -> list[Problem]:
        path = self.file(self.path)
        problems = []
        for i, row in enumerate(read_rows(path)):
            number, tests = field(row, "task_id", path, i), "\n".join(field(row, "test_list", path, i))
            if not 11 <= number <= 510:
                continue
            question = (
                f"{field(row, 'text', path, i)} It must pass these tests:\n\n```python\n{tests}\n```\n\n"
                "Answer with the whole program in one code block."
            )
            setup = row.get("test_setup_code", "")
            problems.append(Problem(f"mbpp/{number}", ask(question), f"{setup}\n{tests}\n"))
        return problems

    def score(self, problem: Problem, text: str) -> bool:
        called = re.findall(r"(\w+)\s*\(", problem.answer)
        return self.passes(f"{code_in(text, called)}\n\n{problem.answer}")
