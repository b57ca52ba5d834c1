"""KV memory in slots: one fixed buffer per layer, one sequence per slot, lengths on the host.

Undoing is O(1): truncation moves a length, and what lies behind it is overwritten by the next pass.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from semspec.errors import SemspecError
from semspec.model.config import Shape


class Slots:
    """Who holds which slot, and how many tokens each holds."""

    def __init__(self, slots: int, capacity: int) -> None:
        self.capacity = capacity
        self.lengths = [0] * slots
        self.intact = [0] * slots  # tokens not written anew since whoever derives something from them last set this
        self._free = list(range(slots))[::-1]

    @property
    def free(self) -> int:
        return len(self._free)

    def acquire(self) -> int:
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

    def extend(self, wanted: Sequence[tuple[int, int]]) -> list[int]:
        """Make room in each (slot, for so many more tokens), in all or in none; returns where they begin."""
        starts = [self.lengths[slot] for slot, _ in wanted]
        for start, (slot, count) in zip(starts, wanted, strict=True):
            if start + count > self.capacity:
                raise SemspecError(
                    f"slot {slot} is full: {start} tokens and {count} more exceed its capacity of {self.capacity}; "
                    "load the model with a larger context"
                )
        for start, (slot, count) in zip(starts, wanted, strict=True):
            self.lengths[slot] = start + count
        return starts


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

    def view(self, layer: int, slot: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values [kv heads, capacity, head_dim] of one slot; made once, since making views takes time too."""
        return self._views[layer][slot]
