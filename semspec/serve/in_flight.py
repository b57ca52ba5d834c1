"""One HTTP request on its way through the engine."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from semspec.pair.result import Ticket
from semspec.serve.deltas import Delta, Finished

if TYPE_CHECKING:
    from semspec.serve.engine import Engine


@dataclass
class SequenceState:
    """One answer on its way, and when what happened to it."""

    ticket: Ticket
    choice: int
    began: float | None = None  # it got its slots
    first: float | None = None  # its first token was there
    written: int = 0  # tokens handed over
    done: bool = False


@dataclass(eq=False)
class InFlightRequest:
    """One HTTP request's answers on their way. Iterate for pieces; leaving the `async with` frees its slots."""

    engine: Engine
    arrived: float
    deadline: float
    count: int
    sequences: list[SequenceState] = field(default_factory=list)  # the engine's side
    messages: asyncio.Queue[Delta | Finished | Exception] = field(default_factory=asyncio.Queue)
    ended: int = 0  # answers that are complete, on the event loop's side
    taken_in: asyncio.Future[None] = field(default_factory=lambda: asyncio.get_running_loop().create_future())

    async def __aenter__(self) -> InFlightRequest:
        return self

    async def __aexit__(self, *_: object) -> None:
        if self.ended < self.count:
            self.engine.abort(self)

    def __aiter__(self) -> InFlightRequest:
        return self

    async def __anext__(self) -> Delta | Finished:
        if self.ended == self.count:
            raise StopAsyncIteration
        message = await self.messages.get()
        if isinstance(message, Exception):
            raise message
        self.ended += isinstance(message, Finished)
        return message
