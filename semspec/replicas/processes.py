"""Replicas that are processes of this machine: each request goes to the one that has read most of it before."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import httpx

from semspec.replicas.backend import Answer, Lost, NoneReady, Sent
from semspec.replicas.router import Router, text_of
from semspec.replicas.supervisor import Supervisor
from semspec.serve.forwarded import introduced

CONNECT_SECONDS = 10.0  # a replica that has ended refuses at once; one on a busy machine is not lost


class Processes:
    def __init__(self, supervisor: Supervisor) -> None:
        self.supervisor, self.count = supervisor, supervisor.count
        self.router: Router[int] = Router()
        supervisor.on_replaced = self.router.forget
        self._client: httpx.AsyncClient | None = None

    @property
    def ready(self) -> int:
        return len(self.supervisor.ready)

    def describe(self) -> list[dict[str, Any]]:
        flights = self.router.in_flight
        return [
            {"replica": r.number, "ready": r.ready, "starts": r.starts, "in_flight": flights.get(r.number, 0)}
            for r in self.supervisor.replicas
        ]

    def start(self) -> None:
        timeout = httpx.Timeout(None, connect=CONNECT_SECONDS)
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=64)
        self._client = httpx.AsyncClient(timeout=timeout, limits=limits, trust_env=False)
        self.supervisor.start()

    async def ask(self, sent: Sent, tried: set[Any]) -> Answer:
        assert self._client is not None
        left = [number for number in self.supervisor.ready if number not in tried]
        if not left:
            raise NoneReady
        number = self.router.choose(left, text_of(sent.body))
        tried.add(number)
        replica = self.supervisor.replicas[number]
        headers = [*sent.headers, introduced(self.supervisor.secret, sent.client)]
        url = httpx.URL(replica.url).copy_with(raw_path=sent.target)  # as sent: %3F begins no query
        request = self._client.build_request(sent.method, url, headers=headers, content=sent.body)
        self.router.begin(number)
        begun = False
        try:
            response = await self._client.send(request, stream=True)
            begun = True
        except httpx.HTTPError as error:
            replica.ready = False  # until it is asked for its health again
            raise Lost from error
        finally:
            if not begun:
                self.router.end(number)

        async def parts() -> AsyncIterator[bytes]:
            try:
                async for part in response.aiter_raw():
                    yield part
            except httpx.HTTPError as error:
                replica.ready = False
                raise Lost from error

        async def close() -> None:
            self.router.end(number)
            await response.aclose()

        return Answer(response.status_code, dict(response.headers), parts(), close)

    def reload(self) -> None:
        self.supervisor.reload()

    async def stop(self, seconds: float) -> None:
        await self.supervisor.stop(seconds)
        if self._client is not None:
            await self._client.aclose()
