"""What blocks of the cache are known by when they are not read: the means of their keys, and of their values."""

from __future__ import annotations

import torch

from semspec.model.cache import Cache

FEW = 16  # blocks whose means are made for all layers together


class Means:
    """The mean key of every whole block in a cache, [depth, slots, kv heads, blocks, d], and where wanted its mean
    value. A block's means are made when they are first asked for, and again if it was truncated and written anew
    since."""

    def __init__(self, cache: Cache, block: int, values: bool = False) -> None:
        self.cache, self.block = cache, block
        depth, slots, kv_heads, capacity, size = cache.keys.shape
        self.keys = cache.keys.new_zeros(depth, slots, kv_heads, capacity // block, size)
        self.values = torch.zeros_like(self.keys) if values else None
        self._known = [0] * slots  # blocks whose means are made

    def update(self, slot: int, length: int) -> None:
        """Make what is missing for the first `length` tokens of a slot, all of which are in the cache."""
        known, full = min(self._known[slot], self.cache.intact[slot] // self.block), length // self.block
        if full > known:
            wide = torch.float32 if self.keys.element_size() < 4 else self.keys.dtype
            # A draft fills a block or two: all layers at once, so that a GPU has one thing to do. A prompt fills many,
            # and there the layers take turns, since what is made on the way takes memory.
            together = self.keys.shape[0] if full - known <= FEW else 1
            for cached, made in ((self.cache.keys, self.keys), (self.cache.values, self.values)):
                if made is None:
                    continue
                new = cached[:, slot, :, known * self.block : full * self.block]
                for some, means in zip(new.split(together), made[:, slot].split(together), strict=True):
                    means[:, :, known:full] = some.unflatten(2, (-1, self.block)).mean(3, dtype=wide)
        self._known[slot], self.cache.intact[slot] = full, length
