"""What a server allows and what it does where a request says nothing."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from semspec.errors import BadRequest
from semspec.options import Options


@dataclass(frozen=True, slots=True)
class Limits:
    """Nothing a client sends makes the server use more than this."""

    prompt_tokens: int | None = None  # None: as many as the context has room for
    new_tokens: int = 4096
    draft_tokens: int = 64
    choices: int = 16  # answers asked for with one request
    body_bytes: int = 1 << 20
    body_seconds: float = 30.0  # in which each part of a body has to arrive
    queue: int = 256  # sequences waiting for a slot; further ones are sent away
    deadline: float = 600.0  # seconds a request may take, waiting included
    drain: float = 30.0  # seconds that running requests get when the server is told to end

    def __post_init__(self) -> None:
        least = {"prompt_tokens": 1, "new_tokens": 1, "draft_tokens": 1, "choices": 1, "body_bytes": 1024, "queue": 0}
        for name, low in least.items():
            value = getattr(self, name)
            if value is not None and value < low:
                raise BadRequest(f"the limit {name} is {value}; give {low} or more")
        if self.deadline <= 0 or self.body_seconds <= 0 or self.drain < 0:
            raise BadRequest("deadlines have to be above 0 seconds, and the time to drain not below 0")


@dataclass(frozen=True, slots=True)
class Settings:
    """How this server behaves, besides the models it has."""

    name: str = "semspec"  # the model's name to clients
    defaults: Options = field(default_factory=Options)  # where a request says nothing
    allow_lossy: bool = False
    limits: Limits = field(default_factory=Limits)
    keys: tuple[str, ...] = ()
    cors: tuple[str, ...] = ()  # origins whose pages may use the server
    log_prompts: bool = False


class BodyLimit:
    """Bodies that are too long, or too slow in coming, are refused before they are in memory."""

    def __init__(self, app: ASGIApp, most: int, seconds: float) -> None:
        self.app, self.most, self.seconds = app, most, seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        announced = dict(scope["headers"]).get(b"content-length", b"")
        too_long = HTTPException(413, f"the body is longer than {self.most} bytes; send less at a time")
        come, whole = 0, False

        async def limited() -> Message:
            nonlocal come, whole
            if whole:  # nothing but the client's leaving can come now, and that may take its time
                return await receive()
            if announced.isdigit() and int(announced) > self.most:
                raise too_long
            try:
                message = await asyncio.wait_for(receive(), self.seconds)
            except TimeoutError:
                raise HTTPException(408, f"the body did not arrive within {self.seconds:g} seconds") from None
            come += len(message.get("body", b""))
            if come > self.most:
                raise too_long
            whole = not message.get("more_body", False)
            return message

        await self.app(scope, limited, send)
