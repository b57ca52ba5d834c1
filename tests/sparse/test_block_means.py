"""Blocks that are not read, seen by their means: against attention written out, and where that is exact."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from semspec.model import ModelRunner
from semspec.model.attention_metadata import SequenceChunk
from semspec.model.kernels import BlockMeans, SelectedBlocks, reference
from semspec.model.layer_ops import DENSE
from semspec.sparse import AttentionPlan
from semspec.sparse.attention import block_lists, block_scores, select_blocks
from semspec.sparse.layer_ops import PlanSparsity, SparseLayerOps
from semspec.types import Score
from tests.checkpoints import make_model, save
from tests.sparse.runners import check, course, load, read, text, with_plan

BLOCK, HEADS, GROUP, SIZE = 8, 2, 2, 16
PLAN = AttentionPlan(block=BLOCK, dense_below=32, rho=0.2, sinks=1, recent=1, rest="mean")
rules = pytest.mark.parametrize(("score", "spread"), [("share", "pairs"), ("first", "heads"), ("reach", "heads")])


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> ModelRunner:
    return load(save(make_model("llama3.1", num_hidden_layers=4), tmp_path_factory.mktemp("model")))


def written_out(
    q: Tensor, keys: Tensor, values: Tensor, start: int, chosen: Tensor, scale: float, counted: float = BLOCK
) -> Tensor:
    """q [heads, n, d], keys and values [kv heads, start + n, d], chosen [kv heads, whole blocks] -> [heads, n, d], one
    number after the other. A block that was not chosen is `counted` places, all at its mean."""
    out = torch.zeros_like(q, dtype=torch.float64)
    for head in range(q.shape[0]):
        kv = head // (q.shape[0] // keys.shape[0])
        for i in range(q.shape[1]):
            terms = []  # (weight, value)
            for p in range(start + i + 1):
                if p >= start // BLOCK * BLOCK or chosen[kv, p // BLOCK]:
                    logit = scale * sum(a * b for a, b in zip(q[head, i].tolist(), keys[kv, p].tolist(), strict=True))
                    terms.append((math.exp(logit), values[kv, p].double()))
            for b in range(start // BLOCK):
                if not chosen[kv, b]:
                    places = slice(b * BLOCK, (b + 1) * BLOCK)
                    logit = scale * float(q[head, i].double() @ keys[kv, places].double().mean(0))
                    terms.append((counted * math.exp(logit), values[kv, places].double().mean(0)))
            whole = sum(w for w, _ in terms)
            out[head, i] = sum((w / whole * v for w, v in terms), torch.zeros(q.shape[2], dtype=torch.float64))
    return out


def one_layer(
    runner: ModelRunner, plan: AttentionPlan, q: Tensor, keys: Tensor, values: Tensor, layers: tuple[int, ...] = (1,)
) -> Tensor:
    """Attention of the last of `layers` by a plan, over keys and values that all of them have."""
    n = q.shape[1]
    start = keys.shape[1] - n
    sparse = with_plan(runner, attention=plan)
    slot = sparse.acquire()
    sparse.cache.extend([(slot, start)])
    for layer in layers:
        sparse.cache.keys[layer, slot, :, :start] = keys[:, :start]
        sparse.cache.values[layer, slot, :, :start] = values[:, :start]
    ops = sparse.sparsity.layer_ops([Score(sparse, slot, [1] * n, n)], [SequenceChunk(slot, start, n)])
    return [ops.attend(layer, 0, q, keys, values, None, 0.3) for layer in layers][-1]


def chosen_by(plan: AttentionPlan, q: Tensor, keys: Tensor, start: int, scale: float) -> Tensor:
    full = start // BLOCK
    blocks = keys[None, :, : full * BLOCK].unflatten(2, (full, BLOCK))
    wide = blocks.var(3, correction=0)
    scores = block_scores(
        q.transpose(0, 1)[None], blocks.mean(3), torch.tensor([full]), plan, scale, variances=wide
    )  # fmt: skip
    return select_blocks(scores, torch.tensor([full]), torch.tensor([plan.pairs(start, HEADS)]), plan)[0]


@rules
@pytest.mark.parametrize("start", [61, 64])
def test_one_layer_against_attention_written_out(runner: ModelRunner, score: str, spread: str, start: int) -> None:
    plan = AttentionPlan(BLOCK, dense_below=0, rho=0.3, sinks=1, recent=0, score=score, spread=spread, rest="mean")
    q, (keys, values) = torch.randn(HEADS * GROUP, 4, SIZE), torch.randn(2, HEADS, start + 4, SIZE)
    ours = one_layer(runner, plan, q, keys, values)
    chosen = chosen_by(plan, q, keys, start, runner.shape.attention_scale)
    exact = written_out(q, keys, values, start, chosen, 0.3)
    torch.testing.assert_close(ours.double(), exact, atol=1e-5, rtol=1e-4)
    forgotten = written_out(q, keys, values, start, chosen, 0.3, counted=1)
    assert not torch.allclose(ours.double(), forgotten, atol=1e-2), "a mean that counts once is found out"
    nothing = one_layer(runner, replace(plan, rest="nothing"), q, keys, values)
    torch.testing.assert_close(
        nothing.double(), written_out(q, keys, values, start, chosen, 0.3, counted=0), atol=1e-5, rtol=1e-4
    )


@given(
    st.integers(16, 150), st.integers(2, 6), st.sampled_from([0.0, 0.2, 0.7]), st.sampled_from(["pairs", "heads"]),
    st.sampled_from(["first", "share"]), st.integers(0, 99),
)  # fmt: skip
@settings(max_examples=30)
def test_blocks_that_are_alike_within_are_seen_exactly_by_any_budget(
    runner: ModelRunner, start: int, n: int, rho: float, spread: str, score: str, seed: int
) -> None:
    """One key and one value for a whole block: its mean is all there is to know, and what is left out is no matter."""
    generator = torch.Generator().manual_seed(seed)
    plan = AttentionPlan(BLOCK, dense_below=0, rho=rho, sinks=0, recent=0, score=score, spread=spread, rest="mean")
    keys, values = torch.randn(2, HEADS, start + n, SIZE, generator=generator)
    tail = start // BLOCK * BLOCK
    for half in (keys, values):
        half[:, :tail] = half[:, :tail:BLOCK].repeat_interleave(BLOCK, 1)
    q = torch.randn(HEADS * GROUP, n, SIZE, generator=generator)
    places = torch.arange(start + n)
    dense = DENSE.attend(1, 0, q, keys, values, places <= places[start:, None], 0.3)
    torch.testing.assert_close(one_layer(runner, plan, q, keys, values), dense, atol=1e-5, rtol=1e-4)
    nothing = one_layer(runner, replace(plan, rest="nothing"), q, keys, values)
    assert rho > 0.5 or not torch.allclose(nothing, dense, atol=1e-3), "without them it does"


def test_who_looks_at_everything_alike_sees_exactly_the_mean_of_all(runner: ModelRunner) -> None:
    """Queries of zero: whatever keys and values are, a softmax over means that count as their blocks do is flat."""
    plan = AttentionPlan(BLOCK, dense_below=0, rho=0.2, sinks=0, recent=0, rest="mean")
    keys, values = torch.randn(2, HEADS, 93, SIZE)
    ours = one_layer(runner, plan, torch.zeros(HEADS * GROUP, 3, SIZE), keys, values)
    for i in range(3):
        exact = values[:, : 91 + i].mean(1).repeat_interleave(GROUP, 0)
        torch.testing.assert_close(ours[:, i], exact, atol=1e-5, rtol=1e-4)


def test_layers_that_take_over_a_choice_have_means_of_their_own(runner: ModelRunner) -> None:
    plan = AttentionPlan(BLOCK, dense_below=0, rho=0.3, sinks=1, recent=0, rest="mean", anchors=(0,))
    start, n = 61, 4
    q, other_q = torch.randn(2, HEADS * GROUP, n, SIZE)
    (keys, values), (other_keys, other_values) = torch.randn(2, 2, HEADS, start + n, SIZE)
    sparse = with_plan(runner, attention=plan)
    slot = sparse.acquire()
    sparse.cache.extend([(slot, start)])
    for layer, halves in ((0, (other_keys, other_values)), (2, (keys, values))):
        for cached, half in zip((sparse.cache.keys, sparse.cache.values), halves, strict=True):
            cached[layer, slot, :, :start] = half[:, :start]
    ops = sparse.sparsity.layer_ops([Score(sparse, slot, [1] * n, n)], [SequenceChunk(slot, start, n)])
    ops.attend(0, 0, other_q, other_keys, other_values, None, 0.3)
    ours = ops.attend(2, 0, q, keys, values, None, 0.3)
    chosen = chosen_by(plan, other_q, other_keys, start, runner.shape.attention_scale)
    exact = written_out(q, keys, values, start, chosen, 0.3)
    torch.testing.assert_close(ours.double(), exact, atol=1e-5, rtol=1e-4)


# -- whole passes


@pytest.mark.parametrize("anchors", [None, (0, 2)])
def test_with_a_full_budget_it_is_dense_to_the_last_bit(
    runner: ModelRunner, anchors: tuple[int, ...] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also when blocks are scored, gathered and masked, and all of them are chosen."""
    plan = AttentionPlan(BLOCK, dense_below=0, rho=1.0, rest="mean", anchors=anchors)
    dense = course(runner)
    assert all(torch.equal(a, b) for a, b in zip(course(with_plan(runner, attention=plan)), dense, strict=True))
    monkeypatch.setattr(PlanSparsity, "attends_sparsely", lambda self, start: self.statistics is not None)
    passes: list[SparseLayerOps] = []
    made = SparseLayerOps.__init__
    monkeypatch.setattr(SparseLayerOps, "__init__", lambda self, *a: (passes.append(self), made(self, *a))[1])
    assert all(torch.equal(a, b) for a, b in zip(course(with_plan(runner, attention=plan)), dense, strict=True))
    assert len(passes) == 5 and all(ops._blocks for ops in passes)


