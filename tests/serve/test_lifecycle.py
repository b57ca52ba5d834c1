"""Loading, ready, draining, gone: as a process that is started and told to end while clients are being answered."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

import semspec
from semspec.errors import ModelError
from semspec.serve.limits import Limits, Settings
from tests.serve.live import WAIT, serving, until

ASK = {"model": "pocket", "messages": [{"role": "user", "content": "Ana has 3 pens. How many pens does Ana have?"}]}
LONG = ASK | {"temperature": 0, "max_tokens": 80, "ignore_eos": True, "speculation": {"off": True}}


LOADS_FOR_EVER = """
import sys, torch, semspec.pair.loading
def load(*_, **__):
    while True:
        torch.ones(400, 400) @ torch.ones(400, 400)
semspec.pair.loading.load = load
from semspec.cli.main import run
run()
"""


CAN_BE_HELD = """
import atexit, os, sys, time
import semspec.serve.server as server
from semspec.cli.main import run
server.CLOSE_SECONDS = server.CLOSE_NOW_SECONDS = 600  # a busy machine takes its time to send the last errors
from semspec.loop.executor import Executor
atexit.register(lambda: sys.stderr.write("torn down"))
hold, tick, passes = sys.argv.pop(1), Executor.tick, 0
def held(self):
    global passes
    while passes >= 5 and os.path.exists(hold):
        time.sleep(0.01)
    passes += os.path.exists(hold)
    return tick(self)
