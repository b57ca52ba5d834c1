"""Base of the tasks that have prompts but no right answers."""

from __future__ import annotations

from dataclasses import dataclass, field

from semspec.tasks.base import FileTask, Problem, Row, ask


@dataclass(frozen=True)
class ChatTask(FileTask):
    scored = False
    max_new_tokens = 1024

    turns: int = field(default=0, metadata={"label": "turns of a conversation to ask; 0: all", "min": 0})

    def problem(self, row: Row) -> Problem:
        turns = row["turns"]
        if not isinstance(turns, list) or not turns:
            raise row.error("has no turns; give a list of one or more user messages")
        id_ = f"{self.name}/{row.get('question_id', row.index)}"
        later = tuple(turns[1 : self.turns or None])
        return Problem(id_, ask(turns[0]), None, self.group(row.get("category", "")), later)

    def group(self, category: str) -> str:
        return category
