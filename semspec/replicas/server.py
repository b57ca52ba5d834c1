"""uvicorn for the one address: told to end, it refuses new requests, and ends when the last stream has."""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from types import FrameType

import uvicorn

from semspec.replicas.ingress import Ingress

log = logging.getLogger("semspec.serve")


class IngressServer(uvicorn.Server):
    def __init__(self, config: uvicorn.Config, ingress: Ingress) -> None:
        super().__init__(config)
        self.ingress = ingress
        self._drained_by: float | None = None

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        await super().serve(sockets)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.servers:
            host, port = self.servers[0].sockets[0].getsockname()[:2]
            fields = {"url": f"http://{host}:{port}", "replicas": self.ingress.replicas.count}
            log.info("listening", extra={"fields": fields})

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """The first signal drains, the second ends what still runs."""
        self._loop.call_soon_threadsafe(self._end if self.ingress.draining else self._drain)

    def handle_hangup(self, sig: int, frame: FrameType | None) -> None:
        """Ending here would leave the replicas behind."""
        if self.started:  # before, the keys have just been read
            self._loop.call_soon_threadsafe(self.ingress.reload)

    def _drain(self) -> None:
        self.ingress.draining = True
        self._drained_by = time.monotonic() + self.ingress.drain
        log.info("draining", extra={"fields": {"requests": self.ingress.busy}})

    def _end(self) -> None:
        self.should_exit = self.force_exit = True

    async def on_tick(self, counter: int) -> bool:
        if self._drained_by is not None and (not self.ingress.busy or time.monotonic() > self._drained_by):
            self.should_exit = True
        return await super().on_tick(counter)
