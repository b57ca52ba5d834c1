"""A server whose slots share a pool that is too small for all: no errors, and everybody gets the text he gets alone."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import semspec
from semspec import Pair
from semspec.model import ModelRunner
from semspec.model.paged_cache import PagedCache
from semspec.model.wrapper import unwrap
from semspec.serve.engine import Engine
from semspec.serve.limits import Limits, Settings
from tests.serve.live import Live, serving

SYSTEM = "the quick brown fox jumps over the lazy dog " * 3
METHODS: list[dict[str, Any]] = [
    {"speculation": {"off": True}},
    {"speculation": {"verifier": "exact", "num_draft_tokens": 4}},
    {"speculation": {"verifier": "block", "num_draft_tokens": 3}, "temperature": 0.8},
    {"speculation": {"verifier": "fly", "num_draft_tokens": 5}},
    {"speculation": {"verifier": "exact", "num_draft_tokens": 4}, "n": 3, "temperature": 0.8},
]


@pytest.fixture(scope="module")
def pool(target_folder: Path, draft_folder: Path) -> Iterator[tuple[Live, Pair]]:
    pair = semspec.load(target_folder, draft_folder, device="cpu", slots=8, context=256)
    small: Any = lambda old: ModelRunner(old.transformer, 8, 256, old.vocab_size, tokens=400, page=8)  # noqa: E731
    pair = pair.wrapped(small).cached()
    limits = Limits(queue=64, new_tokens=100)
    with serving(lambda: pair, Settings(name="pool", limits=limits, allow_lossy=True)) as live:
        yield live, pair


def body(i: int) -> dict[str, Any]:
    options = {"model": "pool", "max_tokens": 20 + 5 * (i % 7), "temperature": 0.0, "seed": i, "ignore_eos": True}
    return options | METHODS[i % len(METHODS)] | {"prompt": SYSTEM * (i % 2) + "one two three " * (1 + i % 4)}


def test_usage_is_that_of_the_pool(pool: tuple[Live, Pair]) -> None:
    _, pair = pool
    ticket = SimpleNamespace(job=SimpleNamespace(prompt=[1] * 180))
    sequence = SimpleNamespace(started=1.0, done=False, written=20, ticket=ticket)
    request = SimpleNamespace(sequences=[sequence])
    engine: Any = SimpleNamespace(pair=pair, slots=8, accepted=[request])
    assert Engine.cache_usage.fget(engine) == 0.5  # type: ignore[attr-defined]


def test_everybody_gets_the_text_he_gets_alone(pool: tuple[Live, Pair]) -> None:
    live, pair = pool

    def ask(i: int) -> list[str]:
        answer = live.post("/v1/completions", body(i))
        assert answer.status_code == 200, answer.text
        return [choice["text"] for choice in answer.json()["choices"]]

    alone = [ask(i) for i in range(14)]
    before = live.metric("semspec:num_preemptions_total")
    with ThreadPoolExecutor(14) as clients:
        together = list(clients.map(ask, range(14)))
    assert together == alone and live.idle()
    assert live.metric("semspec:num_preemptions_total") > before
    remembered = live.metric("semspec:kv_cache_pages_remembered")
    assert live.metric("semspec:kv_cache_pages_used") == remembered > 0, "nobody holds any"
    for runner in (pair.target, pair.draft):
        cache = unwrap(runner).cache
        assert isinstance(cache, PagedCache)
        held = {block for table in cache.blocks.tables for block in table}
        assert cache.blocks.free == cache.blocks.blocks - len(held), "no page is lost"
        runner.close()  # type: ignore[union-attr]
        assert cache.blocks.free == cache.blocks.blocks
