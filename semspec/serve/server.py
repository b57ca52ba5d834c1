"""uvicorn with draining: told to end, it refuses new requests and lets the running ones finish."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
import socket
import time
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from ssl import SSLContext
from types import FrameType
from typing import Any

import uvicorn

from semspec.serve.connection import Connection, connections
from semspec.serve.engine import Engine
from semspec.serve.handshake import Handshake
from semspec.serve.limits import Limits

log = logging.getLogger("semspec.serve")
CLOSE_SECONDS = 5  # in which clients have to read their last answer or error
CLOSE_NOW_SECONDS = 1  # the same after a second signal
SHUTTING_DOWN = "the server is shutting down and the answer was not complete in time"


class Server(uvicorn.Server):
    def __init__(
        self, config: uvicorn.Config, engine: Engine, limits: Limits, about: str = "", parent: int | None = None
    ) -> None:
        """`parent`: the process without which nobody would reach this one."""
        super().__init__(config)
        self.engine, self.limits, self.about, self.parent = engine, limits, about, parent
        self._drained_by: float | None = None  # running requests have until then

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        await super().serve(sockets)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        if self.config.is_ssl:  # of which uvicorn leaves everything to asyncio
            self._loop.create_server = partial(self._listen, self._loop.create_server)  # type: ignore[method-assign]
        await super().startup(sockets)
        if not self.servers:  # it could not start, and has said why
            return
        host, port = self.servers[0].sockets[0].getsockname()[:2]
        self.engine.url = f"http{'s' if self.config.is_ssl else ''}://{f'[{host}]' if ':' in host else host}:{port}"
        log.info("listening", extra={"fields": {"url": self.engine.url, "serves": self.about}})

    async def _listen(
        self, listen: Callable[..., Awaitable[asyncio.Server]], make: Callable[[], Connection], *, ssl: SSLContext,
        **where: Any,
    ) -> asyncio.Server:  # fmt: skip
        return await listen(lambda: Handshake(make, ssl, self.limits.header_seconds), **where)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """A socket that was handed over is open in the process in front, too: closed here alone, it would go on taking
        connections that nobody answers."""
        for listener in sockets or ():
            with contextlib.suppress(OSError):  # not everywhere can one that listens be shut down
                listener.shutdown(socket.SHUT_RDWR)
        await super().shutdown(sockets)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """The first signal drains, the second ends what still runs with an error."""
        self._loop.call_soon_threadsafe(self.drain if self._drained_by is None else self.end)

    def drain(self) -> None:
        self.engine.drain()
        self._drained_by = time.monotonic() + self.limits.drain
        log.info("draining", extra={"fields": {"sequences": self.engine.live}})

    def end(self) -> None:
        self.engine.fail_all(SHUTTING_DOWN)
        self.should_exit = True
        self._loop.call_later(CLOSE_NOW_SECONDS, self._close_all)

    def _close_all(self) -> None:
        for connection in list(self.server_state.connections):
            connection.transport.abort()

    async def on_tick(self, counter: int) -> bool:
        if self.engine.state == "failed" or (self.parent is not None and os.getppid() != self.parent):
            self.should_exit = True
        if self._drained_by is not None and not self.should_exit:
            if self.engine.idle:
                self.should_exit = True
            elif time.monotonic() > self._drained_by:
                self.engine.fail_all(SHUTTING_DOWN)
                self.should_exit = True
        return await super().on_tick(counter)


def configure(
    app: object, host: str, port: int, limits: Limits, tls_cert: Path | None = None, tls_key: Path | None = None
) -> uvicorn.Config:
    return uvicorn.Config(
        app,  # type: ignore[arg-type]
        host=host,
        port=port,
        http=connections(limits),
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=math.ceil(limits.idle_seconds),
        timeout_graceful_shutdown=CLOSE_SECONDS,
        lifespan="on",
        ws="none",
        loop="asyncio",  # which `startup` relies on
        ssl_certfile=tls_cert,
        ssl_keyfile=tls_key,
    )
