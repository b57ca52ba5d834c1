"""A paged cache under real models: whatever is fed, truncated, kept, copied and rolled, it says what others say."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from semspec.errors import SemspecError
from semspec.model import ModelRunner
from semspec.model.graph_runner import GraphRunner
from semspec.model.kernels import reference_kernels
from semspec.model.page_pool import pages_of
from semspec.model.paged_cache import PagedCache
from semspec.types import Decode, Sampling, Score
from tests.checkpoints import FAMILIES, make_model, save
from tests.model.test_graph_runner import Rehearsed, close, text


def paged(runner: ModelRunner, graphs: bool, tokens: int | None = None) -> ModelRunner:
    twin = ModelRunner(runner.transformer, 4, runner.max_seq_len, tokens=tokens, page=8)
    if graphs:
        twin.use(GraphRunner(runner.transformer, twin.cache, reference_kernels(), Rehearsed()))
    return twin


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> ModelRunner:
    folder = save(make_model("qwen2"), tmp_path_factory.mktemp("qwen2"))
    return ModelRunner.load(folder, device="cpu", slots=4, context=90)


def feed(runner: ModelRunner, slot: int, tokens: list[int], parents: tuple[int, ...] = ()) -> torch.Tensor:
    return runner.score([Score(runner, slot, tokens, len(tokens), parents=parents)])[0].logits


@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_scores_and_writes_the_same(family: str, graphs: bool, tmp_path: Path) -> None:
    plain = ModelRunner.load(save(make_model(family), tmp_path), device="cpu", slots=4, context=90)
    twin = paged(plain, graphs)
    (a, b), (c, d) = ([r.acquire(), r.acquire()] for r in (plain, twin))
    for begin, end in pairwise([0, 7, 8, 40, 43]):
        feeds = [text(1, 63)[begin:end], text(2, 63)[begin : begin + (end - begin + 1) // 2]]
        left = plain.score([Score(plain, s, f, len(f)) for s, f in zip((a, b), feeds, strict=True)])
        right = twin.score([Score(twin, s, f, len(f)) for s, f in zip((c, d), feeds, strict=True)])
        for ours, theirs in zip(right, left, strict=True):
            close(ours.logits, theirs.logits)
    request = Decode(plain, a, [5, 6], 30, Sampling(1.0, seed=3), 8)
    (theirs,), (ours,) = plain.decode([request]), twin.decode([replace(request, runner=twin, slot=c)])
    assert ours.tokens == theirs.tokens and twin.length(c) == plain.length(a)


@pytest.mark.parametrize("graphs", [False, True])
def test_copies_share_pages_until_one_of_them_writes(plain: ModelRunner, graphs: bool) -> None:
    twin = paged(plain, graphs)
    assert isinstance(twin.cache, PagedCache)
    for runner in (plain, twin):
        one, two = runner.acquire(), runner.acquire()
        feed(runner, one, text(1, 30))
        runner.copy(one, two, 21)
    cache = twin.cache
    assert cache.blocks.tables[one][:3] == cache.blocks.tables[two] and len(cache.blocks.tables[one]) == 4
    for slot, tokens in ((two, [3, 4]), (one, [5]), (two, text(2, 20))):
        close(feed(twin, slot, tokens), feed(plain, slot, tokens))
    assert cache.blocks.tables[one][:2] == cache.blocks.tables[two][:2], "what both begin with is still one"
    assert cache.blocks.tables[one][2] != cache.blocks.tables[two][2]
    for runner in (plain, twin):
        runner.truncate(one, 18)
        runner.release(two)
    close(feed(twin, one, text(3, 9)), feed(plain, one, text(3, 9)))
    for runner in (plain, twin):
        runner.release(one)
    assert cache.blocks.free == cache.blocks.blocks, "no page is lost"


def test_of_a_tree_the_accepted_path_is_kept(plain: ModelRunner) -> None:
    twin = paged(plain, graphs=True)
    slots = {}
    for runner in (plain, twin):
        slots[runner] = slot = runner.acquire()
        feed(runner, slot, text(1, 14))
        feed(runner, slot, [3, 4, 5, 6], parents=(-1, 0, 0, 2))
        runner.compact(slot, 14, [0, 2, 3])
    for ours, theirs in zip(
        twin.cache.between(slots[twin], 3, 17), plain.cache.between(slots[plain], 3, 17), strict=True
    ):
        close(ours, theirs)
    close(feed(twin, slots[twin], [7, 8]), feed(plain, slots[plain], [7, 8]))
    plain.release(slots[plain])


def test_a_pool_that_is_empty_says_so_and_loses_nothing(plain: ModelRunner) -> None:
    twin = paged(plain, graphs=True, tokens=120)
    one, two = twin.acquire(), twin.acquire()
    feed(twin, one, text(1, 60))
    assert not twin.cache.lacks_room([(two, 48)]) and twin.cache.lacks_room([(one, 8), (two, 48)])
    with pytest.raises(SemspecError, match="the cache is full: of its 15 pages of 8 tokens"):
        feed(twin, two, text(2, 70))
    assert twin.length(two) == 0
    twin.truncate(one, 12)
    assert not twin.cache.lacks_room([(two, 90)]), "pages that a truncated slot kept are given back"
    feed(twin, two, text(2, 90))


def test_there_is_always_room_for_one_sequence() -> None:
    assert pages_of(tokens=0, slots=4, capacity=90, page=8) == 13, "one more than it needs, to copy a shared page"
    assert pages_of(tokens=4000, slots=4, capacity=90, page=8) == 500, "for texts that are remembered"
    assert pages_of(tokens=4000, slots=4, capacity=200, page=8, window=16) == pages_of(None, 4, 200, 8, 16)
    assert pages_of(tokens=None, slots=4, capacity=90, page=8) == 4 * 13
    assert pages_of(tokens=200, slots=4, capacity=90, page=8) == 25
