"""Statistics of KV cache blocks: means of keys and values, variances of keys."""

from __future__ import annotations

import torch
from torch import Tensor

from semspec.model.cache import Cache
from semspec.sparse.attention import AttentionPlan

BATCHED_BLOCKS = 16  # up to so many new blocks are computed for all layers at once


class BlockStatistics:
    """The mean key of every whole block in a cache, [depth, slots, kv heads, blocks, d]; optionally its mean value, and
    the variance of its keys in each channel. Computed when first needed, and again for blocks that were truncated and
    rewritten."""

    def __init__(self, cache: Cache, block: int, values: bool = False, variances: bool = False) -> None:
        self.cache, self.block = cache, block
        keys, slots = cache.layer(0).keys, cache.slots
        _, kv_heads, _, size = keys.shape
        self.keys = keys.new_zeros(cache.num_layers, slots, kv_heads, cache.capacity // block, size, dtype=cache.dtype)
        self._layers = len(cache.whole_layers)  # blocks are selected in these only
        # Which they are, if not all: on the device, since to bring it there waits.
        self._which = torch.tensor(cache.whole_layers, device=keys.device) if self._layers < cache.num_layers else None
        self.values = torch.zeros_like(self.keys) if values else None
        self.variances = torch.zeros_like(self.keys) if variances else None
        self._computed = [0] * slots  # blocks, by slot

    @staticmethod
    def of(cache: Cache, plan: AttentionPlan) -> BlockStatistics:
        return BlockStatistics(cache, plan.block, plan.rest == "mean", plan.score == "reach")

    def variances_of(self, layer: int) -> Tensor | None:
        return None if self.variances is None else self.variances[layer]

    def restart(self) -> None:
        """Compute everything again when it is next needed."""
        self._computed = [0] * len(self._computed)

    def update(self, slot: int, length: int) -> None:
        """Compute what is missing for the first `length` tokens of a slot, all of which are in the cache."""
        start, end = min(self._computed[slot], self.cache.intact[slot] // self.block), length // self.block
        if end > start and self._layers:
            # A draft fills a block or two: all layers at once, one launch on a GPU. A prompt fills many: layer by
            # layer, since intermediate results take memory.
            depth = self._layers if end - start <= BATCHED_BLOCKS else 1
            keys, values = self.cache.between(slot, start * self.block, end * self.block, whole=True)
            for cached, means, variances in ((keys, self.keys, self.variances), (values, self.values, None)):
                if means is None:
                    continue
                for i, some in enumerate(cached.split(depth)):
                    some_layers = slice(i * depth, (i + 1) * depth)
                    layers = some_layers if self._which is None else self._which[some_layers]
                    at = (layers, slot, slice(None), slice(start, end))
                    # Half precision would overflow or lose digits in the sums.
                    wide = torch.float32 if some.element_size() < 4 else some.dtype
                    blocks = some.unflatten(2, (-1, self.block))
                    means[at] = blocks.mean(3, dtype=wide)
                    if variances is not None:
                        variances[at] = blocks.to(wide).var(3, correction=0)
        self._computed[slot], self.cache.intact[slot] = end, length
