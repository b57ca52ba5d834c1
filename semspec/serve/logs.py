"""Logs that programs can read: one JSON object a line. What people wrote or were answered is never among it."""

from __future__ import annotations

import json
import logging
import sys
import time
import traceback
import uuid
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from semspec.serve.http_errors import refused
from semspec.serve.metrics import Metrics

log = logging.getLogger("semspec.serve")
QUIET = frozenset({"/health", "/metrics"})  # asked for every few seconds by machines


class Lines(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "event": getattr(record, "public", None) or record.getMessage(),
        }
        line |= getattr(record, "fields", {})
        if record.exc_info and record.exc_info[0] is not None:
            # An exception's words may quote a prompt; its kind and place do not.
            line["error"] = record.exc_info[0].__name__
            line["where"] = [f"{f.filename}:{f.lineno} {f.name}" for f in traceback.extract_tb(record.exc_info[2])]
        return json.dumps(line, ensure_ascii=False)


def configure(level: str = "info") -> None:
    """Everything goes to standard error in one form, uvicorn's own lines included."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(Lines())
    root = logging.getLogger()
    root.handlers, root.level = [handler], logging.WARNING
    log.setLevel(level.upper())


def say(what: str) -> None:
    """A line about the server itself."""
    log.info(what)


class Journal:
    """Gives every request an id and, when it is over, a line. Handlers put what they know into scope['journal']."""

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self.app, self.metrics = app, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        began, status = time.perf_counter(), 0
        name = uuid.uuid4().hex
        scope["journal"] = fields = {"id": name}

        async def noting(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message["headers"], (b"x-request-id", name.encode())]
            await send(message)

        try:
            await self.app(scope, receive, noting)
        except Exception as error:
            log.error("a request crashed", exc_info=True, extra={"fields": fields})
            if not status:
                await refused(error).response(scope, receive, noting)
        finally:
            self.metrics.refused.labels(str(status)).inc()
            if scope["path"] not in QUIET:
                milliseconds = round(1000 * (time.perf_counter() - began), 1)
                what = {"method": scope["method"], "path": scope["path"], "status": status, "ms": milliseconds}
                log.info("request", extra={"fields": fields | what})