Executor.tick = held
run()
"""  # while a file is there, five passes are made and no more


class Process:
    """A server with a port of its own choice. What it logs is read as it comes, so that it never waits for that."""

    def __init__(self, *arguments: str, code: str | None = None, before: tuple[str, ...] = ()) -> None:
        env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.getcwd()}
        command = [sys.executable, *(["-m", "semspec"] if code is None else ["-c", code, *before])]
        self.child = subprocess.Popen(
            [*command, "serve", *arguments, "--port", "0"], env=env, stderr=subprocess.PIPE, text=True
        )
        self.said: list[str] = []
        self._reading = threading.Thread(target=self._read, daemon=True)
        self._reading.start()

    def _read(self) -> None:
        assert self.child.stderr is not None
        self.said.extend(line.rstrip("\n") for line in self.child.stderr)

    @property
    def url(self) -> str:
        """Where it listens."""
        found: list[str] = []
        assert until(
            lambda: bool(found.extend(re.findall(r'"listening", "url": "([^"]+)"', "\n".join(self.said))) or found)
        ), self.said
        return found[0]

    def status(self) -> str:
        try:
            return str(httpx.get(self.url + "/health", timeout=WAIT).json()["status"])
        except httpx.TransportError:
            return "unreachable"

    def ended(self) -> int:
        """With which code; all that it has said is there then."""
        code = self.child.wait(600)
        self._reading.join(WAIT)
        return code

    def lines(self) -> list[dict[str, Any]]:
        """What it has logged until its end; every line is JSON."""
        return [json.loads(line) for line in self.said]


@contextmanager
def process(*arguments: str, **more: Any) -> Iterator[Process]:
    running = Process(*arguments, **more)
    try:
        yield running
    finally:
        running.child.kill()
        running.ended()
        assert running.child.stderr is not None
        running.child.stderr.close()


def whole_or_error(url: str, stream: bool) -> str:
    """What a client makes of it: whole, or error. A cut answer that looks whole is neither."""
    try:
        if not stream:
            answer = httpx.post(url + "/v1/chat/completions", json=LONG, timeout=WAIT)
            return "whole" if answer.is_success and answer.json()["usage"]["completion_tokens"] == 80 else "error"
        with httpx.stream("POST", url + "/v1/chat/completions", json=LONG | {"stream": True}, timeout=WAIT) as answer:
            if not answer.is_success:
                return "error"
            lines = [line.removeprefix("data: ") for line in answer.iter_lines() if line]
        if "error" in json.loads(lines[-1] if lines[-1] != "[DONE]" else "{}"):
            return "error"
        assert lines[-1] == "[DONE]", "the stream ended in the middle without a word"
        assert json.loads(lines[-2])["choices"][0]["finish_reason"] == "length"
        return "whole"
    except httpx.TransportError:
        return "error"


def crowded(running: Process) -> bool:
    """Whether four are there, for two slots."""
    page = httpx.get(running.url + "/metrics", timeout=WAIT).text
    return re.search(r"^semspec:num_requests_waiting\{.*\} 2\.0$", page, re.M) is not None


def test_a_restart_under_load_cuts_nobody_short_in_silence(tmp_path: Path):
    few, hold = ("pocket", "--slots", "2", "--context", "256", "--drain", "0.3"), tmp_path / "hold"
    with process(*few, code=CAN_BE_HELD, before=(str(hold),)) as running, ThreadPoolExecutor(8) as threads:
        assert until(lambda: running.status() == "ready")
        assert [whole_or_error(running.url, stream) for stream in (True, False)] == ["whole", "whole"]
        hold.touch()
        answers = [threads.submit(whole_or_error, running.url, stream=i % 2 == 0) for i in range(4)]
        assert until(lambda: crowded(running))
        running.child.send_signal(signal.SIGTERM)
        assert until(lambda: running.status() in ("draining", "unreachable"))
        late = threads.submit(whole_or_error, running.url, stream=False)
        assert [answer.result() for answer in [*answers, late]] == ["error"] * 5
        hold.unlink()
        assert running.ended() == 0
        running.lines()  # the interpreter is not torn down, for which a busy machine took 90 seconds


def answered(url: str, stream: bool) -> str:
    """The outcome; "broken" if the connection ends without a word."""
    try:
        with httpx.stream("POST", url + "/v1/chat/completions", json=LONG | {"stream": stream}, timeout=WAIT) as answer:
            text = answer.read().decode()
    except httpx.TransportError:
        return "broken"
    last = text.removesuffix("data: [DONE]\n\n").split("data: ")[-1]
    whole = text.endswith("[DONE]\n\n") if stream else answer.is_success
    return "whole" if whole else json.loads(last)["error"]["code"]


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM])
def test_a_second_signal_ends_every_request_with_an_error_at_once(sent: signal.Signals, tmp_path: Path):
    few, hold = ("pocket", "--slots", "2", "--context", "256"), tmp_path / "hold"
    with process(*few, code=CAN_BE_HELD, before=(str(hold),)) as running, ThreadPoolExecutor(4) as threads:
        assert until(lambda: running.status() == "ready")
        hold.touch()
        answers = [threads.submit(answered, running.url, stream=i % 2 == 0) for i in range(4)]
        assert until(lambda: crowded(running))
        running.child.send_signal(sent)
        assert until(lambda: running.status() == "draining")
        running.child.send_signal(sent)
        outcomes = [answer.result() for answer in answers]
        hold.unlink()
        assert running.ended() == 0
        lines, url = running.lines(), running.url
    assert set(outcomes) <= {"shutting_down", "draining"} and "shutting_down" in outcomes
    assert [line["status"] for line in lines if line.get("path") == "/v1/chat/completions"].count(500) == 0
    listening, ready = (next(line for line in lines if line["event"] == event) for event in ("listening", "ready"))
    assert listening["url"] == ready["url"] == url and listening["serves"].startswith("pocket: 2 slots, lossless only")
    assert lines.index(listening) < lines.index(ready) and ready["resident_mib"] > 0


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_while_a_model_loads_ends_the_server(sent: signal.Signals):
    with process("pocket", code=LOADS_FOR_EVER) as running:
        assert until(lambda: running.status() == "loading")
        running.child.send_signal(sent)
        assert running.ended() == 0
        assert [line["event"] for line in running.lines()][-1] == "draining"


@pytest.mark.parametrize(
    ("given", "code", "words"),
    [
        (["{folder}"], 3, "without a config.json"),
        (["pocket", "--context", "64", "--verifier", "semantic:probes={folder}", "--allow-lossy"], 3, "probe"),
    ],
)
def test_what_cannot_be_loaded_is_told_in_one_line(tmp_path: Path, given: list[str], code: int, words: str):
    with process(*[word.format(folder=tmp_path) for word in given]) as running:
        assert running.ended() == code
        *logged, told = running.said
    assert told.startswith("semspec: ") and words in told
    assert all(json.loads(line)["level"] == "info" for line in logged), "nobody's mistake is a failure of the server"


def test_while_it_loads_it_says_so_and_refuses(pair: semspec.Pair):
    gate = threading.Event()

    def load() -> semspec.Pair:
        assert gate.wait(WAIT)
        return pair

    with serving(load, Settings(name="tiny"), ready=False) as live:
        assert live.get("/health").status_code == 503 and live.get("/health").json() == {"status": "loading"}
        refusal = live.post("/v1/completions", {"model": "tiny", "prompt": "x"})
        assert refusal.status_code == 503 and "loaded" in refusal.json()["error"]["message"]
        assert refusal.headers["retry-after"] and live.post("/tokenize", {"prompt": "x"}).status_code == 503
        gate.set()
        assert until(lambda: live.get("/health").status_code == 200)
        live.server.drain()
        assert until(lambda: live.engine.state in ("draining", "stopped"))


@pytest.mark.parametrize("error", [ModelError("no such model"), KeyError("a mistake of ours")])
def test_a_failure_to_load_is_remembered(error: Exception, caplog: pytest.LogCaptureFixture):
    gate = threading.Event()

    def load() -> semspec.Pair:
        assert gate.wait(WAIT)
        raise error

    with serving(load, ready=False) as live:
        gate.set()
        assert until(lambda: live.engine.state in ("failed", "stopped"))
        assert live.engine.error is error and until(lambda: live.server.should_exit)
    assert ("the engine has failed" in caplog.text) == isinstance(error, KeyError), "a user's mistake is no failure"


def test_draining_waits_for_answers_and_then_ends(pair: semspec.Pair):
    limits = Limits(drain=600, new_tokens=300)
    with serving(lambda: pair, Settings(name="tiny", limits=limits)) as live, ThreadPoolExecutor(1) as thread:
        body = {"model": "tiny", "prompt": "the", "max_tokens": 120, "ignore_eos": True}
        with live.held():
            running = thread.submit(live.post, "/v1/completions", body)
            assert until(live.submitted)
            live.server.drain()
            assert live.get("/health").json() == {"status": "draining"}
            assert live.post("/v1/completions", body).status_code == 503
        assert running.result().json()["usage"]["completion_tokens"] == 120
        assert until(lambda: live.server.should_exit)
