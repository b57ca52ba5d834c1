"""`jsonl`: anyone's own problems, one JSON object per line, or one question per line of a .txt file.

A line has a `prompt` (text), a `question` (put to a chat model), `messages` (a chat) or `turns` (a user's messages, as
in MT-bench: each is put after the answer to the last), and may have an `answer`, an `id` and a `group`. `match=` says
how answers are compared; without it there are prompts only. Rows that say the same count once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from semspec.errors import BadRequest
from semspec.tasks import answers
from semspec.tasks.base import FileTask, Problem, Row, ask, choose, existing
from semspec.text.tokenizer import Prompt

MATCH: dict[str, Callable[[str, str], bool]] = {
    "exact": answers.same_text,
    "number": answers.same_number,
    "contains": answers.contains,
    "math": answers.same_math,
    "choice": answers.same_choice,
}


@dataclass(frozen=True)
class JsonLines(FileTask):
    name = "jsonl"
    max_new_tokens = 1024
    main_option = "path"

    path: str = field(default="", metadata={"label": "the file, from here or from the data folder"})
    match: str = field(
        default="", metadata={"label": "how answers are compared; empty: prompts only", "choices": ("", *MATCH)}
    )

    def __post_init__(self) -> None:
        if not self.path:
            raise BadRequest("task 'jsonl' needs a file; say which with jsonl:FILE")
        super().__post_init__()
        object.__setattr__(self, "scored", bool(self.match))  # the one task where an option decides it

    def find(self) -> Path:
        path = Path(self.path).expanduser()
        if not path.is_file() and self.data is not None and (self.data / path).is_file():
            path = self.data / path
        return existing(path, self.name)

    def load(self) -> list[Problem]:
        """Each problem once, however often a file has it: copies would count as so many proofs of the same thing."""
        found: dict[str, Problem] = {}
        for problem in self._rows():
            asked = problem.answer if self.match else None  # where nothing is scored, an answer makes no other problem
            found.setdefault(repr((problem.prompt, problem.turns, asked)), problem)
        return list(found.values())

    def problems(self, n: int | None, seed: int) -> list[Problem]:
        found = self.load()
        if n is not None and n > len(found) < (rows := len(self._rows())):
            raise BadRequest(
                f"{n} problems were asked for, and of the {rows} rows of {self.find()} {len(found)} are different; "
                "give that number or less"
            )
        return choose(found, n, seed, self.name)

    def _rows(self) -> list[Problem]:
        problems = super().load()
        if len({problem.id for problem in problems}) < len(problems):
            raise BadRequest(f"{self.find()} gives one id to several rows; make each id its own, or leave ids out")
        return problems

    def problem(self, row: Row) -> Problem:
        answer = row["answer"] if self.match else row.get("answer")
        if self.match and (not isinstance(answer, str | int | float) or isinstance(answer, bool)):
            raise row.error(f"has the answer {answer!r}; give a text or a number")
        if self.match == "number" and answers.number(str(answer)) is None:
            raise row.error(f"has the answer {answer!r}, which match=number cannot read")
        prompt, turns = _prompt(row)
        return Problem(str(row.get("id", f"jsonl/{row.index}")), prompt, answer, str(row.get("group", "")), turns)

    def score(self, problem: Problem, text: str) -> float:
        return MATCH[self.match](text, str(problem.answer)) if self.match else super().score(problem, text)


def _prompt(row: Row) -> tuple[Prompt, tuple[str, ...]]:
    """The prompt, and a user's further turns."""
    if isinstance(row.get("prompt"), str):
        return str(row["prompt"]), ()
    if isinstance(row.get("question"), str):
        return ask(row["question"]), ()
    messages, turns = row.get("messages"), row.get("turns")
    if isinstance(messages, list) and messages and all(isinstance(m, dict) for m in messages):
        return messages, ()
    if isinstance(turns, list) and turns and all(isinstance(turn, str) for turn in turns):
        return ask(turns[0]), tuple(turns[1:])
    raise row.error("has no prompt; give it a 'prompt', a 'question', 'messages' or a user's 'turns'")
