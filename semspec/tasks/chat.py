"""Base of the tasks that have prompts but no right answers."""

from __future__ import annotations

from semspec.tasks.base import FileTask, Problem, Row, ask


class ChatTask(FileTask):
    scored = False
    max_new_tokens = 1024

    def problem(self, row: Row) -> Problem:
        turns = row["turns"]
        if not isinstance(turns, list) or not turns:
            raise row.error("has no turns; give a list of one or more user messages")
        id_ = f"{self.name}/{row.get('question_id', row.index)}"
        return Problem(id_, ask(turns[0]), None, self.group(row.get("category", "")), tuple(turns[1:]))

    def group(self, category: str) -> str:
        return category
