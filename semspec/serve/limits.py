"""What a server allows, and its defaults where a request says nothing."""

from __future__ import annotations

import asyncio
import math
from dataclasses import dataclass, field
from pathlib import Path

from starlette.exceptions import HTTPException  # FastAPI passes on no other from a body
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from semspec.errors import BadRequest
from semspec.options import Options

LONGEST_STEP = 512  # tokens of a reasoning step: what step rules draft by default, or as published


@dataclass(frozen=True, slots=True)
class Limits:
    """Nothing a client sends makes the server use more than this."""

    prompt_tokens: int | None = None  # None: the context's length
    new_tokens: int = 4096
    draft_tokens: int = 64
    choices: int = 16  # answers to one request
    prompt_logprobs: int = 1 << 18  # entries of one request: to write a million takes seconds
    body_bytes: int = 1 << 20
    queue: int = 256  # sequences that wait for a slot
    connections: int = 1000  # open at a time
    client_connections: int = 256  # of them from one address
    client_requests: int | None = None  # of one client, running or waiting
    client_rate: int | None = None  # requests of one client in a minute
    speculating: int | None = None  # sequences, running or waiting, from which on lossless rules do not draft
    deadline: float = 600.0  # seconds a request may take, waiting included
    drain: float = 30.0  # seconds that running requests get when the server is told to end
    header_seconds: float = 15.0  # from a connection's first byte, or its opening, to a whole header
    body_seconds: float = 30.0  # from the header to the whole body
    idle_seconds: float = 15.0  # between two requests on one connection
    delivery_seconds: float = 60.0  # in which a client has to read what was sent to it

    def __post_init__(self) -> None:
        minima = dict.fromkeys(("prompt_tokens", "new_tokens", "draft_tokens", "choices", "prompt_logprobs"), 1)
        minima |= {"body_bytes": 1024, "queue": 0, "connections": 1, "client_connections": 1, "client_requests": 1,
                   "client_rate": 1, "speculating": 0}  # fmt: skip
        for name, low in minima.items():
            value = getattr(self, name)
            if value is not None and value < low:
                raise BadRequest(f"the limit {name} is {value}; give {low} or more")
        for name in ("deadline", "drain", "header_seconds", "body_seconds", "idle_seconds", "delivery_seconds"):
            value = getattr(self, name)
            if not math.isfinite(value) or value < 0 or (value == 0 and name != "drain"):
                raise BadRequest(f"the limit {name} is {value}; give a number of seconds above 0")


@dataclass(frozen=True, slots=True)
class Settings:
    """How this server behaves, besides the models it has."""

    name: str = "semspec"  # the model's name to clients
    draft: str | None = None  # the draft model's name
    defaults: Options = field(default_factory=Options)  # where a request says nothing
    allow_lossy: bool = False
    limits: Limits = field(default_factory=Limits)
    hosts: tuple[str, ...] = ()  # names and addresses of this server besides those of this machine itself
    keys: tuple[str, ...] = ()
    key_file: Path | None = None  # more of them, read again when it changes
    ingress_secret: str = ""  # of the process in front, if there is one: it tells clients' addresses
    cors: tuple[str, ...] = ()  # origins whose pages may use the server
    log_prompts: bool = False
    private_prompts: bool = False  # what is cached of a prompt is for the same client only
    tool_parser: str = "auto"  # how calls are found in answers: by the model's family, or a name
    ignore_unknown: bool = False  # fields that nothing here knows are logged, not refused


class BodyLimit:
    """Bodies that are too long, or too slow to arrive, are refused before they are in memory."""

    def __init__(self, app: ASGIApp, max_bytes: int, seconds: float) -> None:
        self.app, self.max_bytes, self.seconds = app, max_bytes, seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        announced = dict(scope["headers"]).get(b"content-length", b"")
        too_long = HTTPException(413, f"the body is longer than {self.max_bytes} bytes; send less at a time")
        received, complete = 0, False
        end = asyncio.get_running_loop().time() + self.seconds

        async def limited() -> Message:
            nonlocal received, complete
            if complete:  # now only a disconnect can follow, at any time
                return await receive()
            if announced.isdigit() and int(announced) > self.max_bytes:
                raise too_long
            try:
                async with asyncio.timeout_at(end):
                    message = await receive()
            except TimeoutError:
                raise HTTPException(408, f"the body did not arrive within {self.seconds:g} seconds") from None
            received += len(message.get("body", b""))
            if received > self.max_bytes:
                raise too_long
            complete = not message.get("more_body", False)
            return message

        await self.app(scope, limited, send)
