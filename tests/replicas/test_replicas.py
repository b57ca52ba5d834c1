"""Replicas behind one address: what every client sees while one of them is killed, and which one it is sent to."""

from __future__ import annotations

import json
import os
import signal
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from semspec.replicas.ingress import LOST
from semspec.replicas.router import BLOCK, UNEVEN, Router, text_of
from tests.replicas.running import Running
from tests.replicas.script import WORDS
from tests.serve.live import until

CLIENTS = 16


def streamed(running: Running, prompt: str) -> tuple[list[int], str, int]:
    """The words that a client gets, how its stream ends, and from whom they are."""
    words, end, pid = list[int](), "silence", 0
    with httpx.stream(
        "POST", f"{running.url}/v1/completions", json={"stream": True, "prompt": prompt}, timeout=30
    ) as response:
        for line in response.iter_lines():
            data = line.removeprefix("data: ")
            if data == "[DONE]":
                end = "done"
            elif data and "error" in json.loads(data):
                end = json.loads(data)["error"]["message"]
            elif data:
                words.append(json.loads(data)["word"])
                pid = json.loads(data)["pid"]
    return words, end, pid


def test_a_killed_replica_is_replaced_and_no_stream_ends_silently(running: Running) -> None:
    killed = running.pid(0)
    with ThreadPoolExecutor(CLIENTS) as pool:
        clients = [pool.submit(streamed, running, f"client {i} " * 40) for i in range(CLIENTS)]
        assert until(lambda: running.ingress.busy == CLIENTS)
        time.sleep(0.2)
        os.kill(killed, signal.SIGKILL)
        seen = [client.result() for client in clients]
    ends = Counter(end for _, end, _ in seen)
    assert set(ends) == {"done", LOST}, "whole, or an error that says so"
    assert all(end == LOST for _, end, pid in seen if pid == killed) and 1 <= ends[LOST] < CLIENTS
    for words, end, _ in seen:
        assert words == list(range(len(words))), "nothing is missing, and nothing comes twice"
        assert (len(words) == WORDS) == (end == "done")
    assert until(lambda: len(running.ingress.supervisor.ready) == 2, 30)
    assert running.pid(0) != killed and running.ingress.supervisor.replicas[0].starts == 2
    assert running.ingress.busy == 0
    assert {streamed(running, f"after {i} " * 40)[1] for i in range(2)} == {"done"}


def test_a_request_that_is_not_answered_yet_goes_to_another(running: Running) -> None:
    with ThreadPoolExecutor(8) as pool:
        waiting = [pool.submit(running.post, {"prompt": f"{i} " * 200, "sleep": 1.0}) for i in range(8)]
        assert until(lambda: running.ingress.busy == 8)
        os.kill(running.pid(1), signal.SIGKILL)
        answers = [one.result() for one in waiting]
    assert [answer.status_code for answer in answers] == [200] * 8
    assert running.pid(0) in {answer.json()["pid"] for answer in answers}


def test_health_draining_limits_and_keys(running: Running) -> None:
    assert httpx.get(f"{running.url}/health").json() == {"status": "ready", "ready": 2, "replicas": 2}
    assert [r["starts"] for r in httpx.get(f"{running.url}/replicas").json()] == [1, 1]
    assert running.post({"prompt": "a" * 6_000}).status_code == 413
    answer = running.post({"prompt": "a"}, headers={"authorization": "Bearer one"})
    assert answer.json()["key"] == "Bearer one"
    assert httpx.get(f"{running.url}/v1/models?a=b").json()["path"] == "/v1/models?a=b"
    with ThreadPoolExecutor(1) as pool:
        last = pool.submit(streamed, running, "the last")
        assert until(lambda: running.ingress.busy == 1)
        running.server._loop.call_soon_threadsafe(running.server._drain)
        assert until(lambda: running.ingress.draining)
        assert running.post({"prompt": "too late"}).status_code == 503
        assert last.result()[1] == "done", "what runs goes on"


def test_prompts_go_where_their_beginning_was_read() -> None:
    router = Router()
    first, second = "a" * 3 * BLOCK, "b" * 3 * BLOCK
    home = router.choose([0, 1], first)
    router.in_flight[home] = 1
    other = router.choose([0, 1], second)
    assert other != home, "a new prompt goes to the idler one"
    for more in ("", "x" * BLOCK, "y"):
        assert router.choose([0, 1], first + more) == home
        assert router.choose([0, 1], second + more) == other
    router.in_flight[home] = UNEVEN + 1
    assert router.choose([0, 1], first) == other, "but not to one that is much busier"
    router.in_flight[home] = 0
    router.forget(home)
    router.forget(other)
    router.in_flight = {home: 2, other: 1}
    assert router.choose([0, 1], first) == other, "a replica that was replaced has read nothing"
    assert router.choose([home], first) == home, "only those that are ready"


@pytest.mark.parametrize("body", [b"", b"\xff\xfe", b"[" * 50_000, b"[1]", b'{"messages": 3}', b"null"])
def test_whatever_a_client_sends_can_be_routed(body: bytes) -> None:
    assert Router().choose([0], text_of(body)) == 0
