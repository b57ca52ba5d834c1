"""Answers in channels (GPT-OSS): analysis is thinking, final is the answer, and a recipient makes a message a call."""

from __future__ import annotations

import re
from typing import Literal

from semspec.serve.tools.parser import Parser

MESSAGE = "<|message|>"
BEGINS = ("<|start|>", "<|channel|>")
ENDS = ("<|end|>", "<|call|>", "<|return|>", *BEGINS)
SPECIALS = frozenset({MESSAGE, "<|constrain|>", *ENDS})
AFTER_NAME = " <|constrain|>json<|message|>"
CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
RECIPIENT = re.compile(r"to=functions\.([\w.-]+)")


class Harmony(Parser):
    def __init__(self) -> None:
        super().__init__()
        self.state: Literal["start", "header", "body"] = "start"
        self.kind: Literal["content", "reasoning", "arguments"] = "content"

    def step(self, final: bool) -> bool:
        return bool(getattr(self, f"_{self.state}")(final))

    def _start(self, final: bool) -> bool:
        """The prompt ends inside a header; a model that writes none answers at once."""
        if not final and any(mark.startswith(self.rest) for mark in (*BEGINS, MESSAGE, " to=")):
            return False
        self.state = "header" if self.rest.startswith((*BEGINS, MESSAGE, " to=")) else "body"
        return True

    def _header(self, final: bool) -> bool:
        at = self.rest.find(MESSAGE)
        if at < 0:
            return False
        header = self.skip(at + len(MESSAGE))
        recipient, channel = RECIPIENT.search(header), CHANNEL.findall(header)
        if recipient:
            self.call(recipient[1])
            self.kind = "arguments"
        else:
            self.kind = "reasoning" if channel and channel[-1] == "analysis" else "content"
        self.state = "body"
        return True

    def _body(self, final: bool) -> bool:
        found = self.find(ENDS)
        if found is not None:
            at, marker = found
            self.give(self.kind, self.skip(at))
            if marker not in BEGINS:
                self.skip(len(marker))
            self.state = "header"
            return True
        self.give(self.kind, self.skip(len(self.rest) - (0 if final else self.possible(ENDS))))
        return False


def forced(name: str | None) -> str:
    """How an answer begins that has to be a call."""
    before = "<|channel|>commentary to=functions."
    return before + ("" if name is None else name + AFTER_NAME)
