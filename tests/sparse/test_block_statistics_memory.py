"""What a plan of attention takes beside the cache is in the memory that is told before loading."""

from __future__ import annotations

import pytest

import semspec
from semspec.model import ModelRunner
from semspec.model.memory_plan import MemoryPlan
from semspec.pair import loading
from semspec.probe import fingerprint
from semspec.sparse import AttentionPlan, SparsePlan
from semspec.sparse.block_statistics import BlockStatistics


@pytest.mark.parametrize(("score", "rest"), [("share", "nothing"), ("share", "mean"), ("reach", "mean")])
def test_what_is_told_is_what_is_taken(score: str, rest: str, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[MemoryPlan] = []
    monkeypatch.setattr(loading, "check", told.extend)
    plan = AttentionPlan(block=16, score=score, rest=rest)
    name = fingerprint(semspec.load("pocket", device="cpu", slots=1, context=64).target)
    sparse = SparsePlan(name, attention=plan)
    target = semspec.load("pocket", device="cpu", dtype="float32", slots=2, context=512, sparse=sparse).target
    assert isinstance(target, ModelRunner)
    means = BlockStatistics.of(target.cache, plan)
    kept = [target.cache.keys, target.cache.values, means.keys, means.values, means.variances]
    assert told[2].kv == sum(tensor.nbytes for tensor in kept if tensor is not None)
