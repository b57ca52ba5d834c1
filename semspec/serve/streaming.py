"""Sending answers, whole or as a stream, for as long as the client stays."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Coroutine
from typing import Any, TypeVar

from fastapi import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from semspec.errors import SemspecError
from semspec.serve.answers import Answer
from semspec.serve.deltas import Finished
from semspec.serve.http_errors import HttpError, as_http_error
from semspec.serve.in_flight import InFlightRequest

log = logging.getLogger("semspec.serve")
T = TypeVar("T")


async def collect(answer: Answer, request: InFlightRequest, http: Request) -> dict[str, Any]:
    async with request:
        try:
            async for message in request:
                answer.take(message)
        except Exception as error:
            raise told(error) from error
    note(http.scope, answer.finished)
    return answer.whole()


def told(error: Exception) -> HttpError:
    """The error as a client gets it; one that nobody has foreseen is for the log."""
    if not isinstance(error, HttpError | SemspecError):
        log.error("an answer failed: %s", type(error).__name__, exc_info=error)
    return as_http_error(error)


async def begun(request: InFlightRequest) -> None:
    """Wait for the first of an answer, or for what prevents it."""
    try:
        await request.peek()
    except BaseException as error:
        request.engine.release(request)
        if isinstance(error, Exception):
            raise told(error) from error
        raise


async def lines(answer: Answer, request: InFlightRequest) -> AsyncIterator[str]:
    """An answer as a stream. One that fails ends with an error and without the last line."""
    for chunk in answer.opening():
        yield answer.line(chunk)
    try:
        async for message in request:
            for chunk in answer.chunks(message):
                yield answer.line(chunk)
    except Exception as error:
        for chunk in answer.failure(told(error)):
            yield answer.line(chunk)
        return
    for chunk in answer.closing():
        yield answer.line(chunk)
    yield answer.last_line


def note(scope: Scope, finished: list[Finished]) -> None:
    """What the log may know of an answer."""
    if finished:
        scope["journal"] |= {
            "completion_tokens": sum(end.stats.tokens for end in finished),
            "verifier": finished[0].verifier,
            "relaxed": sum(end.stats.relaxed for end in finished),
            "outcome": finished[0].outcome,
            "queue_ms": round(1000 * max(end.queued for end in finished), 1),
            "first_token_ms": round(1000 * min(end.first_token for end in finished), 1),
        }


class AnswerStream(Response):
    """Sends an answer while the client listens; however it ends, the request's slots are given back."""

    def __init__(self, http: Request, answer: Answer, request: InFlightRequest, delivery_seconds: float) -> None:
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        super().__init__(headers=headers, media_type=answer.media_type)
        del self.headers["content-length"]
        self.http, self.answer, self.request = http, answer, request
        self.delivery_seconds = delivery_seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        left = self.request.deadline - self.request.engine.clock() + self.delivery_seconds
        async with self.request:
            try:
                async with asyncio.timeout(left):  # a client that reads slowly is not waited for any longer
                    await unless_gone(self.http, self._send(send))
                    if scope.get("gone"):  # while the rest of the answer was written to nobody
                        raise Gone
            except (OSError, Gone):  # a TimeoutError is an OSError
                scope["journal"]["status"] = Gone.STATUS
        if self.request.finished < self.request.count:
            scope["journal"].setdefault("outcome", "cut short")
        note(scope, self.answer.finished)

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        async for line in lines(self.answer, self.request):
            await send({"type": "http.response.body", "body": line.encode(), "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


class Gone(HttpError):
    """The client has left; nobody will read this."""

    STATUS = 499  # nginx's

    def __init__(self) -> None:
        super().__init__(self.STATUS, "the client has closed the connection", "gone")


async def unless_gone(http: Request, work: Coroutine[Any, Any, T]) -> T:
    """Do it, unless the client leaves before it is done: then it is cancelled."""
    doing, leaving = asyncio.ensure_future(work), asyncio.ensure_future(_left(http))
    try:
        await asyncio.wait((doing, leaving), return_when=asyncio.FIRST_COMPLETED)
        if doing.done():
            return doing.result()
        raise Gone
    finally:
        for task in (doing, leaving):
            task.cancel()
        await asyncio.gather(doing, leaving, return_exceptions=True)


async def _left(http: Request) -> None:
    while (await http.receive())["type"] != "http.disconnect":
        pass
