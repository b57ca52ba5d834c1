"""Drafts that branch, in every runner: each token gets what it gets at the end of its own path, and an accepted path
leaves the cache that the same text leaves as a chain."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from semspec import tree
from semspec.model import ModelRunner, Source
from semspec.model.attention_metadata import SequenceChunk
from semspec.model.graph_runner import tree_numbers
from semspec.model.prefix_cache import PrefixCache
from semspec.types import Draft, Runner, Score
from tests.checkpoints import VOCAB, make_model, save
from tests.fakes import FakeRunner, chain
from tests.model.test_graph_runner import with_graphs
from tests.model.test_hf_runner import build

PARENTS = (-1, 0, 1, 0, 3, -1, 5, 5, 7, -1)  # two children here and there, a path of four, a leaf at the root

Runners = Callable[[], tuple[ModelRunner, ModelRunner]]  # plain, and as on a GPU


def text(seed: int, length: int) -> list[int]:
    return torch.randint(1, VOCAB, [length], generator=torch.Generator().manual_seed(seed)).tolist()


def close(ours: Tensor, exact: Tensor) -> None:
    assert (ours - exact).norm() <= 1e-4 * exact.norm()


def by_path(runner: Runner, context: list[int], tokens: list[int], parents: tuple[int, ...]) -> Tensor:
    """Each token's row, from a pass over its own path only."""
    slot, rows = runner.acquire(), []
    for node in range(len(tokens)):
        runner.truncate(slot, 0)
        feed = context + [tokens[i] for i in tree.path(parents, node)]
        rows.append(runner.score([Score(runner, slot, feed, 1)])[0].logits[0])
    runner.release(slot)
    return torch.stack(rows)


def check(runner: Runner, parents: tuple[int, ...], context: int, fed: int, levels: bool = False) -> None:
    """`fed`: tokens of the context that come with the tree; with levels, the tree comes in several passes."""
    before, tokens = text(1, context), text(2, len(parents))
    exact, slot = by_path(runner, before, tokens, parents), runner.acquire()
    if fed < context:
        runner.score([Score(runner, slot, before[: context - fed], 0)])
    if levels:
        runner.score([Score(runner, slot, before[context - fed :], 0)] if fed else [])
        ends = sorted({1, len(parents) // 2, len(parents)})
        for begin, end in zip([0, *ends], ends, strict=False):
            (rows,) = runner.score([Score(runner, slot, tokens[begin:end], end - begin, parents=parents[:end])])
            close(rows.logits, exact[begin:end])
    else:
        feed = before[context - fed :] + tokens
        (rows,) = runner.score([Score(runner, slot, feed, len(tokens), parents=parents)])
        close(rows.logits, exact)
    assert runner.length(slot) == context + len(tokens)
    path = max(tree.paths(parents), key=lambda path: (len(path), path))
    runner.compact(slot, context, path[:-1])
    again, end = runner.acquire(), text(3, 3)
    assert runner.length(slot) == context + len(path) - 1
    (kept,) = runner.score([Score(runner, slot, end, 3)])
    (whole,) = runner.score([Score(runner, again, before + [tokens[i] for i in path[:-1]] + end, 3)])
    close(kept.logits, whole.logits)
    runner.release(slot)
    runner.release(again)


@pytest.mark.parametrize("family", ["llama3", "qwen3", "gemma3", "mixtral", "smollm3", "phi3"])
def test_a_tree_in_one_pass_or_several(family: str, tmp_path: Path) -> None:
    """Windows smaller than the tree, layers without positions, experts; plain, and as on a GPU."""
    plain = ModelRunner.load(save(make_model(family), tmp_path), device="cpu", slots=4, context=128)
    for runner in (plain, with_graphs(plain)):
        for levels in (False, True):
            check(runner, PARENTS, 40, 1, levels)
    check(plain, PARENTS, 40, 30)
    check(with_graphs(plain), PARENTS, 40, 40)


@pytest.mark.parametrize("dtype", ["int8", "int4"])
def test_integer_weights_round_as_in_a_chain(dtype: str, tmp_path: Path) -> None:
    """They turn the last bit of a number into a larger difference: here the rows are the same, bit for bit."""
    runner = ModelRunner.load(save(make_model("qwen2"), tmp_path), device="cpu", dtype=dtype, slots=4, context=128)
    before, tokens = text(1, 20), text(2, len(PARENTS))
    slot = runner.acquire()
    runner.score([Score(runner, slot, before[:-1], 0)])
    (rows,) = runner.score([Score(runner, slot, [before[-1], *tokens], len(tokens) + 1, parents=PARENTS)])
    for path in tree.paths(PARENTS):
        runner.truncate(slot, 19)
        draft = [before[-1], *(tokens[i] for i in path)]
        (own,) = runner.score([Score(runner, slot, draft, len(draft))])
        assert torch.equal(own.logits, rows.logits[[0, *(i + 1 for i in path)]])


def test_a_few_tokens_of_a_tree_in_numpy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = ModelRunner.load(save(make_model("gemma3"), tmp_path), device="cpu", slots=4, context=128)
    used, score = [], runner.numpy_decoder.score  # type: ignore[union-attr]
    monkeypatch.setattr(runner.numpy_decoder, "score", lambda *a: used.append(a) or score(*a))
    check(runner, (-1, -1, 0), 30, 1, levels=True)
    assert used


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 60), st.integers(1, 3), st.booleans())
def test_any_tree_among_chains(cached: Runners, seed: int, size: int, fed: int, twin: bool) -> None:
    """One pass over trees and chains of several sequences gives each what it gets alone."""
    runner, rng = cached()[twin], random.Random(seed)
    parents = tuple(rng.randrange(-1, i) for i in range(size))
    before, tokens = text(1, 20), text(seed, size)
    slots = [runner.acquire() for _ in range(3)]
    for slot in slots:
        runner.score([Score(runner, slot, before[:-fed], 0)])
    feed = before[-fed:]
    rows = runner.score(
        [
            Score(runner, slots[0], feed + tokens[:3], 1),
            Score(runner, slots[1], feed + tokens, size, parents=parents),
            Score(runner, slots[2], feed, 1),
        ]
    )
    for node in rng.sample(range(size), min(size, 3)):
        runner.truncate(slots[0], 20 - fed)
        own = feed + [tokens[i] for i in tree.path(parents, node)]
        close(rows[1].logits[node], runner.score([Score(runner, slots[0], own, 1)])[0].logits[0])
    path = tree.path(parents, rng.randrange(size))
    runner.compact(slots[1], 20, path)
    for slot in slots[::2]:
        runner.truncate(slot, 20 - fed)
    one = runner.score([Score(runner, slots[0], feed + [tokens[i] for i in path] + [5], 1)])[0].logits
    close(runner.score([Score(runner, slots[1], [5], 1)])[0].logits, one)
    for slot in slots:
        runner.release(slot)


