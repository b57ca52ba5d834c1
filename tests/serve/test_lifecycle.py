"""Loading, ready, draining, gone: as a process that is started and told to end while clients are being answered."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
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
from tests.serve.live import serving, until

ASK = {"model": "pocket", "messages": [{"role": "user", "content": "Ana has 3 pens. How many pens does Ana have?"}]}
LONG = ASK | {"temperature": 0, "max_tokens": 80, "ignore_eos": True}


LOADS_FOR_EVER = """
import sys, torch, semspec.pair.loading
def load(*_, **__):
    while True:
        torch.ones(400, 400) @ torch.ones(400, 400)
semspec.pair.loading.load = load
from semspec.cli.main import run
run()
"""


SAYS_WHEN_IT_IS_TORN_DOWN = """
import atexit, sys
atexit.register(lambda: sys.stderr.write("torn down"))
from semspec.cli.main import run
run()
"""


@contextmanager
def process(*arguments: str, code: str | None = None) -> Iterator[tuple[subprocess.Popen[str], str]]:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.getcwd()}
    command = [sys.executable, *(["-m", "semspec"] if code is None else ["-c", code])]
    command += ["serve", *arguments, "--port", str(port)]
    running = subprocess.Popen(command, env=env, stderr=subprocess.PIPE, text=True)
    try:
        yield running, f"http://127.0.0.1:{port}"
    finally:
        running.kill()
        running.wait(10)
        assert running.stderr is not None
        running.stderr.close()


def status(url: str) -> str:
    try:
        return str(httpx.get(url + "/health", timeout=5).json()["status"])
    except httpx.TransportError:
        return "unreachable"


def whole_or_error(url: str, stream: bool) -> str:
    """What a client makes of it: whole, or error. A cut answer that looks whole is neither."""
    try:
        if not stream:
            answer = httpx.post(url + "/v1/chat/completions", json=LONG, timeout=60)
            return "whole" if answer.is_success and answer.json()["usage"]["completion_tokens"] == 80 else "error"
        with httpx.stream("POST", url + "/v1/chat/completions", json=LONG | {"stream": True}, timeout=60) as answer:
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


def test_a_restart_under_load_cuts_nobody_short_in_silence():
    few = ("pocket", "--slots", "2", "--context", "256", "--drain", "0.3")
    with process(*few, code=SAYS_WHEN_IT_IS_TORN_DOWN) as (running, url):
        seen = set()
        while "ready" not in seen:
            assert running.poll() is None
            seen.add(status(url))
            time.sleep(0.02)
        assert "loading" in seen
        with ThreadPoolExecutor(8) as threads:
            answers = [threads.submit(whole_or_error, url, stream=i % 2 == 0) for i in range(4)]
            time.sleep(0.5)
            running.send_signal(signal.SIGTERM)
            assert until(lambda: status(url) in ("draining", "unreachable"), 5)
            late = threads.submit(whole_or_error, url, stream=False)
            outcomes = [answer.result() for answer in answers]
            assert late.result() == "error"
        assert running.wait(20) == 0
        log_lines(running)  # the interpreter is not torn down, for which a busy machine took 90 seconds
    assert "error" in outcomes and set(outcomes) <= {"whole", "error"}


def log_lines(running: subprocess.Popen[str]) -> list[dict[str, Any]]:
    """What it has logged until its end; every line is JSON."""
    assert running.stderr is not None
    return [json.loads(line) for line in running.stderr.read().splitlines()]


def answered(url: str, stream: bool) -> str:
    """The outcome; "broken" if the connection ends without a word."""
    body = LONG | {"max_tokens": 190, "stream": stream, "speculation": {"off": True}}
    try:
        with httpx.stream("POST", url + "/v1/chat/completions", json=body, timeout=60) as answer:
            text = answer.read().decode()
    except httpx.TransportError:
        return "broken"
    last = text.removesuffix("data: [DONE]\n\n").split("data: ")[-1]
    whole = text.endswith("[DONE]\n\n") if stream else answer.is_success
    return "whole" if whole else json.loads(last)["error"]["code"]


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM])
def test_a_second_signal_ends_every_request_with_an_error_at_once(sent: signal.Signals):
    with process("pocket", "--slots", "2", "--context", "256") as (running, url):
        assert until(lambda: status(url) == "ready", 120)
        with ThreadPoolExecutor(4) as threads:
            answers = [threads.submit(answered, url, stream=i % 2 == 0) for i in range(4)]
            waiting = re.compile(r"^semspec:num_requests_waiting(\{.*\})? 2\.0$", re.M)
            assert until(lambda: waiting.search(httpx.get(url + "/metrics").text) is not None)
            running.send_signal(sent)
            assert until(lambda: status(url) == "draining")
            running.send_signal(sent)
            outcomes = [answer.result() for answer in answers]
        assert running.wait(20) == 0
        lines = log_lines(running)
    assert set(outcomes) <= {"whole", "shutting_down", "draining"} and "shutting_down" in outcomes
    assert [line["status"] for line in lines if line.get("path") == "/v1/chat/completions"].count(500) == 0
    listening, ready = (next(line for line in lines if line["event"] == event) for event in ("listening", "ready"))
    assert listening["url"] == ready["url"] == url and listening["serves"].startswith("pocket: 2 slots, lossless only")
    assert lines.index(listening) < lines.index(ready) and ready["resident_mib"] > 0


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_while_a_model_loads_ends_the_server(sent: signal.Signals):
    with process("pocket", code=LOADS_FOR_EVER) as (running, url):
        assert until(lambda: status(url) == "loading", 120)
        running.send_signal(sent)
        assert running.wait(20) == 0
        assert [line["event"] for line in log_lines(running)][-1] == "draining"


@pytest.mark.parametrize(
    ("given", "code", "words"),
    [
        (["{folder}"], 3, "without a config.json"),
        (["pocket", "--context", "64", "--verifier", "semantic:probes={folder}", "--allow-lossy"], 3, "probe"),
    ],
)
def test_what_cannot_be_loaded_is_told_in_one_line(tmp_path: Path, given: list[str], code: int, words: str):
    with process(*[word.format(folder=tmp_path) for word in given]) as (running, _):
        assert running.wait(600) == code and running.stderr is not None
        *logged, told = running.stderr.read().splitlines()
    assert told.startswith("semspec: ") and words in told
    assert all(json.loads(line)["level"] == "info" for line in logged), "nobody's mistake is a failure of the server"


def test_while_it_loads_it_says_so_and_refuses(pair: semspec.Pair):
    gate = threading.Event()

    def load() -> semspec.Pair:
        assert gate.wait(20)
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
        assert gate.wait(60)
        raise error

    with serving(load, ready=False) as live:
        gate.set()
        assert until(lambda: live.engine.state in ("failed", "stopped"))
        assert live.engine.error is error and until(lambda: live.server.should_exit)
    assert ("the engine has failed" in caplog.text) == isinstance(error, KeyError), "a user's mistake is no failure"


def test_draining_waits_for_answers_and_then_ends(pair: semspec.Pair):
    limits = Limits(drain=20, new_tokens=300)
    with serving(lambda: pair, Settings(name="tiny", limits=limits)) as live, ThreadPoolExecutor(1) as thread:
        body = {"model": "tiny", "prompt": "the", "max_tokens": 120, "ignore_eos": True}
        running = thread.submit(live.post, "/v1/completions", body)
        assert until(lambda: live.engine.running == 1)
        live.server.drain()
        assert live.get("/health").json() == {"status": "draining"}
        assert live.post("/v1/completions", body).status_code == 503
        assert running.result().json()["usage"]["completion_tokens"] == 120
        assert until(lambda: live.server.should_exit)
