"""Triton's attention to chosen blocks and to the means of the others; without a GPU in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

pytest.importorskip("triton", reason="Triton is not installed (it is for Linux only)")

from semspec.model import ModelRunner
from semspec.model.graphs import NoGraphs
from semspec.model.kernels import BlockMeans, SelectedBlocks, attention, reference, triton_kernels
from semspec.model.kernels.select_blocks import choose_blocks
from semspec.model.kernels.tiles import Tiles
from semspec.sparse import AttentionPlan
from semspec.sparse.attention import block_lists, block_scores, select_blocks
from semspec.types import Score
from tests.checkpoints import make_model, save
from tests.model.test_graph_runner import close as near
from tests.model.test_kernels import DEVICE, any_tree, close, few, multiplied, noise, passes, random, whole
from tests.sparse.runners import course, load, read, text, with_plan
from tests.sparse.test_graph_runner import quick


@given(
    passes(150), multiplied, st.sampled_from([1, 4, 16, 24]), st.floats(0, 1), st.booleans(),
    st.sampled_from([1, 2, 8]), st.sampled_from([16, 32]),
)  # fmt: skip
@few
def test_attention_to_chosen_blocks_and_means_of_the_others(
    case: dict, dtype: torch.dtype, span: int, share: float, tree: bool, splits: int, keys: int
) -> None:
    """Splits that have means and no places, places and no means, neither. Of blocks that are not chosen only the means
    are numbers, and of those that are chosen, or not whole yet, only keys and values."""
    generator, batch, queries = random(case["seed"]), len(case["slots"]), case["queries"]
    most = case["capacity"] // span
    q = noise((batch, queries, case["heads"], case["size"]), generator, dtype)
    cache = [noise((4, case["kv_heads"], case["capacity"], case["size"]), generator, dtype) for _ in range(2)]
    means = [noise((4, case["kv_heads"], most, case["size"]), generator, dtype) for _ in range(2)]
    places = [whole(case[name]) for name in ("slots", "starts", "counts")]
    mask = any_tree(case, generator, before=0) if tree else None
    marks = torch.rand(batch, case["kv_heads"], most, generator=generator).to(DEVICE) < share
    there = torch.arange(most, device=DEVICE) < (places[1] // span)[:, None, None]
    for b, slot in enumerate(case["slots"]):
        for half, mean in zip(cache, means, strict=True):
            blocks = half[slot, :, : most * span].unflatten(1, (most, span))
            blocks[there[b] & ~marks[b]] = float("nan")
            mean[slot][(marks | ~there)[b]] = float("nan")
    rest = BlockMeans(marks.to(torch.int8), means[0], means[1])
    chosen = SelectedBlocks(*block_lists(marks & there), span, rest)
    wide = [half.double().nan_to_num() for half in (*cache, *means)]
    exact_chosen = chosen._replace(rest=BlockMeans(rest.marks, wide[2], wide[3]))
    exact = reference.attend(q.double(), *wide[:2], *places, 0.3, None, mask, chosen=exact_chosen)
    tiles = Tiles(16, keys, splits, warps=4, stages=2)
    ours = attention.attend(q, *cache, *places, 0.3, None, mask, tiles, chosen)
    close(ours, exact, dtype)
    for b, count in enumerate(case["counts"]):
        assert not ours[b, count:].any(), "rows behind a sequence's queries are zero"


@pytest.mark.parametrize("splits", [1, 4])
def test_blocks_that_are_alike_within_are_seen_exactly_by_their_means(splits: int) -> None:
    """Then any choice is as good as all of the cache: the kernel against itself."""
    span, tiles = 8, Tiles(16, 16, splits, warps=4, stages=2)
    q, keys, values = (noise(size, random(3), torch.float32) for size in [(2, 5, 4, 16), *[(2, 2, 96, 16)] * 2])
    places = [whole([1, 0]), whole([90, 47]), whole([5, 2])]
    for half in (keys, values):
        for slot, start in ((1, 88), (0, 40)):
            half[slot, :, :start] = half[slot, :, :start:span].repeat_interleave(span, 1)
    dense = attention.attend(q, keys, values, *places, 0.3, tiles=tiles)
    there = torch.arange(12, device=DEVICE) < (places[1] // span)[:, None, None]
    means = [half.unflatten(2, (12, span)).mean(3) for half in (keys, values)]
    for share in (0.0, 0.3, 1.0):
        marks = (torch.rand(2, 2, 12, generator=random(4)).to(DEVICE) < share) & there
        chosen = SelectedBlocks(*block_lists(marks), span, BlockMeans(marks.to(torch.int8), means[0], means[1]))
        ours = attention.attend(q, keys, values, *places, 0.3, tiles=tiles, chosen=chosen)
        torch.testing.assert_close(ours, dense, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(("score", "spread"), [("share", "pairs"), ("first", "heads")])
def test_what_was_chosen_is_marked(score: str, spread: str) -> None:
    """Of a ragged batch, in parts that are smaller than a head's blocks; what is no whole block is left alone."""
    plan = AttentionPlan(4, 0, sinks=1, recent=1, score=score, spread=spread)
    q, means = (noise(size, random(5), torch.float32) for size in [(3, 3, 4, 8), (3, 2, 40, 8)])
    slots, starts, counts, pairs = whole([2, 0, 1]), whole([157, 30, 0]), whole([3, 2, 0]), whole([31, 14, 0])
    marks = torch.full((3, 2, 40), 7, dtype=torch.int8, device=DEVICE)
    rule = (4, (1, 1), 0.5, score == "share", spread == "heads")
    lists, numbers = choose_blocks(q, means, slots, starts, counts, pairs, *rule, cut=(16, 32, 16), marks=marks)
    full = starts // 4
    exact = select_blocks(block_scores(q, means[slots], full, plan, 0.5, counts), full, pairs, plan)
    there = (torch.arange(40, device=DEVICE) < full[:, None, None]).expand_as(marks)
    assert torch.equal(marks[there] != 0, exact[there]) and (marks[~there] == 7).all() and marks[there].max() == 1
    again = choose_blocks(q, means, slots, starts, counts, pairs, *rule, cut=(16, 32, 16))
    for b in range(3):
        for h in range(2):
            n = int(numbers[b, h])
            assert n == again[1][b, h] and torch.equal(lists[b, h, :n], again[0][b, h, :n])


