"""Pages for the layers of a model that see the same of a text: all of it, or a window of its last tokens.

Layers with a window have a pool of their own. Pages behind the window stay while there are free ones, since a text may
be cut back, or another begin alike; when pages run short they are given back. So however long texts are, such a pool
needs for each slot its window, some tokens by which texts are cut back (rejected drafts), and once those of a pass.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from semspec.model.kernels import WIDE, KvScales
from semspec.model.kv_fp8 import FP8, decode, encode
from semspec.model.page_tables import NONE, Change, PageTables
from semspec.sampling.copies import to_device

CUT = 64  # tokens by which a text may be cut back, at least: the largest pass that is written before it is read
PASS = 16  # pages of the longest pass over layers with a window


def page_of(capacity: int) -> int:
    """Tokens in a page: a tile of the attention kernel lies in one, so that it costs one look at the table."""
    return 128 if capacity >= WIDE else 64


def pages_of(tokens: int | None, slots: int, capacity: int, page: int, window: int | None = None) -> int:
    """Pages for so many tokens, or for all that slots can hold: no fewer than one sequence may need. Of layers with a
    window no more than all slots can use; of others, who asks for more has more texts remembered than run."""
    if window is None:
        each = -(-capacity // page) + 1  # one to spare: to write a shared page takes a copy
        return slots * each if tokens is None else max(each, tokens // page)
    each = -(-reach(window, page) // page) + 2  # a reach begins and ends anywhere in a page, and so does a pass
    return PASS + (slots * each if tokens is None else max(each, min(tokens // page + slots, slots * each)))


def reach(window: int, page: int) -> int:
    """Tokens before its end that a slot keeps in layers with a window."""
    return window - 1 + max(CUT, 2 * page)


def own_window(window: int | None, slots: int, capacity: int, page: int) -> int | None:
    """The window, if a pool of their own is smaller for such layers than that of the layers without one."""
    if window is None or pages_of(None, slots, capacity, page, window) >= pages_of(None, slots, capacity, page):
        return None
    return window


class PagePool:
    def __init__(
        self,
        buffer: tuple[int, int, int, int, int],
        window: int | None,
        slots: int,
        capacity: int,
        device: torch.device,
        dtype: torch.dtype,
        fp8: bool = False,
    ) -> None:
        """`buffer`: layers, pages, kv heads, tokens in a page, head_dim; `fp8`: how they are stored"""
        _, pages, _, page, _ = buffer
        self.window, self.capacity = window, capacity
        self.reach = None if window is None else reach(window, page)
        self.keys, self.values = (torch.zeros(buffer, device=device, dtype=FP8 if fp8 else dtype) for _ in range(2))
        self.scales = KvScales(*(torch.zeros(buffer[:-1], device=device) for _ in range(2))) if fp8 else None
        self.dtype = dtype
        # All that is stored of a token, as bytes where torch cannot move its type.
        self._stored = [half.view(torch.uint8) if fp8 else half for half in (self.keys, self.values)]
        self._stored += self.scales or ()
        self.blocks = PageTables(slots, pages, page)
        self.tables = torch.zeros(slots, -(-capacity // page), dtype=torch.int32, device=device)

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self._stored)

    @property
    def longest(self) -> int | None:
        """Tokens that a pass may have."""
        return None if self.window is None else PASS * self.blocks.size

    def min_length(self, slot: int) -> int:
        """The least length but 0 that the slot can be cut to: the next token then finds its window."""
        first = self.blocks.first[slot] * self.blocks.size
        return first + self.window - 1 if first and self.window is not None else 0

    def lacks_room(
        self, tokens: Sequence[tuple[int | None, int]], lengths: Sequence[int], without: Sequence[int] = ()
    ) -> bool:
        """Whether it cannot hold so many more tokens of these slots. With a page to spare for each: a slot that is cut
        back may have to copy one before it writes, and takes new pages before it gives back those behind its window.
        Passes over layers with a window have their own."""
        kept = len(tokens) + (0 if self.window is None else PASS)
        size, free = self.blocks.size, self.blocks.free
        if sum(count // size + 2 for _, count in tokens) + kept <= free:  # all that they could touch, so mostly
            return False
        if self._held_more(tokens, lengths) + kept <= free:
            return False
        self.trim(lengths)
        dropped = self.blocks.uses(without)
        return self._held_more(tokens, lengths, dropped) + kept > self.blocks.free + self.blocks.freed(dropped)

    def _held_more(
        self, tokens: Sequence[tuple[int | None, int]], lengths: Sequence[int], dropped: Mapping[int, int] = NONE
    ) -> int:
        """Pages, after those behind windows are given back. What exceeds a slot's capacity is never written."""
        more, firsts = 0, dict[int, int]()
        for slot, count in tokens:
            length = 0 if slot is None else lengths[slot]
            count = min(count, self.capacity - length)
            first = self._first(length + count)
            more += self.blocks.needed(slot, length, count, dropped, first)
            if slot is not None and self.window is not None:
                firsts[slot] = first
        return max(0, more - self.blocks.freed_before(firsts, dropped)) if firsts else more

    def wanting(self, tokens: Sequence[tuple[int, int]], lengths: Sequence[int]) -> list[tuple[int, int]]:
        """Those of these slots that need further pages to write so many tokens, or give some back."""
        ready, longest = self.blocks.ready, self.longest
        return [
            (slot, count)
            for slot, count in tokens
            if (longest is not None and count > longest) or not ready(slot, lengths[slot], count)
        ]

    def short(self, tokens: Sequence[tuple[int, int]], lengths: Sequence[int]) -> bool:
        """Whether there are too few pages for a pass that writes so many tokens."""
        if self._needed(tokens, lengths) > self.blocks.free:
            self.trim(lengths)
        return self._needed(tokens, lengths) > self.blocks.free

    def _needed(self, tokens: Sequence[tuple[int, int]], lengths: Sequence[int]) -> int:
        return sum(
            self.blocks.needed(slot, lengths[slot], count, first=self._written_from(lengths[slot], count))
            for slot, count in tokens
        )

    def reserve(self, tokens: Sequence[tuple[int, int]], lengths: Sequence[int]) -> None:
        extend = self.blocks.extend
        self._apply([
            change
            for slot, count in tokens
            for change in extend(slot, lengths[slot], count, self._written_from(lengths[slot], count))
        ])  # fmt: skip

    def _written_from(self, length: int, count: int) -> int:
        """The first block that takes room: all of a pass, but nobody reads what is longer than a pass."""
        return 0 if self.longest is None or count <= self.longest else self._first(length + count)

    def _first(self, length: int) -> int:
        """The first block that a slot of so many tokens keeps."""
        return 0 if self.reach is None else max(0, length - self.reach) // self.blocks.size

    def trim(self, lengths: Sequence[int]) -> None:
        """Give back pages that truncated slots have kept for what comes next, and those behind windows."""
        for slot in range(len(self.tables) if self.window is None else len(lengths)):  # places have none to spare
            self.blocks.shrink(slot, lengths[slot])
            self.blocks.give_back(slot, self._first(lengths[slot]))

    def fork(self, source: int, target: int, length: int) -> None:
        self._apply(self.blocks.fork(source, target, length))

    def move(self, slot: int, old: Sequence[int], new: range) -> None:
        """Tokens of a slot to other positions."""
        table, size = self.blocks.tables[slot], self.blocks.size
        where = [[table[i // size] for i in places] for places in (old, new)]
        rows = [[i % size for i in places] for places in (old, new)]
        (source, target), (source_rows, target_rows) = self._numbers([where, rows])
        for part in self._stored:
            part[:, target, :, target_rows] = part[:, source, :, source_rows]

    def write(self, row: int, slot: int, start: int, k: Tensor, v: Tensor) -> None:
        at = self._places(slot, torch.arange(start, start + len(k), device=self.tables.device))
        if self.scales is None:
            parts = [k.to(self.dtype), v.to(self.dtype)]
        else:
            codes, scales = zip(*(encode(x) for x in (k, v)), strict=True)
            parts = [*(code.view(torch.uint8) for code in codes), *scales]
        for stored, part in zip(self._stored, parts, strict=True):
            stored[row][at] = part

    def _places(self, slot: int, at: Tensor) -> tuple[Tensor, slice, Tensor]:
        """An index of positions [n] of a slot: what it picks of a layer is [n, kv heads, head_dim]."""
        return self.tables[slot, at // self.blocks.size].long(), slice(None), at % self.blocks.size

    def gather(self, rows: slice, slot: int, start: int, end: int) -> tuple[Tensor, Tensor]:
        """Keys and values [rows, kv heads, tokens, head_dim] of some of a slot's tokens."""
        size = self.blocks.size
        first, pages = start // size * size, self.tables[slot, start // size : -(-end // size)]
        own = slice(start - first, end - first)
        keys, values, *scales = (
            part[rows].transpose(1, 2).index_select(2, pages).flatten(2, 3)[:, :, own] for part in self._stored
        )
        if scales:
            keys, values = (
                decode(codes.view(FP8), scale, self.dtype) for codes, scale in zip((keys, values), scales, strict=True)
            )
        return keys, values

    def _apply(self, changes: list[Change]) -> None:
        changes = [c for c in changes if c.slot < len(self.tables)]
        if not changes:
            return
        copied = [c for c in changes if c.copied is not None]
        if copied:
            source, target = self._numbers([[c.copied for c in copied], [c.block for c in copied]])
            for part in self._stored:
                part[:, target] = part[:, source]
        width = self.tables.shape[1]
        places, pages = self._numbers([[c.slot * width + c.entry for c in changes], [c.block for c in changes]])
        self.tables.view(-1).index_copy_(0, places, pages.int())

    def _numbers(self, rows: Sequence[Any]) -> Tensor:
        return to_device(np.array(rows), self.tables.device)
