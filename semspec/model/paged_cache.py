"""A KV cache in pages: slots take them from pools as they grow, and share those they have in common.

So sequences take the memory of their tokens, not of the longest that could come, and in layers with a window that of
the window. Kernels read `tables`, a copy of the block tables on the device. Passes without our kernels (prompts) gather
a slot's pages first: that moves what attention is about to read once more, which is little beside the arithmetic of a
prompt.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from semspec.errors import SemspecError
from semspec.model.attention_metadata import SequenceChunk
from semspec.model.cache import Cache, CachedLayer, Slots
from semspec.model.config import Shape
from semspec.model.kernels import KvScales
from semspec.model.page_pool import PagePool, own_window, page_of, pages_of
from semspec.model.page_tables import PageTables


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
        fp8: bool = False,
    ) -> None:
        """`tokens`: that all slots hold together, at most; None: as many as fit into them. `fp8`: how keys and values
        are stored; they are read and written in `dtype`."""
        Slots.__init__(self, slots, capacity)
        self.num_layers, self.dtype, page = shape.num_layers, dtype, page or page_of(capacity)
        layers: dict[int | None, list[int]] = {}
        for i, spec in enumerate(shape.attention_specs):
            layers.setdefault(own_window(spec.window, slots, capacity, page), []).append(i)
        self.pools: list[PagePool] = []
        self._places: list[int] = []  # that are free
        self._rows: dict[int, tuple[PagePool, int]] = {}  # of each layer
        for window, own in sorted(layers.items(), key=lambda item: item[0] or 0):
            pages = pages_of(tokens, slots, capacity, page, window)
            buffer = (len(own), pages, shape.kv_heads, page, shape.head_dim)
            self.pools.append(PagePool(buffer, window, slots, capacity, device, dtype, fp8))
            self._rows |= {layer: (self.pools[-1], row) for row, layer in enumerate(own)}

    @property
    def blocks(self) -> PageTables:
        """Of the layers that see most of a text."""
        return (self.pools[0] if self.pools[0].window is None else self.pools[-1]).blocks

    @property
    def nbytes(self) -> int:
        return sum(pool.nbytes for pool in self.pools)

    @property
    def longest(self) -> int | None:
        return self.pools[-1].longest

    @property
    def tokens(self) -> int:
        held = [pool.blocks.blocks * pool.blocks.size for pool in self.pools if pool.window is None]
        return min([super().tokens, *held])

    def layer(self, i: int) -> CachedLayer:
        pool, row = self._rows[i]
        scales = None if pool.scales is None else KvScales(pool.scales.keys[row], pool.scales.values[row])
        return CachedLayer(pool.keys[row], pool.values[row], pool.tables, scales)

    def min_length(self, slot: int) -> int:
        return 0 if self.longest is None else max(pool.min_length(slot) for pool in self.pools)

    def release(self, slot: int) -> None:
        if slot < self.slots:
            super().release(slot)
        else:
            assert slot not in self._places, "a place was released twice"
            self.lengths[slot] = 0
            self._places.append(slot)
        self._empty(slot)

    def park(self, slot: int) -> int | None:
        """Places are tables that no device knows, after those of the slots."""
        if not self._places:
            self._places.append(len(self.lengths))
            self.lengths.append(0)
            self.intact.append(0)
            for pool in self.pools:
                pool.blocks.add()
        place = self._places.pop()
        for pool in self.pools:
            pool.blocks.shrink(slot, self.lengths[slot])  # what it has kept for its next tokens
        self.copy(slot, place, self.lengths[slot])
        self.release(slot)
        return place

    def truncate(self, slot: int, length: int) -> None:
        if 0 < length < self.min_length(slot):
            raise SemspecError(
                f"cannot truncate slot {slot} to {length}: of layers with a window it has what texts of "
                f"{self.min_length(slot)} tokens or more need; truncate it to 0 and feed it again"
            )
        super().truncate(slot, length)
        if not length:  # else its pages stay, for what is written instead
            self._empty(slot)

    def _empty(self, slot: int) -> None:
        for pool in self.pools:
            pool.blocks.shrink(slot, 0)

    def places(self, slot: int) -> list[list[int]]:
        return [list(pool.blocks.tables[slot]) for pool in self.pools]

    def lacks_room(self, tokens: Sequence[tuple[int | None, int]], without: Sequence[int] = ()) -> bool:
        return any(pool.lacks_room(tokens, self.lengths, without) for pool in self.pools)

    @property
    def pages(self) -> int:
        """In use."""
        return sum(pool.blocks.blocks - pool.blocks.free for pool in self.pools)

    def pages_of(self, slots: Sequence[int]) -> int:
        """Those that these slots and places have, counted once each."""
        return sum(len(pool.blocks.uses(slots)) for pool in self.pools)

    def reserve(self, tokens: Sequence[tuple[int, int]]) -> None:
        wanting = [pool.wanting(tokens, self.lengths) for pool in self.pools]
        for pool, some in zip(self.pools, wanting, strict=True):
            if some and pool.short(some, self.lengths):
                raise SemspecError(
                    f"the cache is full: of its {pool.blocks.blocks} pages of {pool.blocks.size} tokens "
                    f"{pool.blocks.free} are free; load the model with more cache tokens, or decode fewer texts at a "
                    "time"
                )
        for pool, some in zip(self.pools, wanting, strict=True):
            if some:
                pool.reserve(some, self.lengths)

    def copy(self, source: int, target: int, length: int) -> None:
        """The target shares the source's pages; whoever writes to one of them gets a copy."""
        assert not 0 < length < self.min_length(source), "a window of the copy is gone"
        self.truncate(target, 0)
        for pool in self.pools:
            pool.fork(source, target, length)
        self.lengths[target] = length

    def compact(self, slot: int, start: int, rows: Sequence[int]) -> None:
        """A page that another slot has come to share is written too: after all that the other one holds of it."""
        same = next((i for i, row in enumerate(rows) if row != i), len(rows))
        if same < len(rows):
            for pool in self.pools:
                pool.move(slot, [start + row for row in rows[same:]], range(start + same, start + len(rows)))
        Slots.compact(self, slot, start, rows)

    def write(self, layer: int, chunk: SequenceChunk, k: Tensor, v: Tensor, begin: int) -> tuple[Tensor, Tensor]:
        pool, row = self._rows[layer]
        pool.write(row, chunk.slot, chunk.start, k, v)
        keys, values = pool.gather(slice(row, row + 1), chunk.slot, begin, chunk.start + chunk.count)
        return keys[0], values[0]

    @property
    def whole_layers(self) -> list[int]:
        return [layer for layer, (pool, _) in self._rows.items() if pool.window is None]

    def between(self, slot: int, start: int, end: int, whole: bool = False) -> tuple[Tensor, Tensor]:
        pools = [pool for pool in self.pools if not whole or pool.window is None]
        parts = [pool.gather(slice(None), slot, start, end) for pool in pools]
        return torch.cat([keys for keys, _ in parts]), torch.cat([values for _, values in parts])
