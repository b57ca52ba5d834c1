"""What blocks of the cache are known by when they are not read: means of their keys and values, variances of keys."""

from __future__ import annotations

import torch
from torch import Tensor

from semspec.model.cache import Cache
from semspec.sparse.attention import AttentionPlan

FEW = 16  # blocks whose means are made for all layers together


class Means:
    """The mean key of every whole block in a cache, [depth, slots, kv heads, blocks, d]; where wanted its mean value,
    and the variance of its keys in each channel. They are made when they are first asked for, and again for a block
    that was truncated and written anew since."""

    def __init__(self, cache: Cache, block: int, values: bool = False, variances: bool = False) -> None:
        self.cache, self.block = cache, block
        depth, slots, kv_heads, capacity, size = cache.keys.shape
        self.keys = cache.keys.new_zeros(depth, slots, kv_heads, capacity // block, size)
        self.values = torch.zeros_like(self.keys) if values else None
        self.variances = torch.zeros_like(self.keys) if variances else None
        self._known = [0] * slots  # blocks whose means are made

    @staticmethod
    def of(cache: Cache, plan: AttentionPlan) -> Means:
        return Means(cache, plan.block, plan.rest == "mean", plan.score == "reach")

    def variances_of(self, layer: int) -> Tensor | None:
        return None if self.variances is None else self.variances[layer]

    def update(self, slot: int, length: int) -> None:
        """Make what is missing for the first `length` tokens of a slot, all of which are in the cache."""
        known, full = min(self._known[slot], self.cache.intact[slot] // self.block), length // self.block
        if full > known:
            # A draft fills a block or two: all layers at once, so that a GPU has one thing to do. A prompt fills many,
            # and there the layers take turns, since what is made on the way takes memory.
            together = self.keys.shape[0] if full - known <= FEW else 1
            for cached, made, variances in (
                (self.cache.keys, self.keys, self.variances),
                (self.cache.values, self.values, None),
            ):
                if made is None:
                    continue
                new = cached[:, slot, :, known * self.block : full * self.block].split(together)
                for i, some in enumerate(new):
                    layers = slice(i * together, (i + 1) * together)
                    self._make(some, made[layers, slot, :, known:full])
                    if variances is not None:
                        self._make(some, variances[layers, slot, :, known:full], variance=True)
        self._known[slot], self.cache.intact[slot] = full, length

    def _make(self, cached: Tensor, made: Tensor, variance: bool = False) -> None:
        wide = torch.float32 if cached.element_size() < 4 else cached.dtype
        blocks = cached.unflatten(2, (-1, self.block))
        made.copy_(blocks.to(wide).var(3, correction=0) if variance else blocks.mean(3, dtype=wide))
