"""Scripted replicas behind a real address, in a thread of the test."""

from __future__ import annotations

import json
import socket
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple, Self

import httpx

from semspec.replicas.backend import Replicas
from semspec.replicas.ingress import Ingress
from semspec.replicas.processes import Processes
from semspec.replicas.server import IngressServer
from semspec.replicas.supervisor import Supervisor
from semspec.serve.limits import Limits, Settings
from semspec.serve.server import configure
from tests.replicas.script import HELD_AT
from tests.serve.live import WAIT, until

SCRIPT = Path(__file__).parent / "script.py"
LIMITS = Limits(body_bytes=5_000, drain=10)
CLIENTS = 16


def command(port: int) -> list[str]:
    return [sys.executable, "-S", str(SCRIPT), str(port)]


class Seen(NamedTuple):
    """What a client has seen of a stream: its words, how it ended, and from whom it was."""

    words: list[int]
    end: str
    pid: int
    parent: int


NOTHING = Seen([], "silence", 0, 0)


class Address:
    """One address in front of some replicas."""

    def __init__(
        self,
        replicas: Replicas,
        settings: Settings | None = None,
        seconds: float = WAIT,
        headers: dict[str, str] | None = None,
    ) -> None:
        self.replicas = replicas
        settings, self.headers = settings or Settings(limits=LIMITS), headers or {}
        self.how = {"timeout": WAIT, "headers": self.headers, "verify": False}  # to read certificates takes a while
        self.ingress = Ingress(replicas, settings)
        self.server = IngressServer(configure(self.ingress.app, "127.0.0.1", 0, settings.limits), self.ingress)
        self.thread = threading.Thread(target=self.server.run, daemon=True)
        self.thread.start()
        assert until(lambda: self.server.started)
        self.port: int = self.server.servers[0].sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        assert until(lambda: replicas.ready == replicas.count, seconds)

    def get(self, path: str, **more: Any) -> httpx.Response:
        return httpx.get(f"{self.url}{path}", **self.how | more)

    def post(self, body: dict[str, Any], **more: Any) -> httpx.Response:
        return httpx.post(f"{self.url}/v1/completions", json=body, **self.how | more)

    def stream(self, prompt: str, told: Callable[[Seen], None] = lambda seen: None, **more: Any) -> Seen:
        seen = NOTHING
        body = {"stream": True, "prompt": prompt} | more
        url = f"{self.url}/v1/completions"
        with httpx.stream("POST", url, json=body, **self.how) as response:
            for line in response.iter_lines():
                data = line.removeprefix("data: ")
                if data == "[DONE]":
                    seen = seen._replace(end="done")
                elif data and "error" in (found := json.loads(data)):
                    seen = seen._replace(end=found["error"]["message"])
                elif data:
                    seen = Seen([*seen.words, found["word"]], "silence", found["pid"], found["parent"])
                    told(seen)
        return seen

    def held(
        self, prompts: list[str], hold: Path, act: Callable[[list[Seen]], None] = lambda begun: None
    ) -> list[Seen]:
        """What clients with these prompts see, where something happens while all are in the middle of a stream."""
        begun: dict[str, Seen] = {}
        with ThreadPoolExecutor(len(prompts)) as pool:
            clients = [
                pool.submit(self.stream, p, lambda seen, p=p: begun.update({p: seen}), hold=str(hold)) for p in prompts
            ]
            try:
                pairs = list(zip(prompts, clients, strict=True))
                assert until(lambda: all(c.done() or len(begun.get(p, NOTHING).words) > HELD_AT for p, c in pairs))
                act([begun.get(prompt, NOTHING) for prompt in prompts])
            finally:
                hold.touch()
            return [client.result() for client in clients]

    def killed_under_clients(self, hold: Path, kill: Callable[[Seen], None]) -> tuple[int, list[Seen]]:
        """Kill the replica of one of many clients; its process, and what they saw."""
        seen = self.held([f"client {i} " * 40 for i in range(CLIENTS)], hold, lambda begun: kill(begun[0]))
        return seen[0].pid, seen

    def opened(self, body: dict[str, Any], announced: int | None = None) -> socket.socket:
        """A connection on which a request was sent, or as much of it as there is."""
        content = json.dumps(body).encode()
        connection = socket.create_connection(("127.0.0.1", self.port), timeout=WAIT)
        length = len(content) if announced is None else announced
        more = "".join(f"{name}: {value}\r\n" for name, value in self.headers.items())
        head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n{more}Content-Length: {length}\r\n\r\n"
        connection.sendall(head.encode() + content)
        return connection

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.server._loop.call_soon_threadsafe(self.server._drain)
        self.thread.join(WAIT)
        assert not self.thread.is_alive()


class Running(Address):
    """Two replicas that are processes."""

    def __init__(self, settings: Settings | None = None, count: int = 2) -> None:
        self.supervisor = Supervisor(command, count)
        self.router = (processes := Processes(self.supervisor)).router
        super().__init__(processes, settings)

    def pid(self, number: int) -> int:
        process = self.supervisor.replicas[number].process
        assert process is not None
        return process.pid

    def __exit__(self, *_: object) -> None:
        super().__exit__()
        assert all(r.process is None or r.process.returncode is not None for r in self.supervisor.replicas)
