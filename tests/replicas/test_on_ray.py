"""Replicas on Ray Serve: what every client sees while one is killed, where prompts go, and how it ends.

With Ray installed these run on it (`make test-ray`), else on a stand-in.
"""

from __future__ import annotations

import importlib.util
import os
import signal
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from semspec.replicas.ingress import LOST, LOST_TWICE
from semspec.serve.limits import Limits, Settings
from tests.replicas import fake_ray
from tests.replicas.running import CLIENTS, LIMITS, SCRIPT, Address, Seen
from tests.replicas.script import HELD_AT, WORDS
from tests.serve.live import WAIT, until

REAL = importlib.util.find_spec("ray") is not None
SECONDS = WAIT  # for replicas to start


@pytest.fixture(scope="module", autouse=True)
def ray() -> Iterator[Any]:
    with nullcontext() if REAL else fake_ray.installed() as cluster:
        yield cluster


@pytest.fixture(scope="module")
def address(ray: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Address]:
    from semspec.replicas.on_ray import RayReplicas

    keys = tmp_path_factory.mktemp("keys") / "keys"
    keys.write_text("one\n")
    settings = Settings(limits=Limits(body_bytes=LIMITS.body_bytes, drain=10), key_file=keys)
    replicas = RayReplicas(["-S", str(SCRIPT)], 2, drain=10)
    with Address(replicas, settings, SECONDS, {"authorization": "Bearer one"}) as address:
        yield address


def test_health_and_answers(address: Address) -> None:
    assert address.get("/health").json() == {"status": "ready", "ready": 2, "replicas": 2}
    assert {"state": "running", "replicas": 2} in address.get("/replicas").json()
    assert address.get("/v1/models?a=%3F").json()["path"] == "/v1/models?a=%3F"
    assert address.get("/v1/models", headers={}).status_code == 401, "keys are asked for at the one address"
    assert address.post({"prompt": "a" * 6_000}).status_code == 413
    told = address.get("/who").json()
    assert told["known"] == [True] and told["clients"][0].endswith(" 127.0.0.1"), "a replica knows whose request it is"
    assert address.stream("a").words == list(range(WORDS))


def pids(address: Address, folder: Path) -> set[int]:
    """Of two clients at a time, who are not sent to the same replica."""
    now = str(time.monotonic_ns())
    return {seen.pid for seen in address.held([f"{now} {i} " * 40 for i in range(2)], folder / now)}


def test_prompts_go_where_their_beginning_was_read(address: Address, tmp_path: Path) -> None:
    prompts = ["a" * 900, "b" * 900]
    homes = [seen.pid for seen in address.held(prompts, tmp_path / "go on")]
    assert len(set(homes)) == 2
    for more in ("", "x" * 900):
        assert [address.stream(prompt + more).pid for prompt in prompts] == homes
        assert [address.post({"prompt": prompt + more}).json()["pid"] for prompt in prompts[::-1]] == homes[::-1]


def test_keys_are_read_again_everywhere(address: Address, tmp_path: Path) -> None:
    prompts = ["c" * 900, "d" * 900]
    assert len({seen.pid for seen in address.held(prompts, tmp_path / "go on")}) == 2

    def reloads() -> list[int]:
        return [address.post({"prompt": prompt}).json()["reloads"] for prompt in prompts]

    before = reloads()
    address.server._loop.call_soon_threadsafe(address.ingress.reload)
    assert until(lambda: reloads() == [n + 1 for n in before], SECONDS)


def test_a_client_that_leaves_is_not_worked_for(address: Address) -> None:
    left = address.opened({"hold": "/no/such/file", "stream": True})
    assert until(lambda: address.ingress.busy == 1)
    left.close()
    assert until(lambda: address.ingress.busy == 0)


@pytest.mark.parametrize("victim", ["server", "actor"] if REAL else ["server"])
def test_a_killed_replica_is_replaced_and_no_stream_ends_silently(
    address: Address, tmp_path: Path, victim: str
) -> None:
    def kill(seen: Seen) -> None:
        os.kill(seen.pid if victim == "server" else seen.parent, signal.SIGKILL)

    killed, seen = address.killed_under_clients(tmp_path / "go on", kill)
    ends = Counter(one.end for one in seen)
    assert set(ends) == {"done", LOST} and ends[LOST] == sum(one.pid == killed for one in seen) == CLIENTS // 2
    for words, end, pid, _ in seen:
        assert words == list(range(HELD_AT + 1 if pid == killed else WORDS)) and (pid == killed) == (end == LOST)
    assert until(lambda: address.replicas.ready == 2 and len(pids(address, tmp_path) - {killed}) == 2, SECONDS)
    assert until(lambda: address.ingress.busy == 0), "counted after the client has its answer"


def test_a_request_that_ends_replicas_is_tried_twice_at_most(address: Address) -> None:
    answer = address.post({"poison": True})
    assert answer.status_code == 502 and answer.json()["error"]["message"] == LOST_TWICE
    assert until(lambda: address.get("/v1/models").status_code == 200, SECONDS)
