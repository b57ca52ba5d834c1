"""Interrupts in the middle of what a prefix cache does: no slot is lost, and nothing is found that is not there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from semspec.model.prefix_cache import PrefixCache
from semspec.types import Score
from tests.fakes import FakeRunner, chain

VOCAB = 12
LANGUAGE = chain(VOCAB)
SYSTEM = [1, 2, 3, 4] * 5


def read(runner: PrefixCache, tokens: list[int], slot: int | None = None) -> int:
    """Feeds a prompt to a slot, whose last row is right."""
    slot = runner.acquire(tokens) if slot is None else slot
    (rows,) = runner.score([Score(runner, slot, tokens, 1)])
    assert rows.logits[-1].tolist() == pytest.approx(LANGUAGE(tokens))
    return slot


def interrupted(done: Callable[..., Any], after: bool) -> Callable[..., Any]:
    def call(*arguments: Any) -> None:
        if after:
            done(*arguments)
        raise KeyboardInterrupt

    return call


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("room", [None, 400])
@pytest.mark.parametrize("free", [0, 1])
def test_a_copy_for_a_new_text(after: bool, room: int | None, free: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The text that it is a copy of is in use, and so are the other slots but the one that is free or idle."""
    inner = FakeRunner(LANGUAGE, VOCAB, slots=3, room=room)
    runner = PrefixCache(inner)
    busy = read(runner, SYSTEM + [5] * 20)
    if not free:
        runner.release(read(runner, [9, 8, 7] * 8))
    with monkeypatch.context() as patch:
        patch.setattr(inner, "copy", interrupted(inner.copy, after))
        with pytest.raises(KeyboardInterrupt):
            runner.acquire(SYSTEM + [6] * 9)
    assert runner.free == 2, "a slot is lost"
    others = [read(runner, SYSTEM + [6] * 9), read(runner, [9, 8, 7] * 8 + [3])]
    for slot in (busy, *others):
        runner.release(slot)
    runner.close()
    assert inner.free == 3 and not (inner.pages and inner.pages.pages)


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("room", [None, 400])
def test_a_tree_that_is_moved_together(after: bool, room: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    inner = FakeRunner(LANGUAGE, VOCAB, slots=2, room=room)
    runner = PrefixCache(inner)
    slot = read(runner, SYSTEM)
    runner.score([Score(runner, slot, [5, 6, 7, 8], 4, parents=(-1, -1, 1, 1))])
    with monkeypatch.context() as patch:
        patch.setattr(inner, "compact", interrupted(inner.compact, after))
        with pytest.raises(KeyboardInterrupt):
            runner.compact(slot, len(SYSTEM), [1, 3])
    runner.release(slot)
    assert runner.free == 2
    runner.release(read(runner, [*SYSTEM, 6, 8, 1]))
    runner.release(read(runner, [*SYSTEM, 5, 6, 1]))
    runner.close()
    assert inner.free == 2
