"""Blocks of the cache: who is chosen, by a reference in plain Python, and what is then attended to."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from semspec.errors import BadRequest
from semspec.model import ModelRunner
from semspec.model.attention_metadata import SequenceChunk
from semspec.model.cache import Cache
from semspec.sparse import AttentionPlan
from semspec.sparse.attention import SequenceBlocks, block_lists, block_scores, select_blocks
from semspec.sparse.block_statistics import BlockStatistics
from semspec.sparse.layer_ops import PlanSparsity, SparseLayerOps
from semspec.types import Decode, Sampling, Score
from tests.checkpoints import make_model, save
from tests.sparse.runners import check, course, load, read, text, with_plan

TINY = AttentionPlan(block=8, dense_below=32, rho=0.2, sinks=1, recent=1)
PAPER = AttentionPlan(block=8, dense_below=32, rho=0.2, sinks=1, recent=1, score="first")


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> ModelRunner:
    return load(save(make_model("llama3.1", num_hidden_layers=4), tmp_path_factory.mktemp("model")))


@given(st.integers(0, 9000), st.sampled_from([1, 2, 8]), st.sampled_from([0.0, 0.1, 0.5, 1.0]))
def test_the_budget_is_the_papers(length: int, heads: int, rho: float) -> None:
    plan = AttentionPlan(block=16, dense_below=256, rho=rho, sinks=1, recent=2)
    whole = length // 16 * heads
    if length < 256:
        assert plan.pairs(length, heads) == whole and not plan.sparse_at(length, heads)
    else:
        paper = math.floor((length - 256) * rho + 256) * heads / 16
        assert plan.pairs(length, heads) == min(int(paper), whole)
    if rho == 1.0:
        assert not plan.sparse_at(length, heads)


def test_blocks_that_are_always_kept_may_exceed_the_budget() -> None:
    plan = AttentionPlan(block=16, dense_below=0, rho=0.0, sinks=2, recent=3)
    assert plan.pairs(1600, 4) == 5 * 4 and plan.pairs(40, 4) == 2 * 4


@given(
    st.lists(st.tuples(st.integers(0, 9), st.integers(0, 30)), min_size=1, max_size=3), st.sampled_from([1, 3]),
    st.integers(0, 2), st.integers(0, 2), st.sampled_from(["pairs", "heads"]), st.integers(0, 99),
)  # fmt: skip
def test_the_best_pairs_are_chosen(
    sequences: list[tuple[int, int]], heads: int, sinks: int, recent: int, spread: str, seed: int
) -> None:
    plan = AttentionPlan(block=4, dense_below=0, sinks=sinks, recent=recent, spread=spread)
    most = 10
    scores = torch.randn(len(sequences), heads, most, generator=torch.Generator().manual_seed(seed))
    full = [f for f, _ in sequences]
    pairs = [min(max(n, min(sinks + recent, f) * heads), f * heads) for f, n in sequences]
    ours = select_blocks(scores, torch.tensor(full), torch.tensor(pairs), plan)
    for b, (f, n) in enumerate(zip(full, pairs, strict=True)):
        rank = {}
        for h in range(heads):
            for i in range(f):
                fixed = i < sinks or i >= f - recent
                rank[h, i] = math.inf if fixed else float(scores[b, h, i])
        if spread == "pairs":
            best = set(sorted(rank, key=lambda p: -rank[p])[:n])
        else:
            of_head = {h: sorted((p for p in rank if p[0] == h), key=lambda p: -rank[p]) for h in range(heads)}
            best = {p for h in range(heads) for p in of_head[h][: n // heads]}
        assert {tuple(p) for p in ours[b].nonzero().tolist()} == best
    lists, counts = block_lists(ours)
    for b in range(len(full)):
        for h in range(heads):
            assert lists[b, h, : counts[b, h]].tolist() == ours[b, h].nonzero()[:, 0].tolist()


def test_the_papers_score_is_the_mean_of_products() -> None:
    """s = (1/B) sum of q . k, with the first token's queries of a group averaged."""
    q, keys = torch.randn(1, 5, 6, 8), torch.randn(1, 2, 3, 4, 8)  # three query heads a key head; three blocks of four
    ours = block_scores(q, keys.mean(3), torch.tensor([3]), PAPER, 0.3)
    for h in range(2):
        for b in range(3):
            products = [float(q[0, 0, 3 * h + g] @ keys[0, h, b, i]) for g in range(3) for i in range(4)]
            assert float(ours[0, h, b]) == pytest.approx(sum(products) / 12, abs=1e-5)


