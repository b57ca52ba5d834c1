"""The KV cache in slots: a fixed buffer, one sequence per slot, lengths on the host.

Truncation is O(1): it sets a length, and the next pass overwrites what lies after it. A slot may be truncated to any
length, so layers with a window keep all positions too, not only their window.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from semspec.errors import SemspecError
from semspec.model.config import Shape


class Slots:
    """Which slots are free, and how many tokens each holds."""

    def __init__(self, slots: int, capacity: int) -> None:
        self.capacity = capacity
        self.lengths = [0] * slots
        self.intact = [
            0
        ] * slots  # leading tokens not rewritten since a user of derived data (sparse.means) last set this
        self._free = list(range(slots))[::-1]

    @property
    def free(self) -> int:
        return len(self._free)

    def acquire(self, prompt: Sequence[int] = ()) -> int:
        if not self._free:
            raise SemspecError(f"all {len(self.lengths)} slots are taken; release one or load the model with more")
        slot = self._free.pop()
        self.lengths[slot] = self.intact[slot] = 0
        return slot

    def release(self, slot: int) -> None:
        if slot in self._free:
            raise SemspecError(f"slot {slot} was released twice")
        self.lengths[slot] = 0
        self._free.append(slot)

    def truncate(self, slot: int, length: int) -> None:
        if not 0 <= length <= self.lengths[slot]:
            raise SemspecError(f"cannot truncate slot {slot} to {length}: it holds {self.lengths[slot]} tokens")
        self.lengths[slot] = length
        self.intact[slot] = min(self.intact[slot], length)

    def keep(self, slot: int, start: int, rows: Sequence[int]) -> None:
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
        for start, (slot, count) in zip(starts, tokens, strict=True):
            self.lengths[slot] = start + count
        return starts


def kv_bytes_per_token(depth: int, kv_heads: int, head_dim: int, dtype: torch.dtype) -> int:
    """What `Cache` takes for each position of a slot."""
    return 2 * depth * kv_heads * head_dim * dtype.itemsize


class Cache(Slots):
    def __init__(self, shape: Shape, slots: int, capacity: int, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__(slots, capacity)
        buffer = (shape.depth, slots, shape.kv_heads, capacity, shape.head_dim)
        self.keys = torch.zeros(buffer, device=device, dtype=dtype)
        self.values = torch.zeros(buffer, device=device, dtype=dtype)
        self._views = [
            [(k, v) for k, v in zip(*layer, strict=True)] for layer in zip(self.keys, self.values, strict=True)
        ]

    def copy(self, source: int, target: int, length: int) -> None:
        self.truncate(target, 0)
        self.lengths[target] = length
        for buffer in (self.keys, self.values):
            buffer[:, target, :, :length] = buffer[:, source, :, :length]

    def keep(self, slot: int, start: int, rows: Sequence[int]) -> None:
        same = next((i for i, row in enumerate(rows) if row != i), len(rows))
        if same < len(rows):  # one copy, of those that do not lie where they belong
            at = torch.tensor([start + row for row in rows[same:]], device=self.keys.device)
            for buffer in (self.keys, self.values):
                buffer[:, slot, :, start + same : start + len(rows)] = buffer[:, slot, :, at]
        super().keep(slot, start, rows)

    def view(self, layer: int, slot: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values [kv heads, capacity, head_dim] of one slot; made once, since making views takes time too."""
        return self._views[layer][slot]
