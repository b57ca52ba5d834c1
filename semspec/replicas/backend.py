"""What the one address asks of replicas, wherever they run: processes of this machine, or a cluster of Ray's."""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, Protocol


class Lost(Exception):
    """The replica has ended; nothing more of its answer comes."""


class NoneReady(Exception):
    """There is no replica that this request could be sent to."""


@dataclass(frozen=True, slots=True)
class Sent:
    """A request on its way to a replica."""

    method: str
    target: bytes  # path and query, as the client sent them
    headers: list[tuple[bytes, bytes]]
    body: bytes
    client: str  # its address
    name: str = field(default_factory=lambda: secrets.token_hex(8))  # the same when it is sent again


@dataclass(slots=True)
class Answer:
    """A replica's answer. `parts` raises Lost where it is cut; `close` has to be called, however it ends."""

    status: int
    headers: dict[str, str]
    parts: AsyncIterator[bytes]
    close: Callable[[], Awaitable[None]]


class Replicas(Protocol):
    count: int

    @property
    def ready(self) -> int:
        """How many of them are."""
        ...

    def describe(self) -> list[dict[str, Any]]: ...

    def start(self) -> None:
        """Inside the event loop that all calls are made from."""
        ...

    async def ask(self, sent: Sent, tried: set[Any]) -> Answer:
        """Of a replica that is not among those tried, which it then is. Raises Lost or NoneReady."""
        ...

    def reload(self) -> None:
        """Have all read their keys again."""
        ...

    async def stop(self, seconds: float) -> None:
        """End all; they have so long for what they answer."""
        ...