@pytest.mark.parametrize("score", ["share", "reach"])
def test_a_share_is_the_most_that_any_query_would_give(score: str) -> None:
    q, means, wide = torch.randn(2, 5, 6, 8), torch.randn(2, 2, 4, 8), torch.rand(2, 2, 4, 8)
    full, counts, plan = [3, 4], [5, 2], AttentionPlan(block=8, score=score)
    ours = block_scores(q, means, torch.tensor(full), plan, 0.3, torch.tensor(counts), wide)

    def product(one: torch.Tensor, i: int, h: int, b: int) -> float:
        above = math.sqrt(sum(float(x) ** 2 * float(w) for x, w in zip(one, wide[i, h, b], strict=True)))
        return float(one @ means[i, h, b]) + (2 * above if score == "reach" else 0.0)

    for i in range(2):
        for h in range(2):
            shares = []
            for t in range(counts[i]):
                for g in range(3):
                    weights = [math.exp(0.3 * product(q[i, t, 3 * h + g], i, h, b)) for b in range(full[i])]
                    shares.append([w / sum(weights) for w in weights])
            for b in range(full[i]):
                assert float(ours[i, h, b]) == pytest.approx(max(s[b] for s in shares), abs=1e-5)


def test_a_block_with_the_one_key_that_is_looked_for_is_found_by_its_reach() -> None:
    """A mean of sixteen keys hides it: other blocks have better means, and none has a key that is nearly as good."""
    torch.manual_seed(1)
    keys = 0.3 * torch.randn(1, 40, 16, 32)
    looked_for = torch.randn(32)
    keys += 0.1 * looked_for
    keys[0, 25] -= 0.2 * looked_for
    keys[0, 25, 7] = 1.5 * looked_for
    q = looked_for.expand(1, 1, 1, 32).clone()
    best = {}
    for score in ("share", "reach"):
        plan = AttentionPlan(block=16, score=score)
        means, wide = keys.mean(2)[None], keys.var(2, correction=0)[None]
        scores = block_scores(q, means, torch.tensor([40]), plan, 0.2, variances=wide)
        best[score] = scores[0, 0].argsort(descending=True).tolist().index(25)
    assert best["reach"] == 0 and best["share"] > 4
    exact = ((keys[0] @ looked_for) * 0.2).flatten().softmax(0).unflatten(0, (40, 16)).sum(1)
    assert int(exact.argmax()) == 25 and float(exact[25]) > 0.4, "it is where the attention is"


@given(st.lists(st.tuples(st.integers(0, 40), st.integers(1, 30), st.booleans()), min_size=1, max_size=12))
def test_means_follow_the_cache(moves: list[tuple[int, int, bool]]) -> None:
    """Whatever is fed and taken back, and whenever means are asked for, they are those of what is in the cache."""

    class Shape:
        num_layers, kv_heads, head_dim = 2, 2, 4

    cache = Cache(Shape(), 2, 400, torch.device("cpu"), torch.float32)  # type: ignore[arg-type]
    means = BlockStatistics(cache, 8, values=True, variances=True)
    slot = cache.acquire()
    for back, more, asks in moves:
        cache.truncate(slot, max(0, cache.lengths[slot] - back))
        (start,) = cache.extend([(slot, more)])
        for half in (cache.keys, cache.values):
            half[:, slot, :, start : start + more] = torch.randn(2, 2, more, 4)
        if asks:
            length = cache.lengths[slot]
            means.update(slot, length)
            full = length // 8
            for half, made in ((cache.keys, means.keys), (cache.values, means.values)):
                exact = half[:, slot, :, : full * 8].unflatten(2, (full, 8)).mean(3)
                torch.testing.assert_close(made[:, slot, :, :full], exact)
            blocks = cache.keys[:, slot, :, : full * 8].unflatten(2, (full, 8))
            exact = (blocks - blocks.mean(3, keepdim=True)).square().mean(3)
            torch.testing.assert_close(means.variances[:, slot, :, :full], exact)
    cache.release(slot)
    again = cache.acquire()
    cache.extend([(again, 40)])
    cache.keys[:, again, :, :40] = 7.0
    means.update(again, 40)
    assert (means.keys[:, again, :, :5] == 7.0).all(), "a slot's next owner was shown another's means"


# -- exactness


@pytest.mark.parametrize(
    "plan",
    [
        None,
        AttentionPlan(block=8, dense_below=0, rho=1.0),
        AttentionPlan(block=8, dense_below=10_000, rho=0.0),
        AttentionPlan(block=8, dense_below=0, rho=1.0, anchors=(0, 2)),
        AttentionPlan(block=1000, dense_below=0, rho=0.0),
    ],
)
def test_off_or_with_a_full_budget_it_is_dense_to_the_last_bit(runner: ModelRunner, plan: AttentionPlan | None) -> None:
    for ours, dense in zip(course(with_plan(runner, attention=plan)), course(runner), strict=True):
        assert torch.equal(ours, dense)


