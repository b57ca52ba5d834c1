"""What the tasks of prompts without right answers share: their file format."""

from __future__ import annotations

from typing import ClassVar

from semspec.errors import BadRequest
from semspec.tasks.base import FileTask, Problem, ask, field, read_rows


class ChatTask(FileTask):
    scored = False
    max_new_tokens = 1024
    path: ClassVar[str]

    def load(self) -> list[Problem]:
        path = self.file(self.path)
        problems = []
        for i, row in enumerate(read_rows(path)):
            turns = field(row, "turns", path, i)
            if not isinstance(turns, list) or not turns:
                raise BadRequest(f"row {i + 1} of {path} has no turns; give a list of one or more user messages")
            name, group = f"{self.name}/{row.get('question_id', i)}", self.group(row.get("category", ""))
            problems.append(Problem(name, ask(turns[0]), None, group, tuple(turns[1:])))
        return problems

    def group(self, category: str) -> str:
        return category
