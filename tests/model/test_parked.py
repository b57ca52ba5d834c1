"""Texts that stay in pages after their slots are released: found again while there are free pages, given up first."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from semspec.model import ModelRunner
from semspec.model.paged_cache import PagedCache
from semspec.model.prefix_cache import PrefixCache
from semspec.model.remembered_texts import PLACES
from semspec.types import Score
from tests.fakes import PAGE, FakeRunner, chain

VOCAB = 12
TARGET = chain(VOCAB, seed=1)


def made(slots: int = 4, room: int = 100_000, window: int | None = None) -> tuple[FakeRunner, PrefixCache]:
    inner = FakeRunner(TARGET, VOCAB, slots=slots, max_seq_len=200, room=room, window=window)
    return inner, PrefixCache(inner)


def read(runner: PrefixCache, tokens: list[int], salt: str = "") -> int:
    """How many tokens of a prompt are found."""
    slot = runner.acquire(tokens, salt)
    (rows,) = runner.score([Score(runner, slot, tokens, 1)])
    assert rows.logits[-1].tolist() == pytest.approx(TARGET(tokens))
    runner.release(slot)
    return rows.cached


def leaked(inner: FakeRunner) -> int:
    """Pages that are used by nobody."""
    assert isinstance(inner.pages, PagedCache)
    pools = inner.pages.pools
    return sum(pool.blocks.blocks - pool.blocks.free for pool in pools) - sum(
        len({b for table, gone in zip(pool.blocks.tables, pool.blocks.first, strict=True) for b in table[gone:]})
        for pool in pools
    )


@pytest.mark.parametrize("count", [4, 5, 8, 40])
def test_more_conversations_than_slots_are_remembered(count: int) -> None:
    inner, runner = made()
    texts = [[i % VOCAB, i // VOCAB] * 30 for i in range(count)]
    assert [read(runner, text) for text in texts] == [0] * count
    assert [read(runner, [*text, 11]) for text in texts] == [60] * count
    assert [read(runner, [*text, 11, 5]) for text in texts] == [61] * count
    assert runner.free == inner.free == 4, "what is remembered takes no slot"
    runner.close()
    assert inner.pages and inner.pages.blocks.free == inner.pages.blocks.blocks


def test_without_pages_slots_are_what_is_remembered() -> None:
    inner = FakeRunner(TARGET, VOCAB, slots=4, max_seq_len=200)
    runner, texts = PrefixCache(inner), [[i] * 60 for i in range(5)]
    for text in texts:
        read(runner, text)
    assert [read(runner, [*text, 11]) for text in texts] == [0] * 5


def test_the_least_recently_used_are_given_up_for_whoever_runs() -> None:
    """Six texts of 60 tokens, room for about five: a seventh is read, and nobody is preempted for it."""
    _, runner = made(room=6 * 64)
    texts = [[i] * 60 for i in range(5)]
    for text in texts:
        read(runner, text)
    read(runner, [0] * 61)  # used again
    assert runner.can_admit([9] * 90) and not runner.lacks_room([(None, 90)])
    assert read(runner, [9] * 90) == 0
    found = [read(runner, [*text[:60], 11]) > 0 for text in texts[:1]]
    assert found == [True] and read(runner, [1] * 60) == 0, "the oldest are gone, not the one that was used again"


def test_no_more_than_so_many_are_parked() -> None:
    inner, runner = made(room=10**6)
    for i in range(PLACES + 5):
        read(runner, [i % VOCAB, i // VOCAB % VOCAB, i // VOCAB**2] * 8)
    assert len(runner._places) == PLACES and leaked(inner) == 0
    assert read(runner, [0, 0, 0] * 8) == 0


def test_a_text_goes_on_in_its_own_pages() -> None:
    """Whoever goes on from a parked text takes it over: no page is copied, and none is held twice."""
    inner, runner = made()
    assert inner.pages
    text = [3, 1, 4, 1, 5] * 8
    read(runner, text)
    used = inner.pages.blocks.blocks - inner.pages.blocks.free
    slot = runner.acquire([*text, 7])
    assert inner.pages.blocks.blocks - inner.pages.blocks.free == used and not runner._places
    other = runner.acquire([*text[:30], 9])  # another begins alike, while it is in use
    assert runner.score([Score(runner, other, [*text[:30], 9], 1)])[0].cached == 30
    for each in (slot, other):
        runner.release(each)
    assert leaked(inner) == 0


@settings(max_examples=150)
@given(st.integers(0, 10**6), st.sampled_from([None, 24]), st.sampled_from([160, 240, 10_000]))
def test_any_order_of_feeds_cuts_preemptions_and_releases(seed: int, window: int | None, room: int) -> None:
    """Against lists of tokens: every row is what its text says, and no page is lost."""
    rng = random.Random(seed)
    inner, runner = made(slots=3, room=room, window=window)
    stems = [[rng.randrange(VOCAB) for _ in range(40)] for _ in range(3)]
    live: dict[int, list[int]] = {}
    for _ in range(40):
        kind = rng.choice(["begin", "feed", "feed", "cut", "preempt", "release", "release"])
        if kind == "begin" and runner.free:
            prompt = rng.choice(stems)[: rng.randint(8, 40)] + [rng.randrange(VOCAB) for _ in range(rng.randint(1, 9))]
            if runner.can_admit(prompt):
                live[runner.acquire(prompt)] = []
                slot = list(live)[-1]
                feed(runner, slot, live, prompt)
        elif not live:
            continue
        else:
            slot = rng.choice(list(live))
            if kind == "feed":
                feed(runner, slot, live, [rng.randrange(VOCAB) for _ in range(rng.randint(1, 20))])
            elif kind == "cut" and live[slot]:
                length = rng.randint(1, len(live[slot]))
                runner.truncate(slot, length)
                del live[slot][length:]
            elif kind == "preempt":
                runner.preempt(slot)
            elif kind == "release":
                del live[slot]
                runner.release(slot)
        assert leaked(inner) == 0 and runner.free == 3 - len(live)
    for slot in live:
        runner.release(slot)
    runner.close()
    assert inner.pages and all(pool.blocks.free == pool.blocks.blocks for pool in inner.pages.pools)


def feed(runner: PrefixCache, slot: int, live: dict[int, list[int]], tokens: list[int]) -> None:
    """As the scheduler does: what was lost first, others are preempted where there is no room."""
    if len(live[slot]) + len(tokens) > 190:
        return
    while runner.lacks_room([(slot, len(tokens))]):
        other = next((o for o in live if o != slot and runner.preempt(o)), None)
        if other is None:
            return
    if lost := runner.tokens_to_recompute(slot):
        runner.score([Score(runner, slot, lost, 0)])
    (rows,) = runner.score([Score(runner, slot, tokens, 1)])
    live[slot] += tokens
    assert rows.logits[-1].tolist() == pytest.approx(TARGET(live[slot]))


@pytest.mark.parametrize("fault", ["released with its pages", "a place that is written"])
def test_planted_faults_are_caught(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    inner, runner = made()
    assert inner.pages
    if fault == "released with its pages":
        park = inner.park

        def parked(slot: int) -> int | None:
            place = park(slot)
            assert place is not None
            inner.held[place] = []  # as if a device had given its pages to others
            return place

        monkeypatch.setattr(inner, "park", parked)
    else:
        copy = inner.copy

        def aliased(source: int, target: int, length: int) -> None:
            copy(source, target, length)
            inner.held[target] = inner.held[source]  # who writes to one writes to both

        monkeypatch.setattr(inner, "copy", aliased)

    def reads() -> None:
        for text in ([1, 2, 3] * 9, [1, 2, 3] * 7 + [5] * 9, [1, 2, 3] * 9):
            read(runner, text)

    with pytest.raises(AssertionError):
        reads()


def test_a_model_finds_what_it_has_parked(target_folder: Path) -> None:
    """Pages of parked texts are written by nobody: after many others, logits are those of a fresh slot."""
    plain = ModelRunner.load(target_folder, device="cpu", slots=2, context=128)
    pooled = ModelRunner(plain.transformer, 2, 128, tokens=4096, page=PAGE)
    runner, rng = PrefixCache(pooled), random.Random(3)
    texts = [[rng.randrange(100) for _ in range(50)] for _ in range(9)]

    def last(runner: PrefixCache | ModelRunner, tokens: list[int]) -> tuple[torch.Tensor, int]:
        slot = runner.acquire(tokens)
        (rows,) = runner.score([Score(runner, slot, tokens, 1)])
        runner.release(slot)
        return rows.logits[-1], rows.cached

    for turn in range(3):
        for text in texts:
            text += [rng.randrange(100) for _ in range(4)]
            logits, found = last(runner, text)
            assert found == (0 if turn == 0 else len(text) - 4) and pooled.free == 2
            assert torch.allclose(logits, last(plain, text)[0], atol=1e-4)