def test_the_sparse_way_over_all_blocks_is_the_dense_one(runner: ModelRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not by a short cut: blocks are scored, listed, gathered and masked, and all of them are chosen."""
    monkeypatch.setattr(PlanSparsity, "attends_sparsely", lambda self, start: self.statistics is not None)
    passes: list[SparseLayerOps] = []
    made = SparseLayerOps.__init__
    monkeypatch.setattr(SparseLayerOps, "__init__", lambda self, *a: (passes.append(self), made(self, *a))[1])
    ours = course(with_plan(runner, attention=AttentionPlan(block=8, dense_below=0, rho=1.0)))
    for one, dense in zip(ours, course(runner), strict=True):
        assert torch.equal(one, dense)
    assert len(passes) == 5 and all(ops._blocks for ops in passes)


def test_half_a_budget_is_not_dense(runner: ModelRunner) -> None:
    ours, dense = course(with_plan(runner, attention=TINY)), course(runner)
    assert all(not torch.equal(a, b) for a, b in zip(ours, dense, strict=True))


def test_reading_and_writing_stay_dense(runner: ModelRunner) -> None:
    sparse = with_plan(runner, attention=TINY)
    for one in (sparse, runner):
        read(one, one.acquire(), text(1, 150))
    slot = 0
    ours, dense = (
        [
            one.score([Score(one, slot, text(2, 40), 1)])[0].logits,
            one.score([Score(one, slot, text(3, 1), 1)])[0].logits,
            torch.tensor(one.decode([Decode(one, slot, [5], 6, Sampling(), 0)])[0].tokens),
        ]
        for one in (sparse, runner)
    )
    assert sparse.length(0) == 197
    runner.release(0)
    assert all(torch.equal(a, b) for a, b in zip(ours, dense, strict=True))
    assert torch.equal(sparse.cache.keys[:, 0, :, :197], runner.cache.keys[:, 0, :, :197])


# -- what is attended to


def test_a_draft_after_a_prompt_is_checked_as_any_other(runner: ModelRunner) -> None:
    """However the prompt was cut into passes."""
    words, found = text(1, 106), []
    for pieces in ([], [50], [99, 1], [100]):
        sparse = with_plan(runner, attention=TINY)
        slot, at = sparse.acquire(), 0
        for piece in pieces:
            read(sparse, slot, words[at : at + piece])
            at += piece
        found.append(sparse.score([Score(sparse, slot, words[at:], 6, (1,))])[0])
    for one in found:
        torch.testing.assert_close(one.logits, found[0].logits, atol=1e-4, rtol=1e-4)
        assert one.logits.shape[0] == one.hidden[1].shape[0] == 6
    assert not torch.allclose(found[0].logits, runner.score([Score(runner, runner.acquire(), words, 6)])[0].logits)
    runner.release(0)


def test_only_the_chosen_blocks_are_read(runner: ModelRunner) -> None:
    """Keys and values of blocks that were not chosen may hold anything."""
    plan = AttentionPlan(block=8, dense_below=0, rho=0.25, sinks=1, recent=1, anchors=(0,))
    seen: list[SequenceBlocks] = []
    sparse = with_plan(runner, attention=plan)
    slot = sparse.acquire()
    read(sparse, slot, text(1, 100))
    before = check(sparse, slot, text(2, 5))
    sparse.truncate(slot, 100)
    ops = sparse.sparsity.layer_ops([Score(sparse, slot, text(2, 5), 5)], [SequenceChunk(slot, 100, 5)])
    assert isinstance(ops, SparseLayerOps)
    original = ops._select

    def watched(layer: int, place: int, q: torch.Tensor) -> SequenceBlocks:
        seen.append(original(layer, place, q))
        return seen[-1]

    ops._select = watched  # type: ignore[method-assign]
    sparse.sparsity.layer_ops = lambda requests, spans: ops  # type: ignore[method-assign]
    assert torch.equal(check(sparse, slot, text(2, 5)), before)
    sparse.truncate(slot, 100)
    ((lists, counts, others),) = seen
    assert others is None
    assert int(counts.sum()) == plan.pairs(100, 2) == 6
    for head in range(2):
        kept = set(lists[head, : counts[head]].tolist())
        assert {0, 11} <= kept, "the first and the latest block"
        for block in set(range(12)) - kept:
            sparse.cache.values[:, slot, head, block * 8 : block * 8 + 8] = float("nan")
            sparse.cache.keys[:, slot, head, block * 8 : block * 8 + 8] = float("nan")
    assert torch.equal(check(sparse, slot, text(2, 5)), before)


@pytest.mark.parametrize("score", ["first", "share", "reach"])
def test_one_layer_against_attention_written_out(runner: ModelRunner, score: str) -> None:
    """Queries see the chosen blocks, what is behind the last whole block, and of the draft what is before them."""
    plan = AttentionPlan(block=8, dense_below=0, rho=0.3, sinks=1, recent=0, score=score)
    sparse = with_plan(runner, attention=plan)
    slot, start, n = sparse.acquire(), 61, 4
    sparse.cache.extend([(slot, start)])
    keys, values = torch.randn(2, 2, start + n, 16)
    sparse.cache.keys[1, slot, :, :start] = keys[:, :start]
    q = torch.randn(4, n, 16)
    span = SequenceChunk(slot, start, n)
    ops = sparse.sparsity.layer_ops([Score(sparse, slot, [1] * n, n)], [span])
    ours = ops.attend(1, 0, q, keys, values, None, 0.3)
    blocks = keys[None, :, :56].unflatten(2, (7, 8))
    means, wide = blocks.mean(3), blocks.var(3, correction=0)
    scale = sparse.shape.attention_scale
    scores = block_scores(q.transpose(0, 1)[None], means, torch.tensor([7]), plan, scale, variances=wide)
    chosen = select_blocks(scores, torch.tensor([7]), torch.tensor([plan.pairs(start, 2)]), plan)[0]
    for head in range(4):
        kv = head // 2
        for i in range(n):
            sees = [p for p in range(start + i + 1) if p >= 56 or chosen[kv, p // 8]]
            weights = F.softmax(torch.tensor([float(q[head, i] @ keys[kv, p]) * 0.3 for p in sees]), 0)
            exact = sum(w * values[kv, p] for w, p in zip(weights, sees, strict=True))
            torch.testing.assert_close(ours[head, i], exact, atol=1e-5, rtol=1e-4)


def test_layers_that_are_no_anchors_do_not_select(runner: ModelRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    chose: list[int] = []
    original = SparseLayerOps._select
    monkeypatch.setattr(SparseLayerOps, "_select", lambda self, i, p, q: (chose.append(i), original(self, i, p, q))[1])
    for anchors, expected in (((0, 2), [0, 2]), ((3,), [0, 3]), (None, [0, 1, 2, 3])):
        sparse = with_plan(runner, attention=AttentionPlan(block=8, dense_below=32, rho=0.1, anchors=anchors))
        course(sparse, rounds=1)
        assert chose == expected
        chose.clear()


def test_layers_with_a_window_stay_as_they_are(tmp_path: Path) -> None:
    model = load(save(make_model("mistral"), tmp_path / "window"))
    for ours, dense in zip(course(with_plan(model, attention=TINY)), course(model), strict=True):
        assert torch.equal(ours, dense)
    mixed = load(save(make_model("gemma3"), tmp_path / "mixed"))
    sparse = with_plan(mixed, attention=TINY)
    assert sparse.sparsity.full_layers == {1} == sparse.sparsity.anchors
    assert not torch.equal(course(sparse)[0], course(mixed)[0])


def test_a_batch_equals_each_alone(runner: ModelRunner) -> None:
    """Checks of several lengths, one of them short and dense, a prompt and a single token, in one pass."""
    lengths = [200, 20, 97, 150, 60]
    feeds = [(text(10, 6), 6), (text(11, 3), 3), (text(12, 9), 9), (text(13, 30), 0), (text(14, 1), 1)]
    alone = []
    for i, (length, (tokens, keep)) in enumerate(zip(lengths, feeds, strict=True)):
        sparse = with_plan(runner, attention=TINY)
        slot = sparse.acquire()
        read(sparse, slot, text(i, length))
        alone.append(sparse.score([Score(sparse, slot, tokens, keep)])[0].logits)
    sparse = with_plan(runner, slots=5, attention=TINY)
    slots = [sparse.acquire() for _ in lengths]
    for i, (slot, length) in enumerate(zip(slots, lengths, strict=True)):
        read(sparse, slot, text(i, length))
    together = sparse.score([Score(sparse, s, tokens, keep) for s, (tokens, keep) in zip(slots, feeds, strict=True)])
    for ours, single in zip(together, alone, strict=True):
        torch.testing.assert_close(ours.logits, single, atol=1e-3, rtol=1e-4)


@pytest.mark.parametrize(
    "wrong",
    [
        {"block": 0},
        {"rho": 1.5},
        {"rho": -0.1},
        {"spread": "wide"},
        {"score": "mean"},
        {"rest": "some"},
        {"anchors": (2, 1)},
        {"anchors": ()},
    ],
)
def test_impossible_plans_are_refused(wrong: dict) -> None:
    with pytest.raises(BadRequest):
        AttentionPlan(**wrong)
