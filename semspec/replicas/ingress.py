"""The one address: requests go on to a replica, answers come back as they are.

Nothing that was accepted ends silently. A replica that is lost before it has answered anything is made up for by
another, once: a request that has ended two may be the cause. One that is lost in the middle of a stream leaves an error
event at its end, and no [DONE].
"""

from __future__ import annotations

import json
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import httpx
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from semspec.replicas.backend import Answer, Lost, NoneReady, Replicas, Sent
from semspec.serve.auth import Keys, KeyStore
from semspec.serve.forwarded import HEADER
from semspec.serve.hosts import HostCheck
from semspec.serve.http_errors import HttpError
from semspec.serve.limits import BodyLimit, Settings
from semspec.serve.streaming import Gone, unless_gone

log = logging.getLogger("semspec.serve")
HOP = frozenset({"connection", "keep-alive", "transfer-encoding", "te", "trailer", "upgrade", "host", "content-length"})
DROPPED = HOP | {"origin", HEADER}  # pages are checked here; a replica knows neither this host name nor its port
METHODS = ["GET", "POST", "HEAD", "OPTIONS", "DELETE", "PUT"]
STREAMS = ("text/event-stream", "application/x-ndjson")
LOST = "the replica that was answering has ended; ask again"
LOST_TWICE = "two replicas have ended while they worked on this request; it is not tried again"
NONE_READY = "no replica is ready; try again in a moment"
ATTEMPTS = 2


class Ingress:
    def __init__(self, replicas: Replicas, settings: Settings) -> None:
        self.replicas, self.drain = replicas, settings.limits.drain
        self.draining = False
        self.busy = 0  # requests that are being answered
        routes = [
            Route("/health", self.health, methods=["GET"]),
            Route("/ready", self.health, methods=["GET"]),
            Route("/live", self.live, methods=["GET"]),
            Route("/replicas", self.status, methods=["GET"]),
            Route("/{path:path}", self.forward, methods=METHODS),
        ]
        self.app = Starlette(routes=routes, lifespan=self._lifespan, exception_handlers={HTTPException: _refused})
        # The last added is the first to see a request, as in a replica.
        self.app.add_middleware(BodyLimit, max_bytes=settings.limits.body_bytes, seconds=settings.limits.body_seconds)
        self.keys: KeyStore | None = None
        if settings.keys or settings.key_file is not None:
            self.keys = KeyStore(settings.keys, settings.key_file)
            self.app.add_middleware(Keys, store=self.keys)
        if settings.cors:
            self.app.add_middleware(
                CORSMiddleware, allow_origins=settings.cors, allow_methods=["*"], allow_headers=["*"]
            )
        self.app.add_middleware(HostCheck, hosts=settings.hosts, origins=settings.cors)

    def reload(self) -> None:
        """Read the keys again, here and in the replicas; one that still loads reads them anyway."""
        if self.keys is None:
            log.warning("SIGHUP does nothing: there are no keys to read again")
            return
        self.keys.reload()
        self.replicas.reload()

    @asynccontextmanager
    async def _lifespan(self, app: Starlette) -> AsyncIterator[None]:
        self.replicas.start()
        yield
        await self.replicas.stop(self.drain)

    async def health(self, request: Request) -> Response:
        """200 while one replica is ready; how many are."""
        ready = self.replicas.ready
        state = "draining" if self.draining else "ready" if ready else "loading"
        return JSONResponse(
            {"status": state, "ready": ready, "replicas": self.replicas.count}, 200 if state == "ready" else 503
        )

    async def live(self, request: Request) -> Response:
        """200 as long as anybody answers at all: also while models are being loaded, and replicas replaced."""
        return JSONResponse({"status": "alive"})

    async def status(self, request: Request) -> Response:
        return JSONResponse(self.replicas.describe())

    async def forward(self, request: Request) -> Response:
        path = request.url.path
        if self.draining:
            return HttpError(503, "the server is shutting down", "draining", 2).response_at(path)
        query = request.scope["query_string"]
        target = request.scope["raw_path"] + (b"?" + query if query else b"")
        tried: set[Any] = set()
        try:
            httpx.URL("http://replica").copy_with(raw_path=target)
            headers = [(k, v) for k, v in request.headers.raw if k.decode("latin-1") not in DROPPED]
            client = request.client.host if request.client else ""
            sent = Sent(request.method, target, headers, await request.body(), client)
            with suppress(NoneReady):
                while len(tried) < ATTEMPTS:
                    try:
                        return await unless_gone(request, self._answered(sent, tried, request))
                    except Lost:
                        log.warning("a replica was lost before it answered")
        except (ClientDisconnect, Gone):
            return Response(status_code=Gone.STATUS)
        except httpx.InvalidURL:
            return HttpError(400, "the path is too long, or none that can be passed on", "bad_path").response_at(path)
        if len(tried) == ATTEMPTS:
            response = HttpError(502, LOST_TWICE, "replica_lost").response_at(path)
            response.headers["x-should-retry"] = "false"  # OpenAI's clients would end two more with it
            return response
        return HttpError(503, LOST if tried else NONE_READY, "no_replica", 2).response_at(path)

    async def _answered(self, sent: Sent, tried: set[Any], request: Request) -> Response:
        """A replica's answer, whole or as a stream; of one that is lost before there is any, nothing was sent."""
        self.busy += 1
        answer, streaming = None, False
        try:
            answer = await self.replicas.ask(sent, tried)
            kept = {k: v for k, v in answer.headers.items() if k.lower() not in HOP}
            if "location" in kept:  # a replica knows its own address only, which is none for clients
                kept["location"] = httpx.URL(kept["location"]).raw_path.decode("ascii")
            if answer.headers.get("content-type", "").startswith(STREAMS):
                streaming = True
                return Passed(self, request, answer, kept)
            return Response(b"".join([part async for part in answer.parts]), answer.status, kept)
        finally:
            if not streaming:
                self.busy -= 1
                if answer is not None:
                    await answer.close()


class Passed(Response):
    """A replica's stream, for as long as the client stays; however it ends, the replica hears of it."""

    def __init__(self, ingress: Ingress, http: Request, answer: Answer, headers: dict[str, str]) -> None:
        super().__init__(status_code=answer.status, headers=headers)
        del self.headers["content-length"]
        self.ingress, self.http, self.answer = ingress, http, answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await unless_gone(self.http, self._send(send))
        except (OSError, Gone):
            pass
        finally:
            self.ingress.busy -= 1
            await self.answer.close()

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async for part in self._parts():
            await send({"type": "http.response.body", "body": part, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _parts(self) -> AsyncIterator[bytes]:
        whole = True  # the last line is
        try:
            async for part in self.answer.parts:
                whole = part.endswith(b"\n")
                yield part
        except Lost:  # a stream that its replica has ended, for whatever reason, ends without this
            log.error("a replica was lost in the middle of a stream")
            line = json.dumps(HttpError(503, LOST, "replica_lost").body_at(self.http.url.path))
            events = self.answer.headers["content-type"].startswith(STREAMS[0])
            yield ("" if whole else "\n\n").encode() + (f"data: {line}\n\n" if events else f"{line}\n").encode()


async def _refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return HttpError(error.status_code, str(error.detail)).response_at(request.url.path)