def test_mean_values_are_kept_only_for_plans_that_want_them(runner: ModelRunner) -> None:
    for rest in ("nothing", "mean"):
        means = with_plan(runner, attention=replace(PLAN, rest=rest)).sparsity.statistics
        assert (means.values is not None) == (rest == "mean")


def test_blocks_that_were_taken_back_and_written_anew(runner: ModelRunner) -> None:
    """A slot whose blocks held something else before, and were looked at then, against a fresh one."""
    sparse, fresh = with_plan(runner, attention=PLAN), with_plan(runner, attention=PLAN)
    slot = sparse.acquire()
    read(sparse, slot, text(1, 180))
    check(sparse, slot, text(2, 6))
    sparse.truncate(slot, 75)
    read(sparse, slot, text(3, 80))
    other = fresh.acquire()
    read(fresh, other, text(1, 180)[:75])
    read(fresh, other, text(3, 80))
    ours, theirs = (check(one, s, text(4, 5)) for one, s in ((sparse, slot), (fresh, other)))
    torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)


@rules
def test_neither_the_batch_nor_the_cuts_of_a_prompt_matter(runner: ModelRunner, score: str, spread: str) -> None:
    plan = replace(PLAN, score=score, spread=spread, anchors=(0, 2))
    lengths, drafts = [200, 20, 97], [text(10, 6), text(11, 3), text(12, 9)]
    together = with_plan(runner, attention=plan)
    slots = [together.acquire() for _ in lengths]
    for i, (slot, length) in enumerate(zip(slots, lengths, strict=True)):
        read(together, slot, text(i, length))
    said = together.score([Score(together, s, d, len(d)) for s, d in zip(slots, drafts, strict=True)])
    for i, (length, draft) in enumerate(zip(lengths, drafts, strict=True)):
        for pieces in ([], [length // 3], [length - 1, 1]):
            alone = with_plan(runner, attention=plan)
            slot, words, at = alone.acquire(), [*text(i, length), *draft], 0
            for piece in pieces:
                read(alone, slot, words[at : at + piece])
                at += piece
            (single,) = alone.score([Score(alone, slot, words[at:], len(draft))])
            torch.testing.assert_close(said[i].logits, single.logits, atol=1e-3, rtol=1e-4)


def test_dense_passes_of_the_guard_make_means_anew(runner: ModelRunner) -> None:
    """After a refresh the means are those of what the dense pass wrote."""
    sparse = with_plan(runner, attention=PLAN, refresh=1)
    slot = sparse.acquire()
    read(sparse, slot, text(1, 100))
    for i in range(5):
        check(sparse, slot, text(2 + i, 9))
    assert len(sparse.sparsity.refresh.errors) == 2
    means, full = sparse.sparsity.statistics, sparse.length(slot) // BLOCK
    means.update(slot, sparse.length(slot))
    for made, half in ((means.keys, sparse.cache.keys), (means.values, sparse.cache.values)):
        exact = half[:, slot, :, : full * BLOCK].unflatten(2, (full, BLOCK)).mean(3)
        torch.testing.assert_close(made[:, slot, :, :full], exact)


# -- the reference of the kernels


def test_the_kernels_reference_is_attention_written_out() -> None:
    start, n = 45, 3
    q, (keys, values) = torch.randn(1, n, HEADS * GROUP, SIZE), torch.randn(2, 2, HEADS, 64, SIZE)
    marks = (torch.rand(1, HEADS, 8) < 0.4) & (torch.arange(8) < start // BLOCK)
    means = (half.unflatten(2, (8, BLOCK)).mean(3) for half in (keys, values))
    chosen = SelectedBlocks(*block_lists(marks), BLOCK, BlockMeans(marks.to(torch.int8), *means))
    places = [torch.tensor([x]) for x in (1, start, n)]
    ours = reference.attend(q, keys, values, *places, 0.3, chosen=chosen)[0].transpose(0, 1)
    exact = written_out(q[0].transpose(0, 1), keys[1, :, : start + n], values[1, :, : start + n], start, marks[0], 0.3)
    torch.testing.assert_close(ours.double(), exact, atol=1e-5, rtol=1e-4)
