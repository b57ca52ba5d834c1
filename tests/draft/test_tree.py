"""Drafts that branch, as drafters make them: the best tokens by joint probability, fixed shapes, several lookups."""

from __future__ import annotations

import heapq
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from semspec import tree
from semspec.draft import REGISTRY, ModelDrafter, NgramDrafter
from semspec.draft.tree import RANKS, TreeOptions, fixed_shape
from semspec.errors import BadRequest
from semspec.loop.executor import Executor
from semspec.loop.stats import Stats
from semspec.model import ModelRunner
from semspec.types import Acquire, Draft, Drafter, DraftRequest, Sampling
from tests.checkpoints import make_model, save
from tests.fakes import FakeRunner, chain

VOCAB = 12
CONTEXT = [3, 1, 4, 1, 5]


def draft_of(drafter: Drafter, context: list[int], request: DraftRequest) -> Draft:
    found: list[Draft] = []

    def once() -> Any:
        drafter.begin((yield Acquire(drafter.runners)))
        found.append((yield from drafter.propose(context, request)))
        drafter.close()

    executor = Executor()
    task = executor.submit(once(), Stats())
    executor.run()
    if task.error:
        raise task.error
    return found[0]


def chances(logits: list[float]) -> list[float]:
    return torch.tensor(logits).log_softmax(-1).tolist()


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 99), st.integers(1, 30), st.integers(1, 5), st.integers(1, 5))
def test_the_best_tokens_of_a_beam(seed: int, size: int, top: int, depth: int) -> None:
    """Against plain Python: each level goes on from its best tokens, and the best of all are the draft."""
    language = chain(VOCAB, seed=seed)
    drafter = ModelDrafter(FakeRunner(language, VOCAB), tree=TreeOptions(size, 0, top))
    draft = draft_of(drafter, CONTEXT, DraftRequest(depth))
    level, every = [(0.0, ())], list[tuple[float, tuple[int, ...]]]()
    for _ in range(min(depth, size)):
        grown = []
        for joint, path in level:
            row = chances(language(CONTEXT + list(path)))
            best = heapq.nlargest(top, range(VOCAB), key=lambda t, row=row: row[t])  # type: ignore[misc]
            grown += [(joint + row[token], (*path, token)) for token in best]
        every += grown
        level = heapq.nlargest(top, grown)
    wanted = {path for _, path in heapq.nlargest(size, every)}
    parents = draft.parents or tuple(range(-1, len(draft.tokens) - 1))
    found = [tuple(draft.tokens[j] for j in tree.path(parents, i)) for i in range(len(draft.tokens))]
    assert set(found) == wanted and len(found) == len(wanted)
    assert parents == (tree.preorder(parents)[1] or parents), "each token is followed by its first child"


def test_a_drafter_holds_only_the_context_afterwards_and_stays_within_its_slot() -> None:
    runner = FakeRunner(chain(VOCAB), VOCAB, max_seq_len=12)
    drafter = ModelDrafter(runner, tree=TreeOptions(20, 0, 3))
    drafter.begin([runner.acquire()])
    executor = Executor()

    def once() -> Any:
        for context in (CONTEXT, [*CONTEXT, 1, 2, 3, 4, 5, 6], [*CONTEXT, 1, 2, 3, 4, 5, 6, 7]):
            draft = yield from drafter.propose(context, DraftRequest(5))
            assert draft.tokens and runner.held[0] == context
            drafter.accept(len(context))

    task = executor.submit(once(), Stats())
    executor.run()
    assert task.error is None


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(1.0, seed=3)], ids=["likeliest", "drawn"])
def test_near_the_end_of_a_slot_paths_are_as_long_as_there_is_room_for(sampling: Sampling) -> None:
    """The draft's slot has room for some tokens of a wide tree: never for less than is fed, nor for much more."""
    levels = list[int]()
    for space in range(0, 70):
        runner = FakeRunner(chain(VOCAB), VOCAB, max_seq_len=len(CONTEXT) + space)
        drafter = ModelDrafter(runner, tree=TreeOptions(63, 0, 12))
        levels.append(draft_of(drafter, CONTEXT, DraftRequest(8, sampling)).longest)
    assert levels[0] == 1 and levels == sorted(levels), "no overflow, and more with more room"
    assert levels[63] >= 7, "no more than 63 are fed, however wide a level may be"


@pytest.mark.parametrize("size", [1, 2, 7, 20, 63])
def test_a_fixed_shape_has_the_tokens_likeliest_to_be_accepted(size: int) -> None:
    """Against all shapes' tokens, ordered: no token that was left out is likelier than one that is in."""
    top, levels = 4, 5
    parents = fixed_shape(size, levels, top)

    def rank(i: int) -> int:
        return sum(parents[j] == parents[i] for j in range(i))

    def chance(ranks: tuple[int, ...]) -> float:
        return math.prod(RANKS[min(r, len(RANKS) - 1)] for r in ranks)

    inside = {tuple(rank(j) for j in tree.path(parents, i)) for i in range(len(parents))}
    assert len(inside) == size and all(path[:-1] in inside or len(path) == 1 for path in inside)
    outside = [(*path, r) for path in [(), *inside] for r in range(top) if len(path) < levels]
    rest = [chance(path) for path in outside if path not in inside]
    assert min(map(chance, inside)) >= max(rest) - 1e-12


