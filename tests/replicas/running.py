"""Scripted replicas behind a real address, in a thread of the test."""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from typing import Any

import httpx

from semspec.replicas.ingress import Ingress
from semspec.replicas.server import IngressServer
from semspec.replicas.supervisor import Supervisor
from semspec.serve.limits import Limits, Settings
from semspec.serve.server import configure
from tests.serve.live import until

SCRIPT = Path(__file__).parent / "script.py"
LIMITS = Limits(body_bytes=5_000, drain=10)


def command(port: int) -> list[str]:
    return [sys.executable, "-S", str(SCRIPT), str(port)]


class Running:
    def __init__(self, settings: Settings | None = None, count: int = 2) -> None:
        settings = settings or Settings(limits=LIMITS)
        self.ingress = Ingress(Supervisor(command, count), settings)
        self.server = IngressServer(configure(self.ingress.app, "127.0.0.1", 0, settings.limits), self.ingress)
        self.thread = threading.Thread(target=self.server.run, daemon=True)
        self.thread.start()
        assert until(lambda: self.server.started, 20)
        self.port: int = self.server.servers[0].sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        assert until(lambda: len(self.ingress.supervisor.ready) == count, 30)

    def pid(self, number: int) -> int:
        process = self.ingress.supervisor.replicas[number].process
        assert process is not None
        return process.pid

    def get(self, path: str, **more: Any) -> httpx.Response:
        return httpx.get(f"{self.url}{path}", timeout=30, **more)

    def post(self, body: dict[str, Any], **more: Any) -> httpx.Response:
        return httpx.post(f"{self.url}/v1/completions", json=body, timeout=30, **more)

    def __enter__(self) -> Running:
        return self

    def __exit__(self, *_: object) -> None:
        self.server._loop.call_soon_threadsafe(self.server._drain)
        self.thread.join(20)
        assert not self.thread.is_alive()
        assert all(r.process is None or r.process.returncode is not None for r in self.ingress.supervisor.replicas)
