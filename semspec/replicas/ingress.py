"""The one address: requests go on to a replica, answers come back as they are.

Nothing that was accepted ends silently. A replica that is lost before it has answered anything is made up for by
another; one that is lost in the middle of a stream leaves an error event at its end, and no [DONE].
"""

from __future__ import annotations

import json
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from semspec.replicas.router import Router, text_of
from semspec.replicas.supervisor import Supervisor

log = logging.getLogger("semspec.serve")
HOP = frozenset({"connection", "keep-alive", "transfer-encoding", "te", "trailer", "upgrade", "host", "content-length"})
DROPPED = HOP | {"origin"}  # pages are checked here; a replica knows neither this host name nor its port
METHODS = ["GET", "POST", "HEAD", "OPTIONS", "DELETE", "PUT"]
LOST = "the replica that was answering has ended; ask again"
NONE_READY = "no replica is ready; try again in a moment"
CONNECT_SECONDS = 2.0


class Ingress:
    def __init__(self, supervisor: Supervisor, max_body: int = 1 << 20, drain: float = 30.0) -> None:
        self.supervisor, self.max_body, self.drain = supervisor, max_body, drain
        self.router = Router()
        supervisor.on_replaced = self.router.forget
        self.draining = False
        self._client: httpx.AsyncClient | None = None
        routes = [
            Route("/health", self.health, methods=["GET"]),
            Route("/replicas", self.status, methods=["GET"]),
            Route("/{path:path}", self.forward, methods=METHODS),
        ]
        self.app = Starlette(routes=routes, lifespan=self._lifespan)

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
            return error(503, "the server is shutting down", "draining")
        try:
            body = await self._read(request)
        except ClientDisconnect:
            return PlainTextResponse("", 499)
        if body is None:
            return error(413, f"the request has more than {self.max_body} bytes", "too_large")
        tried: set[int] = set()
        while left := [number for number in self.supervisor.ready if number not in tried]:
            number = self.router.choose(left, text_of(body))
            tried.add(number)
            answer = await self._ask(number, request, body)
            if answer is not None:
                return answer
            log.warning("a replica was lost before it answered", extra={"fields": {"replica": number}})
        return error(503, LOST if tried else NONE_READY, "no_replica")

    async def _read(self, request: Request) -> bytes | None:
        body = bytearray()
        async for part in request.stream():
            body += part
            if len(body) > self.max_body:
                return None
        return bytes(body)

    async def _ask(self, number: int, request: Request, body: bytes) -> Response | None:
        """A replica's answer, whole or as a stream; None: it was lost before anything of it had come."""
        assert self._client is not None
        replica = self.supervisor.replicas[number]
        headers = [(k, v) for k, v in request.headers.raw if k.decode("latin-1") not in DROPPED]
        url = f"{replica.url}{request.url.path}{f'?{request.url.query}' if request.url.query else ''}"
        sent = self._client.build_request(request.method, url, headers=headers, content=body)
        self.router.in_flight[number] = self._flights(number) + 1
        streaming = False
        try:
            response = await self._client.send(sent, stream=True)
            kept = {k: v for k, v in response.headers.items() if k.lower() not in HOP}
            if response.headers.get("content-type", "").startswith(("text/event-stream", "application/x-ndjson")):
                streaming = True
                return StreamingResponse(self._events(number, response), response.status_code, kept)
            return Response(await response.aread(), response.status_code, kept)
        except httpx.HTTPError:
            replica.ready = False  # until it is asked for its health again
            return None
        finally:
            if not streaming:
                self._done(number)

    async def _events(self, number: int, response: httpx.Response) -> AsyncIterator[bytes]:
        whole = True  # the last line is
        try:
            async for part in response.aiter_raw():
                whole = part.endswith(b"\n")
                yield part
        except httpx.HTTPError:  # a stream that its replica has ended, for whatever reason, ends without one
            log.error("a replica was lost in the middle of a stream", extra={"fields": {"replica": number}})
            self.supervisor.replicas[number].ready = False
            line = json.dumps(problem(LOST, "replica_lost"))
            events = response.headers["content-type"].startswith("text/event-stream")
            yield ("" if whole else "\n\n").encode() + (f"data: {line}\n\n" if events else f"{line}\n").encode()
        finally:
            await response.aclose()
            self._done(number)

    def _done(self, number: int) -> None:
        self.router.in_flight[number] = self._flights(number) - 1


def problem(message: str, code: str) -> dict[str, object]:
    return {"error": {"message": message, "type": "unavailable_error", "param": None, "code": code}}


def error(status: int, message: str, code: str) -> Response:
    return JSONResponse(problem(message, code), status, {"Retry-After": "2"} if status == 503 else None)
