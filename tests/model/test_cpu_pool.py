"""A pool of pages on a CPU, where it is asked for: plan, refusals, preemption."""

from __future__ import annotations

from pathlib import Path

import pytest

import semspec
from semspec.errors import ModelError
from semspec.model import memory_plan
from semspec.model.paged_cache import PagedCache
from semspec.model.wrapper import unwrap


def test_a_cpu_has_a_pool_if_it_is_asked_for(
    target_folder: Path, draft_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The plan says what it takes, refuses what does not fit, and the runners have it."""
    said = list[str]()
    pair = semspec.load(
        target_folder, draft_folder, device="cpu", slots=6, context=200, cache_tokens=400, report=said.append
    )
    assert "KV of 384 tokens, in 6 slots of at most 200," in said[0] and pair.is_cached
    for runner in (pair.target, pair.draft):
        cache = unwrap(runner).cache
        assert isinstance(cache, PagedCache) and (cache.blocks.blocks, cache.blocks.size) == (6, 64)
    prompts = ["one two three four five six seven " * (1 + i % 3) for i in range(8)]
    options = {"verifier": "exact", "max_new_tokens": 60, "ignore_eos": True}
    whole = semspec.load(target_folder, draft_folder, device="cpu", slots=6, context=200)
    small, wide = pair.generate(prompts, **options), whole.generate(prompts, **options)
    assert [r.tokens for r in small] == [r.tokens for r in wide]
    assert sum(r.stats.preempted for r in small) > 0 == sum(r.stats.preempted for r in wide)
    mixed = semspec.load(target_folder, draft_folder, device="cpu", context=200, cache_tokens=400, draft_dtype="int8")
    assert not isinstance(unwrap(mixed.draft).cache, PagedCache), "integer weights are read by NumPy"
    assert mixed.generate(prompts[0], **options).tokens == wide[0].tokens
    monkeypatch.setattr(memory_plan, "available", lambda device: 10**5)
    with pytest.raises(ModelError, match="too much"):
        semspec.load(target_folder, device="cpu", slots=6, context=200, cache_tokens=4000)
