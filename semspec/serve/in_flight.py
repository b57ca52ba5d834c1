"""One HTTP request on its way through the engine."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from semspec.pair.result import Ticket
from semspec.serve.deltas import Delta, Finished
from semspec.text.structured import Compiled
from semspec.types import Event

if TYPE_CHECKING:
    from semspec.serve.engine import Engine


@dataclass
class SequenceState:
    """One answer on its way, with times."""

    ticket: Ticket
    choice: int
    first_of_prompt: bool = True  # of several answers to one prompt
    started: float | None = None  # it got its slots
    first_token: float | None = None
    last_token: float | None = None
    gaps: list[float] = field(default_factory=list)  # seconds between rounds that brought tokens
    written: int = 0  # tokens handed over
    done: bool = False

    def count(self, event: Event, start: float, end: float) -> None:
        """A tick between these times has brought this."""
        self.started, self.first_token = self.started or start, self.first_token or end
        if self.last_token is not None and event.tokens:
            self.gaps.append(end - self.last_token)
        self.last_token = end
        self.written += len(event.tokens)

    def close(self, request: InFlightRequest, now: float, outcome: str | None) -> Finished:
        """It has ended; None: as its ticket says."""
        self.done = True
        finished = Finished.of(self.ticket, self.choice, outcome)
        finished.first_of_prompt, finished.gaps, finished.key = self.first_of_prompt, self.gaps, request.key
        finished.queued = (self.started or now) - request.arrived
        finished.first_token = (self.first_token or now) - request.arrived
        finished.seconds = now - request.arrived
        return finished


@dataclass(eq=False)
class InFlightRequest:
    """One HTTP request's answers. Iterate for deltas; leaving the `async with` frees its slots."""

    engine: Engine
    arrived: float
    deadline: float
    count: int
    client: str = ""  # an API key's name, or an address
    key: str | None = None  # its name, if there are keys
    priority: int = 0  # among the client's own requests; lower ones come first
    prompt_forms: frozenset[str] = frozenset()  # in which its answers have the prompt's logprobs
    sequences: list[SequenceState] = field(default_factory=list)  # the engine's side
    messages: asyncio.Queue[Delta | Finished | Exception] = field(default_factory=asyncio.Queue)
    finished: int = 0  # answers that are complete, on the event loop's side
    gave_way: bool = False  # its places have been given to others
    peeked: Delta | Finished | None = None
    grammar: Compiled | None = None  # what its answers have to be
    submitted: asyncio.Future[None] | None = None  # None: still being tokenized,
    preparing: asyncio.Task[Any] | None = None  # by this one

    @property
    def begun(self) -> bool:
        """Whether it has, or has had, a slot."""
        return any(sequence.started is not None or sequence.done for sequence in self.sequences)

    @property
    def cached_tokens(self) -> int:
        """Of its first prompt, that were not read; known once an answer has begun."""
        first = self.sequences[0].ticket
        return min(first.stats.cached_tokens, len(first.job.prompt))

    async def __aenter__(self) -> InFlightRequest:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.engine.release(self)

    async def peek(self) -> None:
        """Wait for the first message; it stays the next one."""
        message = await self.messages.get()
        if isinstance(message, Exception):
            raise message
        self.peeked = message

    def __aiter__(self) -> InFlightRequest:
        return self

    async def __anext__(self) -> Delta | Finished:
        if self.finished == self.count:
            raise StopAsyncIteration
        message = await self.messages.get() if self.peeked is None else self.peeked
        self.peeked = None
        if isinstance(message, Exception):
            raise message
        self.finished += isinstance(message, Finished)
        return message
