"""Splits of attention joined by whichever ends last, in Triton's interpreter, where they end in a known order."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="Triton is not installed (it is for Linux only)")
if torch.cuda.is_available():
    pytest.skip("on a GPU nobody says in which order programs end", allow_module_level=True)

from triton.runtime import interpreter

from semspec.model.kernels import attention, reference
from semspec.model.kernels.joining import COUNTERS, Tickets
from semspec.model.kernels.tiles import Tiles
from tests.interpreter import allow_new_numpy

allow_new_numpy()
CPU, TILES = torch.device("cpu"), Tiles(16, 16, 8, warps=4, stages=2)
# Two sequences of up to 6 queries, 3 heads of one key head: two blocks of rows, of which the second sequence needs one.
# The first has something for six of eight splits to look at.
PLACES = [torch.tensor(x) for x in ([2, 0], [85, 40], [6, 4])]


def inputs(seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    noise = torch.Generator().manual_seed(seed)
    q = torch.randn(2, 6, 3, 24, generator=noise)
    return q, *(torch.randn(3, 1, 96, 24, generator=noise) for _ in range(2))


def attend(tickets: Tickets | None, given: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    return attention.attend(*given, *PLACES, 0.3, tiles=TILES, tickets=tickets)


def in_order(monkeypatch: pytest.MonkeyPatch, order: Callable[[int], int]) -> None:
    """Programs 0, 1, 2, ... of the first dimension are run in another order."""
    set_grid_index = interpreter.InterpreterBuilder.set_grid_idx

    def set_other(self: Any, x: int, y: int, z: int) -> None:
        set_grid_index(self, order(x), y, z)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "set_grid_idx", set_other)


def with_dirty_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    empty = torch.Tensor.new_empty

    def dirty(self: Tensor, *size: Any, **options: Any) -> Tensor:
        made = empty(self, *size, **options)
        return made.fill_(float("nan")) if made.is_floating_point() else made

    monkeypatch.setattr(torch.Tensor, "new_empty", dirty)


def test_whoever_is_last_the_bits_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    programs = 2 * TILES.splits
    given, tickets = inputs(), Tickets(16)
    first = attend(tickets, given)
    exact = reference.attend(*(x.double() for x in given), *PLACES, 0.3)
    torch.testing.assert_close(first[0].double(), exact[0], atol=1e-5, rtol=0)
    torch.testing.assert_close(first[1, :4].double(), exact[1, :4], atol=1e-5, rtol=0)
    for order in (lambda x: programs - 1 - x, lambda x: x * 7 % programs):
        assert sorted(order(x) for x in range(programs)) == list(range(programs))
        with monkeypatch.context() as patch:
            in_order(patch, order)
            assert torch.equal(attend(tickets, given), first)


def test_counters_are_back_at_zero_so_that_a_launch_can_be_repeated() -> None:
    tickets = Tickets(16)
    for seed in range(2):
        given = inputs(seed)
        assert torch.equal(attend(tickets, given), attend(Tickets(16), given))
        counters = tickets.take(TILES, 4, CPU)
        assert counters is not None and not counters.any()


def test_a_counter_that_was_not_put_back_spoils_the_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """So the test before this one would find it."""
    given, tickets = inputs(), Tickets(16)
    right = attend(tickets, given)
    counters = tickets.take(TILES, 4, CPU)
    assert counters is not None
    counters[1] = 4
    with_dirty_memory(monkeypatch)
    wrong = attend(tickets, given)
    assert wrong[0].isnan().any() and torch.equal(wrong[1], right[1]), "only the tile that the counter is for"


def test_what_an_earlier_launch_left_in_memory_is_not_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Splits that had nothing to look at store nothing, and memory is not cleared for them."""
    given = inputs()
    clean = [attend(tickets, given) for tickets in (None, Tickets(16))]
    with_dirty_memory(monkeypatch)
    for tickets, expected in zip((None, Tickets(16)), clean, strict=True):
        assert torch.equal(attend(tickets, given), expected)


def test_more_splits_than_are_asked_for_at_a_time() -> None:
    noise = torch.Generator().manual_seed(1)
    q, keys, values = (torch.randn(size, generator=noise) for size in [(1, 1, 2, 256), *[(1, 1, 320, 256)] * 2])
    places = [torch.tensor(x) for x in ([0], [299], [1])]
    ours = attention.attend(q, keys, values, *places, 0.1, tiles=Tiles(16, 16, 32, 4, 2), tickets=Tickets(16))
    exact = reference.attend(q.double(), keys.double(), values.double(), *places, 0.1)
    torch.testing.assert_close(ours.double(), exact, atol=1e-5, rtol=0)


def test_only_small_tiles_are_joined_inside_and_only_if_there_is_something_to_join() -> None:
    tickets = Tickets(32)
    assert tickets.take(Tiles(64, 64, 8, 4, 3), 1, CPU) is None
    assert tickets.take(Tiles(32, 64, 1, 4, 3), 1, CPU) is None
    taken = tickets.take(Tiles(32, 64, 2, 4, 3), 132, CPU)
    assert taken is not None and taken is tickets.take(Tiles(16, 64, 64, 4, 3), 2, CPU), "graphs know where it is"
    with pytest.raises(AssertionError):
        tickets.take(Tiles(16, 64, 2, 4, 3), COUNTERS + 1, CPU)
