"""A real server on a free port, in a thread of the test."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import openai

from semspec import Pair
from semspec.serve.app import make_app
from semspec.serve.engine import Engine
from semspec.serve.limits import Settings
from semspec.serve.metrics import Metrics
from semspec.serve.server import Server, configure

JSON = {"content-type": "application/json"}
WAIT = 600.0  # seconds: for what happens at once, unless the machine is very busy


@dataclass
class Live:
    url: str
    engine: Engine
    server: Server
    settings: Settings

    def openai(self, key: str = "none") -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0, timeout=WAIT)

    def get(self, path: str, **more: Any) -> httpx.Response:
        return httpx.get(self.url + path, timeout=WAIT, **more)

    def post(self, path: str, body: Any = None, **more: Any) -> httpx.Response:
        return httpx.post(self.url + path, json=body, timeout=WAIT, **more)

    def metric(self, name: str) -> float:
        """The sum over all labels."""
        lines = self.get("/metrics").text.splitlines()
        found = [line.rsplit(" ", 1) for line in lines if line.startswith((f"{name} ", f"{name}{{"))]
        assert found, f"there is no metric {name}"
        return sum(float(value) for _, value in found)

    def held(self, after: int = 0) -> AbstractContextManager[None]:
        """So many passes are made inside, and then none: who is answered stays so, however fast or slow it goes."""
        passes = iter(range(after))
        return self._held(lambda: next(passes, None) is None)

    def held_writing(self) -> AbstractContextManager[None]:
        """Inside, passes are made until somebody has something to read of an answer, and then none.

        A first token or two are often marks that nobody sees (<think> and a line's end): with those alone a test
        would wait for text that cannot come."""
        return self._held(lambda: any(s.written >= 8 for r in self.engine._requests for s in r.sequences))

    @contextmanager
    def _held(self, from_now_on: Callable[[], bool]) -> Iterator[None]:
        assert self.engine.pair is not None
        executor, go = self.engine.pair.executor, threading.Event()
        tick = executor.tick
        with executor.lock:  # a pass that is being made is not one of them
            executor.tick = lambda: (from_now_on() and go.wait(), tick())[1]  # type: ignore[method-assign,func-returns-value]
        try:
            yield
        finally:
            executor.tick = tick  # type: ignore[method-assign]
            go.set()

    @contextmanager
    def slowed(self, seconds: float = 0.05) -> Iterator[None]:
        """Every pass takes so long at least: no long answer is complete within a short deadline."""
        assert self.engine.pair is not None
        executor = self.engine.pair.executor
        tick = executor.tick
        executor.tick = lambda: (time.sleep(seconds), tick())[1]  # type: ignore[method-assign,func-returns-value]
        try:
            yield
        finally:
            executor.tick = tick  # type: ignore[method-assign]

    def submitted(self) -> bool:
        """Whether a request has come as far as the engine: from now on only that can end it."""
        return any(request.submitted is not None for request in list(self.engine.accepted))

    def idle(self, seconds: float = WAIT) -> bool:
        """Whether every slot comes back, on both models, and nothing is left waiting."""
        pair = self.engine.pair
        assert pair is not None
        return until(
            lambda: self.engine.live == 0 and not pair.executor.tasks and pair.target.free == self.engine.slots, seconds
        ) and (pair.draft is None or pair.draft.free == self.engine.slots)


def until(condition: Callable[[], bool], seconds: float = WAIT) -> bool:
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.005)
    return True


@contextmanager
def serving(
    load: Callable[[], Pair],
    settings: Settings | None = None,
    ready: bool = True,
    tls: tuple[Path | None, Path | None] = (None, None),
) -> Iterator[Live]:
    settings = settings or Settings(name="pair")
    metrics = Metrics(settings.name)
    engine = Engine(load, settings.limits, on_finish=metrics.finish)
    metrics.watch(engine)
    config = configure(make_app(engine, metrics, settings), "127.0.0.1", 0, settings.limits, *tls)
    server = Server(config, engine, settings.limits)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    assert until(lambda: server.started), "the server did not start"
    port = server.servers[0].sockets[0].getsockname()[1]
    live = Live(f"http://127.0.0.1:{port}", engine, server, settings)
    try:
        if ready:
            assert until(lambda: engine.state != "loading") and engine.error is None
        yield live
    finally:
        server.should_exit = True
        thread.join(WAIT)
        assert not thread.is_alive(), "the server did not end"
