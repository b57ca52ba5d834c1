"""Logs that programs can read: one JSON object a line, never with what people wrote or were answered."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import sys
import time
import traceback
import uuid
from typing import Any, TextIO

import transformers.utils.logging as transformers_logging
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from semspec.serve.http_errors import HttpError, as_http_error
from semspec.serve.metrics import Metrics

log = logging.getLogger("semspec.serve")
QUIET = frozenset({"/health", "/live", "/ready", "/metrics"})  # asked for every few seconds by machines

MAX_METHOD, MAX_PATH = 16, 500  # characters of a request that a line repeats
REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")  # a client's own is taken if it is of this form


class JsonFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "event": getattr(record, "public", None) or record.getMessage(),
        }
        line |= getattr(record, "fields", {})
        if record.exc_info and record.exc_info[0] is not None:
            # An exception's message may quote a prompt; its type and traceback do not.
            line["error"] = record.exc_info[0].__name__
            line["where"] = [f"{f.filename}:{f.lineno} {f.name}" for f in traceback.extract_tb(record.exc_info[2])]
        return json.dumps(line)  # in ASCII: a path may hold what a terminal obeys, or another line's end


class PlainFormatter(JsonFormatter):
    """The same for a person at a terminal: the time, the event, and what else there is to say."""

    def format(self, record: logging.LogRecord) -> str:
        line = json.loads(super().format(record))
        when, level, event = line.pop("time")[11:19], line.pop("level"), line.pop("event")
        more = [f"{name}={value if isinstance(value, str) else json.dumps(value)}" for name, value in line.items()]
        return ascii(" ".join([when, *([] if level == "info" else [level]), event, *more]))[1:-1]


class Stderr(logging.StreamHandler[TextIO]):
    """Standard error as it is when a line is written: a program around us may have put another in its place."""

    @property
    def stream(self) -> TextIO:
        return sys.stderr

    @stream.setter
    def stream(self, _: object) -> None:
        """What the base class remembers is not asked for."""


def configure(level: str = "info") -> None:
    """Everything goes to standard error in one form, uvicorn's own lines included."""
    handler = Stderr()
    handler.setFormatter(PlainFormatter() if sys.stderr.isatty() else JsonFormatter())
    root = logging.getLogger()
    root.handlers, root.level = [handler], logging.WARNING
    log.setLevel(level.upper())
    logging.captureWarnings(True)
    transformers_logging.disable_default_handler()  # or its lines would be no JSON
    transformers_logging.enable_propagation()


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
        start, status = time.perf_counter(), 0
        given = dict(scope["headers"]).get(b"x-request-id", b"").decode("latin-1")
        name = given if REQUEST_ID.fullmatch(given) else uuid.uuid4().hex
        scope["journal"] = fields = {"id": name}

        async def noting(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message["headers"], (b"x-request-id", name.encode())]
            await send(message)

        try:
            await self.app(scope, receive, noting)
        except asyncio.CancelledError:
            if not status:
                await HttpError(503, "the server is shutting down", "shutting_down").response_at(scope["path"])(
                    scope, receive, noting
                )
            raise
        except Exception as error:
            log.error("a request crashed", exc_info=True, extra={"fields": fields})
            if not status:
                await as_http_error(error).response_at(scope["path"])(scope, receive, noting)
        finally:
            line = {"method": scope["method"][:MAX_METHOD], "path": scope["path"][:MAX_PATH], "status": status} | fields
            self.metrics.http_responses.labels(str(line["status"])).inc()
            if scope["path"] not in QUIET:
                line["ms"] = round(1000 * (time.perf_counter() - start), 1)
                log.info("request", extra={"fields": line})
