"""Replicas behind one address: what every client sees while one of them is killed, and which one it is sent to."""

from __future__ import annotations

import json
import os
import signal
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from semspec.replicas.ingress import LOST
from semspec.replicas.router import BLOCK, UNEVEN, Router, text_of
from tests.replicas.running import CLIENTS, Running
from tests.replicas.script import HELD_AT, WORDS
from tests.serve.live import until


def test_a_killed_replica_is_replaced_and_no_stream_ends_silently(running: Running, tmp_path: Path) -> None:
    killed, seen = running.killed_under_clients(tmp_path / "go on", lambda one: os.kill(one.pid, signal.SIGKILL))
    ends = Counter(one.end for one in seen)
    assert set(ends) == {"done", LOST}, "whole, or an error that says so"
    assert ends[LOST] == sum(one.pid == killed for one in seen) == CLIENTS // 2
    for words, end, pid, _ in seen:
        assert words == list(range(HELD_AT + 1 if pid == killed else WORDS)), "nothing is missing, or comes twice"
        assert (pid == killed) == (end == LOST)
    assert until(lambda: running.replicas.ready == 2)
    assert killed not in {running.pid(0), running.pid(1)}
    assert sorted(r.starts for r in running.supervisor.replicas) == [1, 2]
    assert running.ingress.busy == 0
    assert {running.stream(f"after {i} " * 40).end for i in range(2)} == {"done"}


def test_a_request_that_is_not_answered_yet_goes_to_another(running: Running, tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        hold = tmp_path / "go on"
        waiting = [pool.submit(running.post, {"prompt": f"{i} " * 200, "hold": str(hold)}) for i in range(8)]
        assert until(lambda: running.router.in_flight == {0: 4, 1: 4})
        killed = running.pid(1)
        os.kill(killed, signal.SIGKILL)
        hold.touch()
        answers = [one.result() for one in waiting]
    assert [answer.status_code for answer in answers] == [200] * 8
    assert running.pid(0) in {answer.json()["pid"] for answer in answers}


def test_health_draining_limits_and_keys(running: Running, tmp_path: Path) -> None:
    assert running.get("/health").json() == {"status": "ready", "ready": 2, "replicas": 2}
    assert [r["starts"] for r in running.get("/replicas").json()] == [1, 1]
    assert running.post({"prompt": "a" * 6_000}).status_code == 413
    answer = running.post({"prompt": "a"}, headers={"authorization": "Bearer one"})
    assert answer.json()["key"] == "Bearer one"
    assert running.get("/v1/models?a=b").json()["path"] == "/v1/models?a=b"
    with ThreadPoolExecutor(1) as pool:
        last = pool.submit(running.stream, "the last", hold=str(tmp_path / "go on"))
        assert until(lambda: running.ingress.busy == 1)
        running.server._loop.call_soon_threadsafe(running.server._drain)
        assert until(lambda: running.ingress.draining)
        assert running.post({"prompt": "too late"}).status_code == 503
        (tmp_path / "go on").touch()
        assert last.result().end == "done", "what runs goes on"


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


def test_what_a_model_reads_first_is_compared_first() -> None:
    bodies = [{"input": str(i), "instructions": "be brief " * 99} for i in range(2)]
    texts = [text_of(json.dumps(body).encode()) for body in bodies]
    assert texts[0][: 3 * BLOCK] == texts[1][: 3 * BLOCK] and texts[0] != texts[1]


@pytest.mark.parametrize("body", [b"", b"\xff\xfe", b"[" * 50_000, b"[1]", b'{"messages": 3}', b"null"])
def test_whatever_a_client_sends_can_be_routed(body: bytes) -> None:
    assert Router().choose([0], text_of(body)) == 0
