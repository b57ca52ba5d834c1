"""A GPU's way of checking with blocks left out against the plain one, on a CPU; see tests/model/test_fast.py."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from semspec.model import ModelRunner
from semspec.model.fast import Fast
from semspec.model.graphs import Plain
from semspec.model.kernels import Kernels, reference_kernels
from semspec.sparse import AttentionPlan, FfnPlan
from semspec.types import Roll, Sampling, Score
from tests.checkpoints import make_model, save
from tests.model.test_fast import Rehearsed, close
from tests.sparse.runners import course, load, read, text, with_plan

PLAN = AttentionPlan(block=8, dense_below=32, rho=0.2, sinks=1, recent=1, anchors=(0, 2))


def quick(runner: ModelRunner, kernels: Kernels | None = None, **parts: object) -> ModelRunner:
    twin = with_plan(runner, **parts)
    twin.use(Fast(runner.transformer, twin.cache, kernels or reference_kernels(), Rehearsed()))
    return twin


@pytest.mark.parametrize(("score", "spread"), [("share", "pairs"), ("first", "heads")])
@pytest.mark.parametrize("family", ["llama3.1", "qwen3", "gemma3"])
def test_checks_are_the_same_either_way(family: str, score: str, spread: str, tmp_path: Path) -> None:
    model = load(save(make_model(family), tmp_path / family))
    plan = AttentionPlan(block=8, dense_below=32, rho=0.2, score=score, spread=spread)
    for refresh in (0, 2):
        plain, fused = with_plan(model, attention=plan, refresh=refresh), quick(model, attention=plan, refresh=refresh)
        for ours, theirs in zip(course(fused), course(plain), strict=True):
            close(ours, theirs)
        assert len(fused.sparsity.guard.drifts) == len(plain.sparsity.guard.drifts) == (1 if refresh else 0)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ModelRunner:
    return load(save(make_model("llama3.1", num_hidden_layers=4), tmp_path_factory.mktemp("model")))


def test_a_batch_of_all_kinds_is_the_same_either_way(model: ModelRunner) -> None:
    lengths = [200, 20, 97, 60]
    feeds = [(text(10, 6), 6), (text(11, 3), 3), (text(12, 30), 9), (text(14, 1), 1)]
    both = []
    for one in (with_plan(model, attention=PLAN), quick(model, attention=PLAN)):
        slots = [one.acquire() for _ in lengths]
        for i, (slot, length) in enumerate(zip(slots, lengths, strict=True)):
            read(one, slot, text(i, length))
        both.append(one.score([Score(one, s, *f) for s, f in zip(slots, feeds, strict=True)]))
    for ours, theirs in zip(*both, strict=True):
        close(ours.logits, theirs.logits)


def test_where_nothing_is_left_out_the_dense_graph_serves(model: ModelRunner) -> None:
    fused = quick(model, attention=PLAN)
    slot = fused.acquire()
    read(fused, slot, text(1, 20))
    fused.score([Score(fused, slot, text(2, 5), 5)])
    fused.roll([Roll(fused, slot, [3], 4, Sampling(), 0)])
    read(fused, slot, text(3, 100))
    fused.score([Score(fused, slot, [4], 1)])
    keys = [key for key in fused.fast.runs.keys if key[0] == "score"]
    assert {key[-1] for key in keys} == {None}
    fused.score([Score(fused, slot, text(2, 5), 5)])
    assert fused.fast.runs.keys[-1][-1] is not None


def test_channels_are_left_out_the_plain_way(model: ModelRunner) -> None:
    parts = {"ffn": FfnPlan(torch.full((4,), 0.3)), "attention": PLAN}
    for ours, theirs in zip(course(quick(model, **parts)), course(with_plan(model, **parts)), strict=True):
        close(ours, theirs)


def test_rolls_are_known_to_the_guard(model: ModelRunner) -> None:
    """What a fused roll wrote between two checks is fed again with them."""
    fused, dense = quick(model, attention=PLAN, refresh=1), with_plan(model)
    for one in (fused, dense):
        slot = one.acquire()
        read(one, slot, text(1, 100))
        one.score([Score(one, slot, text(2, 5), 5)])
    written = fused.roll([Roll(fused, slot, [9], 4, Sampling(), 0)])[0].tokens
    read(dense, slot, [9, *written[:-1]])
    ours, theirs = (one.score([Score(one, slot, text(3, 5), 5)])[0].logits for one in (fused, dense))
    close(ours, theirs)
    assert fused.sparsity.guard.drifts[0].tokens == 5 + 4


def test_tritons_kernel_gives_the_same(model: ModelRunner) -> None:
    pytest.importorskip("triton", reason="Triton is not installed (it is for Linux only)")
    from semspec.model.kernels import Choices, triton_kernels
    from tests.interpreter import allow_new_numpy

    allow_new_numpy()
    ours = quick(model, triton_kernels(Choices()), attention=PLAN)
    ours.fast.runs = Plain()
    for one, other in zip(
        course(ours, prompt=60, rounds=2), course(quick(model, attention=PLAN), prompt=60, rounds=2), strict=True
    ):
        close(one, other)