def test_drawn_siblings_differ_and_come_with_what_they_were_drawn_from() -> None:
    language = chain(VOCAB, seed=4)
    drafter = ModelDrafter(FakeRunner(language, VOCAB), tree=TreeOptions(20, 0, 4))
    request = DraftRequest(4, Sampling(0.8, top_k=3, seed=5), stream=9, keep_logits=True)
    draft = draft_of(drafter, CONTEXT, request)
    assert draft.parents and draft.logits is not None and len(draft.logits) == len(draft.tokens)
    for i, parent in enumerate(draft.parents):
        before = CONTEXT + [draft.tokens[j] for j in tree.path(draft.parents, parent)]
        row = torch.tensor(language(before)) / 0.8
        row = torch.where(row >= row.topk(3).values[-1], row, -torch.inf)
        torch.testing.assert_close(draft.logits[i].softmax(-1), row.softmax(-1))
        siblings = [draft.tokens[j] for j, p in enumerate(draft.parents) if p == parent]
        assert len(set(siblings)) == len(siblings) <= 3, "top_k leaves three tokens to draw"


def test_lookups_share_their_beginnings() -> None:
    text = [1, 2, 3, 4, 9, 1, 2, 3, 5, 9, 1, 2, 3, 4, 8, 1, 2]
    draft = draft_of(NgramDrafter(2, 1, tree=TreeOptions(7, 0, 2)), text, DraftRequest(3))
    paths = {tuple(draft.tokens[i] for i in path) for path in tree.paths(draft.parents)}
    assert paths == {(3, 4, 8), (3, 5, 9), (3, 4, 9)} and len(draft.tokens) == 6
    assert draft.tokens[:3] == [3, 4, 8], "the latest first"
    chain_of = draft_of(NgramDrafter(2, 1), text, DraftRequest(3))
    assert chain_of.tokens == [3, 4, 8] and not chain_of.parents
    one = draft_of(NgramDrafter(2, 1, tree=TreeOptions(3, 0, 2)), text, DraftRequest(3))
    assert one.tokens == [3, 4, 8] and not one.parents, "a tree with one path is a chain"


@pytest.mark.parametrize("spec", ["model:tree=64", "ngram:tree=-1", "model:tree=8,top=0", "ngram:tree=8,depth=-2"])
def test_shapes_that_cannot_be_are_refused(spec: str) -> None:
    with pytest.raises(BadRequest, match=r"tree is|top is|depth is"):
        REGISTRY.make(spec)


@pytest.mark.parametrize("spec", ["model:depth=3,top=2", "model:depth=3", "ngram:top=7", "eagle:somewhere,top=7"])
def test_options_of_trees_are_refused_where_there_is_none(spec: str) -> None:
    with pytest.raises(BadRequest, match=r"give tree=... too"):
        REGISTRY.make(spec)


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(1.0, seed=3)], ids=["greedy", "drawn"])
@pytest.mark.parametrize(("top", "depth"), [(63, 9), (10, 40), (2, 63)])
def test_wide_and_long_trees_fit_into_the_bits_of_a_mask(
    top: int, depth: int, sampling: Sampling, tmp_path: Path
) -> None:
    runner = ModelRunner.load(save(make_model("qwen2"), tmp_path), device="cpu", slots=2, context=200)
    drafter = ModelDrafter(runner, tree=TreeOptions(63, 0, top))
    draft = draft_of(drafter, [1, 2, 3], DraftRequest(depth, sampling, stream=5))
    assert len(draft.tokens) == 63 and draft.longest <= depth


def test_tokens_that_are_not_worth_their_place_are_left_out() -> None:
    """And what would follow them is not computed."""
    language, passes = chain(VOCAB, seed=3), []
    for threshold in (0.0, 0.05, 0.3, 0.99):
        runner = FakeRunner(language, VOCAB)
        drafter = ModelDrafter(runner, tree=TreeOptions(40, 0, 4))
        draft = draft_of(drafter, CONTEXT, DraftRequest(6, threshold=threshold))
        parents = draft.parents or tuple(range(-1, len(draft.tokens) - 1))
        for i in range(len(draft.tokens)):
            path = [draft.tokens[j] for j in tree.path(parents, i)]
            rows = [chances(language(CONTEXT + path[:n]))[token] for n, token in enumerate(path)]
            assert math.exp(sum(rows)) >= threshold - 1e-6
        passes.append((len(runner.diary), len(draft.tokens)))
    assert passes == sorted(passes, reverse=True) and passes[0] > passes[2] > (0, 0)
    assert len(fixed_shape(40, 6, 4, 0.1)) < len(fixed_shape(40, 6, 4, 0.01)) == 40 and not fixed_shape(40, 6, 4, 0.7)


def test_depth_limits_a_path() -> None:
    drafter = ModelDrafter(FakeRunner(chain(VOCAB), VOCAB), tree=TreeOptions(30, 2, 3))
    assert draft_of(drafter, CONTEXT, DraftRequest(9)).longest == 2


def test_levels_of_all_trees_share_passes_and_need_no_tick_each() -> None:
    language, depth = chain(VOCAB), 5
    runner = FakeRunner(language, VOCAB, slots=3)
    executor, drafts = Executor(), list[Draft]()

    def once(context: list[int]) -> Any:
        drafter = ModelDrafter(runner, tree=TreeOptions(20, 0, 3))
        drafter.begin((yield Acquire(drafter.runners)))
        drafts.append((yield from drafter.propose(context, DraftRequest(depth))))
        drafter.close()

    for i in range(3):
        executor.submit(once([*CONTEXT, i]), Stats())
    for _ in range(2):
        executor.tick()
    assert len(drafts) == 3 and len(runner.diary) == depth
    assert all(len(made.rows) == 3 for made in runner.diary)
