"""uvicorn, taught to drain: told to end, it refuses new requests, says so, and lets the running ones finish."""

from __future__ import annotations

import logging
import signal
import time
from types import FrameType

import uvicorn

from semspec.serve.engine import Engine
from semspec.serve.limits import Limits

log = logging.getLogger("semspec.serve")
LAST_WORDS = 5  # seconds in which connections that have got their answer or error may close


class Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config, engine: Engine, limits: Limits) -> None:
        super().__init__(config)
        self.engine, self.limits = engine, limits
        self._until: float | None = None  # running requests have until then
        self._told = False

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """The first signal drains, the second ends at once."""
        if self._until is not None:
            self.should_exit, self.force_exit = True, sig == signal.SIGINT
        else:
            self.drain()

    def drain(self) -> None:
        self.engine.drain()
        self._until = time.monotonic() + self.limits.drain

    async def on_tick(self, counter: int) -> bool:
        if self.engine.state == "failed":
            self.should_exit = True
        if self._until is not None and not self.should_exit:
            if not self._told:
                self._told = True
                log.info("draining", extra={"fields": {"sequences": self.engine.live}})
            if self.engine.live == 0:
                self.should_exit = True
            elif time.monotonic() > self._until:
                self.engine.fail_all("the server is shutting down and the answer was not complete in time")
                self.should_exit = True
        return await super().on_tick(counter)


def configure(app: object, host: str, port: int) -> uvicorn.Config:
    return uvicorn.Config(
        app,  # type: ignore[arg-type]
        host=host,
        port=port,
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=LAST_WORDS,
        lifespan="on",
        ws="none",
    )
