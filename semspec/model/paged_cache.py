"""A KV cache in pages: slots take them from a pool as they grow, and share those they have in common.

So sequences take the memory of their tokens, not of the longest that could come. Kernels read `tables`, a copy of the
block tables on the device. Passes without our kernels (prompts) gather a slot's pages first: that moves what attention
is about to read once more, which is little beside the arithmetic of a prompt.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from semspec.errors import SemspecError
from semspec.model.attention_metadata import SequenceChunk
from semspec.model.blocks import NONE, BlockTables, Change
from semspec.model.cache import Cache, Slots
from semspec.model.config import Shape
from semspec.model.kernels import LONG


def page_of(capacity: int) -> int:
    """Tokens in a page: a tile of the attention kernel lies in one, so that it costs one look at the table."""
    return 128 if capacity >= LONG else 64


def pages_of(tokens: int | None, slots: int, capacity: int, page: int) -> int:
    """Pages for so many tokens, or for all that slots can hold: no fewer than one sequence may need, and no more than
    all can use."""
    each = -(-capacity // page) + 1  # one to spare: to write a shared page takes a copy
    return slots * each if tokens is None else max(each, min(tokens // page, slots * each))


class PagedCache(Cache):
    def __init__(
        self,
        shape: Shape,
        slots: int,
        capacity: int,
        device: torch.device,
        dtype: torch.dtype,
        tokens: int | None = None,
        page: int | None = None,
    ) -> None:
        """`tokens`: that all slots hold together, at most; None: as many as fit into them."""
        Slots.__init__(self, slots, capacity)
        page = page or page_of(capacity)
        pages = pages_of(tokens, slots, capacity, page)
        self.blocks = BlockTables(slots, pages, page)
        self._allocate(shape, pages, page, device, dtype)
        self.tables: Tensor = torch.zeros(slots, -(-capacity // page), dtype=torch.int32, device=device)

    def release(self, slot: int) -> None:
        super().release(slot)
        self.blocks.shrink(slot, 0)

    def truncate(self, slot: int, length: int) -> None:
        super().truncate(slot, length)
        if not length:  # else its pages stay, for what is written instead
            self.blocks.shrink(slot, 0)

    def lacks(self, tokens: Sequence[tuple[int | None, int]], without: Sequence[int] = ()) -> bool:
        """With a page to spare for each: a slot that is cut back may have to copy one before it writes."""
        if self._needed(tokens) + len(tokens) <= self.blocks.free:
            return False
        self.blocks.shrink_all(self.lengths)
        dropped = self.blocks.uses(without)
        return self._needed(tokens, dropped) + len(tokens) > self.blocks.free + self.blocks.freed(dropped)

    def _needed(self, tokens: Sequence[tuple[int | None, int]], dropped: Mapping[int, int] = NONE) -> int:
        """What exceeds a slot's capacity is never written."""
        at = [(slot, 0 if slot is None else self.lengths[slot], count) for slot, count in tokens]
        return sum(self.blocks.needed(s, n, min(count, self.capacity - n), dropped) for s, n, count in at)

    def reserve(self, tokens: Sequence[tuple[int, int]]) -> None:
        if self._needed(tokens) > self.blocks.free:
            self.blocks.shrink_all(self.lengths)
        if self._needed(tokens) > self.blocks.free:
            raise SemspecError(
                f"the cache is full: of its {self.blocks.blocks} pages of {self.blocks.size} tokens "
                f"{self.blocks.free} are free; load the model with more cache tokens, or decode fewer texts at a time"
            )
        self._apply([c for slot, count in tokens for c in self.blocks.extend(slot, self.lengths[slot], count)])

    def copy(self, source: int, target: int, length: int) -> None:
        """The target shares the source's pages; whoever writes to one of them gets a copy."""
        self.truncate(target, 0)
        self._apply(self.blocks.fork(source, target, length))
        self.lengths[target] = length

    def keep(self, slot: int, start: int, rows: Sequence[int]) -> None:
        """A page that another slot has come to share is written too: behind all that the other one holds of it."""
        same = next((i for i, row in enumerate(rows) if row != i), len(rows))
        if same < len(rows):
            old = self._places(slot, torch.tensor([start + row for row in rows[same:]], device=self.tables.device))
            new = self._places(slot, torch.arange(start + same, start + len(rows), device=self.tables.device))
            for half in (self.keys, self.values):
                half[(slice(None), *new)] = half[(slice(None), *old)]
        Slots.keep(self, slot, start, rows)

    def write(self, layer: int, chunk: SequenceChunk, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        end = chunk.start + chunk.count
        at = self._places(chunk.slot, torch.arange(chunk.start, end, device=self.tables.device))
        for half, new in ((self.keys, k), (self.values, v)):
            half[layer][at] = new.to(half.dtype)
        keys, values = self._gather(slice(layer, layer + 1), chunk.slot, 0, end)
        return keys[0], values[0]

    def _places(self, slot: int, at: Tensor) -> tuple[Tensor, slice, Tensor]:
        """An index of positions [n] of a slot: what it picks of a layer is [n, kv heads, head_dim]."""
        return self.tables[slot, at // self.blocks.size].long(), slice(None), at % self.blocks.size

    def between(self, slot: int, start: int, end: int) -> tuple[Tensor, Tensor]:
        return self._gather(slice(None), slot, start, end)

    def _gather(self, layers: slice, slot: int, start: int, end: int) -> tuple[Tensor, Tensor]:
        size = self.blocks.size
        first, pages = start // size * size, self.tables[slot, start // size : -(-end // size)]
        keys, values = (half[layers].transpose(1, 2).index_select(2, pages) for half in (self.keys, self.values))
        own = slice(start - first, end - first)
        return keys.flatten(2, 3)[:, :, own], values.flatten(2, 3)[:, :, own]

    def _apply(self, changes: list[Change]) -> None:
        if not changes:
            return
        copied = [c for c in changes if c.copied is not None]
        if copied:
            source, target = self._numbers([[c.copied for c in copied], [c.block for c in copied]])
            for half in (self.keys, self.values):
                half[:, target] = half[:, source]
        width = self.tables.shape[1]
        places, pages = self._numbers([[c.slot * width + c.entry for c in changes], [c.block for c in changes]])
        self.tables.view(-1).index_copy_(0, places, pages.int())

    def _numbers(self, rows: list[list[int | None]]) -> Tensor:
        """On the device, without waiting for it."""
        host = torch.tensor(rows)
        if self.tables.device.type == "cuda":
            host = host.pin_memory()
        return host.to(self.tables.device, non_blocking=True)
