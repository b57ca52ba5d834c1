"""What a server says it will take is what it takes, whatever is asked of it."""

from __future__ import annotations

import os
import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

import semspec
from semspec.serve import memory
from tests.serve.live import WAIT, until
from tests.serve.test_lifecycle import process

RULES = ("exact", "sampling", "block", "fly", "typical", "semantic", "semantic+")


def ask(rng: random.Random) -> dict[str, Any]:
    """Of every size: what leaves the most behind in allocators."""
    how = {"verifier": rng.choice(RULES), "num_draft_tokens": 64, "trace": True}
    prompt = "Ana has 12 books. " + "Ben has 3 more. " * rng.choice([1, 10, 40])
    more = {"logprobs": 20, "ignore_eos": True, "n": rng.choice([1, 3]), "temperature": 0.8}
    return {"model": "pocket", "prompt": prompt, "max_tokens": rng.choice([5, 20]), "speculation": how} | more


@pytest.mark.skipif(memory.resident_mib() is None, reason="this system does not tell how much memory a process has")
def test_under_load_a_server_has_no_more_memory_than_it_announced():
    rng, had = random.Random(1), list[float]()
    arguments = ("pocket", "--slots", "4", "--context", "512", "--allow-lossy")
    with process(*arguments) as running, ThreadPoolExecutor(9) as clients:
        assert until(lambda: running.status() == "ready")
        url, pid = running.url, running.child.pid
        asked = [clients.submit(httpx.post, f"{url}/v1/completions", json=ask(rng), timeout=WAIT) for _ in range(16)]
        for answer in asked:
            assert answer.result().status_code == 200
            had.append(int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20)
        assert httpx.post(f"{url}/tokenize", json={"prompt": "a b " * 9000}, timeout=WAIT).json()["count"] > 8192
        running.child.terminate()
        assert running.ended() == 0
        (ready,) = [line for line in running.lines() if line["event"] == "ready"]
    assert ready["resident_mib"] < max(had) <= ready["at_most_mib"]
    assert ready["at_most_mib"] < 2 * ready["resident_mib"], "a limit that says something"


def test_what_is_announced_has_room_for_every_slot_full(pair: semspec.Pair):
    """A system gives memory when it is written, so a server that has just started does not have its caches yet."""
    assert pair.draft is not None
    caches = [runner.cache for runner in (pair.target, pair.draft)]  # type: ignore[attr-defined]
    full = sum(cache.keys.nbytes + cache.values.nbytes for cache in caches)
    assert memory.working_bytes(pair, 4) >= memory.LAZY + full > memory.LAZY


def test_memory_is_trimmed_above_the_limit_and_when_there_is_nothing_to_do(monkeypatch: pytest.MonkeyPatch):
    trims, now, has = list[float](), [100.0], [50]
    monkeypatch.setattr(memory, "_malloc_trim", lambda _: trims.append(now[0]))
    monkeypatch.setattr(memory.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(memory, "resident_mib", lambda: has[0])
    trim = memory.Trimmer(at_most_mib=60)
    for at, mib, idle in [
        (100.0, 50, False), (101.5, 50, False), (103.0, 61, False), (103.5, 61, False), (104.5, 61, False),
        (106.0, 50, True), (107.5, 50, True), (107.6, 50, False), (109.0, 50, True), (120.0, 50, True),
    ]:  # fmt: skip
        now[0], has[0] = at, mib
        trim(idle)
    assert trims == [100.0, 103.0, 104.5, 106.0, 109.0, 120.0]
