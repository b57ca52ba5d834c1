"""The one address: requests go on to a replica, answers come back as they are.

Nothing that was accepted ends silently. A replica that is lost before it has answered anything is made up for by
another, once: a request that has ended two may be the cause. One that is lost in the middle of a stream leaves an error
event at its end, and no [DONE].
"""

from __future__ import annotations

import json
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from semspec.replicas.router import Router, text_of
from semspec.replicas.supervisor import Supervisor
from semspec.serve.auth import Keys, KeyStore
from semspec.serve.forwarded import HEADER, introduced
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
CONNECT_SECONDS = 2.0
ATTEMPTS = 2


class Ingress:
    def __init__(self, supervisor: Supervisor, settings: Settings) -> None:
        self.supervisor, self.drain = supervisor, settings.limits.drain
        self.router = Router()
        supervisor.on_replaced = self.router.forget
        self.draining = False
        self._client: httpx.AsyncClient | None = None
        routes = [
            Route("/health", self.health, methods=["GET"]),
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
        self.supervisor.reload()

    @property
    def busy(self) -> int:
        return sum(self.router.in_flight.values())

    @asynccontextmanager
    async def _lifespan(self, app: Starlette) -> AsyncIterator[None]:
        timeout = httpx.Timeout(None, connect=CONNECT_SECONDS)
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=64)
        self._client = httpx.AsyncClient(timeout=timeout, limits=limits, trust_env=False)
        self.supervisor.start()
        yield
        await self.supervisor.stop(self.drain)
        await self._client.aclose()

    async def health(self, request: Request) -> Response:
        """200 while one replica is ready; how many are."""
        ready = len(self.supervisor.ready)
        state = "draining" if self.draining else "ready" if ready else "loading"
        return JSONResponse(
            {"status": state, "ready": ready, "replicas": self.supervisor.count}, 200 if state == "ready" else 503
        )

    async def status(self, request: Request) -> Response:
        return JSONResponse(
            [
                {"replica": r.number, "ready": r.ready, "starts": r.starts, "in_flight": self._flights(r.number)}
                for r in self.supervisor.replicas
            ]
        )

    def _flights(self, number: int) -> int:
        return self.router.in_flight.get(number, 0)

    async def forward(self, request: Request) -> Response:
        if self.draining:
            return HttpError(503, "the server is shutting down", "draining", 2).response_at(request.url.path)
        tried: set[int] = set()
        try:
            body = await request.body()
            text = text_of(body)
            while len(tried) < ATTEMPTS and (left := [n for n in self.supervisor.ready if n not in tried]):
                number = self.router.choose(left, text)
                tried.add(number)
                answer = await unless_gone(request, self._ask(number, request, body))
                if answer is not None:
                    return answer
                log.warning("a replica was lost before it answered", extra={"fields": {"replica": number}})
        except (ClientDisconnect, Gone):
            return Response(status_code=Gone.STATUS)
        except httpx.InvalidURL:
            return HttpError(400, "the path is too long, or none that can be passed on", "bad_path").response_at(
                request.url.path
            )
        if len(tried) == ATTEMPTS:
            response = HttpError(502, LOST_TWICE, "replica_lost").response_at(request.url.path)
            response.headers["x-should-retry"] = "false"  # OpenAI's clients would end two more with it
            return response
        return HttpError(503, LOST if tried else NONE_READY, "no_replica", 2).response_at(request.url.path)

    async def _ask(self, number: int, request: Request, body: bytes) -> Response | None:
        """A replica's answer, whole or as a stream; None: it was lost before anything of it had come."""
        assert self._client is not None
        replica = self.supervisor.replicas[number]
        headers = [(k, v) for k, v in request.headers.raw if k.decode("latin-1") not in DROPPED]
        headers.append(introduced(self.supervisor.secret, request.client.host if request.client else ""))
        query = request.scope["query_string"]
        target = request.scope["raw_path"] + (b"?" + query if query else b"")  # as sent: %3F begins no query
        url = httpx.URL(replica.url).copy_with(raw_path=target)
        sent = self._client.build_request(request.method, url, headers=headers, content=body)
        self.router.in_flight[number] = self._flights(number) + 1
        streaming = False
        try:
            response = await self._client.send(sent, stream=True)
            kept = {k: v for k, v in response.headers.items() if k.lower() not in HOP}
            if response.headers.get("content-type", "").startswith(STREAMS):
                streaming = True
                return Passed(self, number, request, response, kept)
            return Response(await response.aread(), response.status_code, kept)
        except httpx.HTTPError:
            replica.ready = False  # until it is asked for its health again
            return None
        finally:
            if not streaming:
                self.done(number)

    def done(self, number: int) -> None:
        self.router.in_flight[number] = self._flights(number) - 1


class Passed(Response):
    """A replica's stream, for as long as the client stays; however it ends, the replica hears of it."""

    def __init__(
        self, ingress: Ingress, number: int, http: Request, source: httpx.Response, headers: dict[str, str]
    ) -> None:
        super().__init__(status_code=source.status_code, headers=headers)
        del self.headers["content-length"]
        self.ingress, self.number, self.http, self.source = ingress, number, http, source

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await unless_gone(self.http, self._send(send))
        except (OSError, Gone):
            pass
        finally:
            self.ingress.done(self.number)
            await self.source.aclose()

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async for part in self._parts():
            await send({"type": "http.response.body", "body": part, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _parts(self) -> AsyncIterator[bytes]:
        whole = True  # the last line is
        try:
            async for part in self.source.aiter_raw():
                whole = part.endswith(b"\n")
                yield part
        except httpx.HTTPError:  # a stream that its replica has ended, for whatever reason, ends without one
            log.error("a replica was lost in the middle of a stream", extra={"fields": {"replica": self.number}})
            self.ingress.supervisor.replicas[self.number].ready = False
            line = json.dumps(HttpError(503, LOST, "replica_lost").body_at(self.http.url.path))
            events = self.source.headers["content-type"].startswith(STREAMS[0])
            yield ("" if whole else "\n\n").encode() + (f"data: {line}\n\n" if events else f"{line}\n").encode()


async def _refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return HttpError(error.status_code, str(error.detail)).response_at(request.url.path)