@pytest.fixture(scope="module")
def cached(tmp_path_factory: pytest.TempPathFactory) -> Runners:
    folder = save(make_model("qwen2"), tmp_path_factory.mktemp("qwen2"))
    plain = ModelRunner.load(folder, device="cpu", slots=4, context=128)
    pair = plain, with_graphs(plain)
    return lambda: pair


def test_numbers_of_a_mask_have_64_bits() -> None:
    bases, *numbers = tree_numbers([SequenceChunk(0, 7, 64, tuple(range(-1, 62)))], 1, 64)
    assert bases == 7 and numbers[63] == -1 and numbers[62] == 2**63 - 1 and numbers[64:] == list(range(64))


@pytest.mark.parametrize(("kind", "trees"), [("gpt_neox", True), ("gpt2", True), ("gemma2", False), ("bloom", False)])
def test_transformers_take_trees_if_a_trial_shows_it(kind: str, trees: bool, tmp_path: Path) -> None:
    runner = Source.find(save(build(kind), tmp_path)).load("cpu", "auto", 4, 128)
    assert PrefixCache(runner).trees == trees, "it holds all slots"
    if trees:
        check(runner, PARENTS, 20, 1)
        check(runner, PARENTS, 20, 5, levels=True)


def test_a_prefix_cache_keeps_the_accepted_path_and_nothing_else_of_a_tree() -> None:
    language = chain(20, seed=3)
    inner = FakeRunner(language, 20, slots=2)
    runner = PrefixCache(inner)
    check_tokens, before = [5, 6, 7, 8], list(range(1, 17))
    slot = runner.acquire(before)
    runner.score([Score(runner, slot, before + check_tokens, 5, parents=(-1, 0, -1, 2))])
    runner.compact(slot, 16, (2, 3))
    assert inner.held[slot] == [*before, 7, 8]
    runner.release(slot)
    assert runner.acquire([*before, 7, 8, 9]) == slot and runner.reused == 18
    runner.score([Score(runner, slot, [*before, 7, 8, 9], 1)])
    runner.score([Score(runner, slot, check_tokens, 4, parents=(-1, 0, -1, 2))])
    runner.release(slot)  # in the middle of a round: the tree is no text that anyone can go on from
    runner.acquire([*before, 7, 8, 9, 5, 6, 7, 8])
    assert runner.reused == 19


def test_drafts_lose_what_follows_a_lost_token() -> None:
    draft = Draft([10, 11, 12, 13, 14], torch.arange(5.0)[:, None], parents=(-1, 0, 0, 2, -1))
    assert draft.longest == 3
    some = draft.only([0, 1, 3, 4])
    assert (some.tokens, some.parents) == ([10, 11, 14], (-1, 0, -1))
    assert some.logits is not None and some.logits[:, 0].tolist() == [0.0, 1.0, 4.0]
    assert draft.only([0, 2, 3]).parents == () and draft.first(3).tokens == [10, 11, 12]