# -- whole passes

PLAN = AttentionPlan(block=8, dense_below=32, rho=0.2, sinks=1, recent=1, anchors=(0,), rest="mean")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ModelRunner:
    return load(save(make_model("llama3.1", num_hidden_layers=2), tmp_path_factory.mktemp("model")))


def ways(model: ModelRunner, plan: AttentionPlan, refresh: int = 0) -> list[ModelRunner]:
    """One operation at a time; fused, with the kernels' references; and with Triton's."""
    fused = [quick(model, kernels, attention=plan, refresh=refresh) for kernels in (None, triton_kernels())]
    fused[1].graph_runner.launcher = NoGraphs()
    return [with_plan(model, attention=plan, refresh=refresh), *fused]


@pytest.mark.parametrize(("score", "spread"), [("share", "pairs"), ("first", "heads")])
def test_checks_are_the_same_every_way(model: ModelRunner, score: str, spread: str) -> None:
    """Drafts that fill blocks and are taken back again, and dense passes in between that write them anew."""
    plan = AttentionPlan(8, 16, 0.2, 1, 1, score, spread, anchors=(0,), rest="mean")
    exact, *others = (course(one, prompt=60, rounds=4) for one in ways(model, plan, refresh=2))
    for ours in others:
        for mine, theirs in zip(ours, exact, strict=True):
            near(mine, theirs)


def test_a_batch_of_all_kinds_is_the_same_every_way(model: ModelRunner) -> None:
    """Long and short, checks, a prompt and a single token. A slot's means may be those of whoever had it before."""
    lengths, feeds = [200, 20, 97, 60], [(text(10, 6), 6), (text(11, 3), 3), (text(12, 30), 9), (text(14, 1), 1)]
    said: list[list[Tensor]] = []
    for one in ways(model, PLAN):
        slots = [one.acquire() for _ in lengths]
        for slot in slots:
            read(one, slot, text(7, 90))
        one.score([Score(one, slot, text(8, 4), 4) for slot in slots])
        for slot in slots:
            one.truncate(slot, 0)
        for i, (slot, length) in enumerate(zip(slots, lengths, strict=True)):
            read(one, slot, text(i, length))
        said.append([r.logits for r in one.score([Score(one, s, *f) for s, f in zip(slots, feeds, strict=True)])])
    for ours in said[1:]:
        for mine, theirs in zip(ours, said[0], strict=True):
            near(mine, theirs)
