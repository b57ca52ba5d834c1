"""The KV cache in slots: a fixed buffer of pages, one sequence per slot, lengths on the host.

Truncation is O(1): it sets a length, and the next pass overwrites what lies after it. Here every slot is one page, and
may be truncated to any length, since layers with a window keep all positions too; `paged_cache.py` has slots of many
pages.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from semspec.errors import SemspecError
from semspec.model.attention_metadata import SequenceChunk
from semspec.model.config import Shape
from semspec.model.kernels import KvScales
from semspec.model.kv_fp8 import FP8, SCALE_BYTES


class Slots:
    """Which slots are free, and how many tokens each holds."""

    def __init__(self, slots: int, capacity: int) -> None:
        self.capacity, self.slots = capacity, slots
        self.lengths = [0] * slots
        self.intact = [0] * slots  # leading tokens not rewritten since sparse.block_statistics last set this
        self._free = list(range(slots))[::-1]

    @property
    def free(self) -> int:
        return len(self._free)

    def acquire(self, prompt: Sequence[int] = (), salt: str = "") -> int:
        if not self._free:
            raise SemspecError(f"all {self.slots} slots are taken; release one or load the model with more")
        slot = self._free.pop()
        self.lengths[slot] = self.intact[slot] = 0
        return slot

    def release(self, slot: int) -> None:
        if slot in self._free:
            raise SemspecError(f"slot {slot} was released twice")
        self.lengths[slot] = 0
        self._free.append(slot)

    def park(self, slot: int) -> int | None:
        """See types.Runner."""
        return None

    def truncate(self, slot: int, length: int) -> None:
        if not 0 <= length <= self.lengths[slot]:
            raise SemspecError(f"cannot truncate slot {slot} to {length}: it holds {self.lengths[slot]} tokens")
        self.lengths[slot] = length
        self.intact[slot] = min(self.intact[slot], length)

    def min_length(self, slot: int) -> int:
        """See types.Runner."""
        return 0

    def compact(self, slot: int, start: int, rows: Sequence[int]) -> None:
        """Of the tokens from `start` on only these, in rising order; a user of keys and values moves them."""
        if any(row != i for i, row in enumerate(rows)):
            self.intact[slot] = min(self.intact[slot], start)
        self.truncate(slot, start + len(rows))

    def extend(self, tokens: Sequence[tuple[int, int]]) -> list[int]:
        """Extend each (slot, by so many tokens), all or none; returns the positions at which they start."""
        starts = [self.lengths[slot] for slot, _ in tokens]
        for start, (slot, count) in zip(starts, tokens, strict=True):
            if start + count > self.capacity:
                raise SemspecError(
                    f"slot {slot} is full: {start} tokens and {count} more exceed its capacity of {self.capacity}; "
                    "load the model with a larger context"
                )
        self.reserve(tokens)
        for start, (slot, count) in zip(starts, tokens, strict=True):
            self.lengths[slot] = start + count
        return starts

    def reserve(self, tokens: Sequence[tuple[int, int]]) -> None:
        """Make sure that so many more tokens of each slot can be written, before a pass does; here they always can."""

    def places(self, slot: int) -> list[list[int]]:
        """Where a slot lies, with what it keeps beyond its length; here always in the same place."""
        return []

    def lacks_room(self, tokens: Sequence[tuple[int | None, int]], without: Sequence[int] = ()) -> bool:
        """See types.Runner; a slot's own capacity is another matter."""
        return False

    def pretend(self, slot: int, length: int) -> None:
        """Hold so many tokens, whatever they are: for measuring time, where contents do not matter."""
        held = self.lengths[slot]
        if 0 < length < self.min_length(slot):
            self.truncate(slot, held := 0)
        if length > held:
            self.extend([(slot, length - held)])
        else:
            self.truncate(slot, length)


def kv_bytes_per_token(depth: int, kv_heads: int, head_dim: int, dtype: torch.dtype) -> int:
    """What a cache takes for each position of a slot."""
    scale = SCALE_BYTES if dtype == FP8 else 0
    return 2 * depth * kv_heads * (head_dim * dtype.itemsize + scale)


class CachedLayer(NamedTuple):
    """Keys and values of a layer, of all slots."""

    keys: Tensor  # [pages, kv heads, positions, head_dim]
    values: Tensor
    tables: Tensor | None = None  # [slots, W] the pages of each slot; None: every slot is one page
    scales: KvScales | None = None


class Cache(Slots):
    """One page for each slot, as long as its capacity: a CPU's attention reads a slot as it lies in memory."""

    def __init__(self, shape: Shape, slots: int, capacity: int, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__(slots, capacity)
        self.num_layers, self.dtype = shape.num_layers, dtype
        buffer = (shape.num_layers, slots, shape.kv_heads, capacity, shape.head_dim)
        self.keys = torch.zeros(buffer, device=device, dtype=dtype)
        self.values = torch.zeros(buffer, device=device, dtype=dtype)
        # Made once, since making views takes time too.
        self._views = [
            [(k, v) for k, v in zip(*layer, strict=True)] for layer in zip(self.keys, self.values, strict=True)
        ]

    @property
    def nbytes(self) -> int:
        return self.keys.nbytes + self.values.nbytes

    @property
    def longest(self) -> int | None:
        """Tokens that a pass may have, if not all that slots have room for."""
        return None

    @property
    def tokens(self) -> int:
        """That all slots hold together, at most."""
        return self.slots * self.capacity

    def layer(self, i: int) -> CachedLayer:
        return CachedLayer(self.keys[i], self.values[i])

    def copy(self, source: int, target: int, length: int) -> None:
        self.truncate(target, 0)
        self.lengths[target] = length
        for buffer in (self.keys, self.values):
            buffer[:, target, :, :length] = buffer[:, source, :, :length]

    def compact(self, slot: int, start: int, rows: Sequence[int]) -> None:
        same = next((i for i, row in enumerate(rows) if row != i), len(rows))
        if same < len(rows):  # one copy, of those that do not lie where they belong
            at = torch.tensor([start + row for row in rows[same:]], device=self.keys.device)
            for buffer in (self.keys, self.values):
                buffer[:, slot, :, start + same : start + len(rows)] = buffer[:, slot, :, at]
        super().compact(slot, start, rows)

    def write(self, layer: int, chunk: SequenceChunk, k: Tensor, v: Tensor, begin: int) -> tuple[Tensor, Tensor]:
        """New keys and values [count, kv heads, head_dim] into a slot that has been extended; returns the slot's from
        position `begin` on, [kv heads, tokens, head_dim]."""
        return write(*self._views[layer][chunk.slot], chunk, k, v, begin)

    @property
    def whole_layers(self) -> list[int]:
        """Those that keep all positions of a slot."""
        return list(range(len(self.keys)))

    def between(self, slot: int, start: int, end: int, whole: bool = False) -> tuple[Tensor, Tensor]:
        """Keys and values [layers, kv heads, tokens, head_dim] of some of a slot's tokens, in all layers, or in those
        that keep all positions."""
        return self.keys[:, slot, :, start:end], self.values[:, slot, :, start:end]


def write(
    keys: Tensor, values: Tensor, chunk: SequenceChunk, k: Tensor, v: Tensor, begin: int
) -> tuple[Tensor, Tensor]:
    """New keys and values [count, kv heads, d] into a sequence's own, [kv heads, capacity, d]; its own from `begin`."""
    new = slice(chunk.start, end := chunk.start + chunk.count)
    keys[:, new], values[:, new] = k.transpose(0, 1), v.transpose(0, 1)
    return keys[:, begin:end], values[:, begin:end]
