"""Answers that are lists of blocks (thinking, text, calls), for the APIs that have them."""

from __future__ import annotations

import secrets
from abc import abstractmethod
from dataclasses import dataclass, field
from typing import Any, Literal

from semspec.serve.answers import Answer, Shown, written
from semspec.serve.deltas import Delta, Finished

Events = list[dict[str, Any]]


@dataclass
class Block:
    kind: Literal["content", "reasoning", "call"]
    index: int
    name: str = ""  # of a function
    call_id: str = ""
    text: str = ""  # or arguments
    id: str = field(default_factory=lambda: secrets.token_hex(12))
    closed: bool = False


class BlockAnswer(Answer):
    """One choice. Events have names, and the whole is what they add up to."""

    def __init__(self, *given: Any, **more: Any) -> None:
        super().__init__(*given, **more)
        self.blocks: list[Block] = []
        (self.choice,) = self.choices

    def take(self, message: Delta | Finished) -> None:
        self.chunks(message)

    def chunks(self, message: Delta | Finished) -> Events:
        if isinstance(message, Finished):
            self.finished.append(message)
            return []
        _, shown = self.choice.add(message)
        events: Events = []
        for each in shown:
            events += self._add(each)
        if message.finish is not None:
            events += self._close() if self.blocks else [*self._open(Block("content", 0)), *self._close()]
        return events

    def _add(self, shown: Shown) -> Events:
        events: Events = []
        kind: Literal["content", "reasoning", "call"] = "call" if shown.kind == "arguments" else shown.kind
        if shown.kind == "call" or not self.blocks or self.blocks[-1].kind != kind:
            block = Block(kind, len(self.blocks))
            if kind == "call":
                block.name, block.call_id = shown.text, self.choice.calls[shown.call].id
            events += self._close() + self._open(block)
        if shown.kind != "call":
            self.blocks[-1].text += shown.text
            events += self.grew(self.blocks[-1], shown.text)
        return events

    def _open(self, block: Block) -> Events:
        self.blocks.append(block)
        return self.opened(block)

    def _close(self) -> Events:
        if not self.blocks or self.blocks[-1].closed:
            return []
        self.blocks[-1].closed = True
        return self.ended(self.blocks[-1])

    @abstractmethod
    def opened(self, block: Block) -> Events: ...

    @abstractmethod
    def grew(self, block: Block, text: str) -> Events: ...

    @abstractmethod
    def ended(self, block: Block) -> Events: ...

    def line(self, data: dict[str, Any]) -> str:
        return f"event: {data['type']}\ndata: {written(data)}\n\n"
