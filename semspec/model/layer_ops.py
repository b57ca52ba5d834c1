"""How a pass goes about the two halves of a layer. This one leaves nothing out; `semspec.sparse` has one that does."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch.nn.functional as F
from torch import Tensor

from semspec.model.attention_metadata import SequenceChunk
from semspec.model.experts import Experts, FeedForward
from semspec.model.kernels import Kernels, SelectedBlocks
from semspec.types import Score


class LayerOps:
    def attend(
        self, layer: int, place: int, q: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scale: float
    ) -> Tensor:
        """Attention of the pass's sequence number `place`: q [heads, n, d] over keys and values [kv heads, length, d],
        the new tokens' own at their end; `mask` [n, length] says who sees what. -> [heads, n, d]"""
        grouped = q.shape[0] != keys.shape[0]
        return F.scaled_dot_product_attention(
            q[None], keys[None], values[None], attn_mask=mask, scale=scale, enable_gqa=grouped
        )[0]

    def feed(self, layer: int, ffn: FeedForward | Experts, x: Tensor) -> Tensor:
        """[N, width] -> the same, all tokens of the pass"""
        return ffn(x)


DENSE = LayerOps()


Blocks = Callable[[int, Tensor, Tensor, Tensor, Tensor], SelectedBlocks | None]
"""(layer, its queries [B, Q, heads, d], slots, starts, counts, all [B]) -> blocks to see; None: all."""


@dataclass(frozen=True, slots=True)
class SparsityInputs:
    """What one fused pass leaves out, of sequences that are marked. Everything on the device that may change from pass
    to pass is in tensors."""

    marks: Tensor  # [B]; 0: this sequence gets everything
    blocks: Blocks | None = None
    betas: Tensor | None = None  # [depth, chosen - 1], of `experts.skip`
    most: int = 0
    thresholds: Sequence[float] = ()  # of gate activations, by layer; 0: all channels
    columns: Sequence[Tensor | None] = ()  # by layer: down projections transposed, [channels, width]


class Sparsity(Protocol):
    """What a runner skips when it verifies drafts; semspec.sparse implements it."""

    fusible: bool  # fused passes can skip what this skips

    def split_prefill(self, requests: Sequence[Score]) -> tuple[list[Score], list[Score]]:
        """(what to prefill densely before the pass, the requests without it)"""
        ...

    def prepare(self, requests: Sequence[Score]) -> list[Score]:
        """The requests, some extended by earlier tokens to be recomputed; called before slots are extended."""
        ...

    def layer_ops(self, requests: Sequence[Score], spans: list[SequenceChunk]) -> LayerOps:
        """For a pass over these requests; called before it writes into the cache."""
        ...

    def sparse_flags(self, requests: Sequence[Score], starts: Sequence[int]) -> list[int] | None:
        """For a fused pass: 1 for sequences with something skipped; None: there are none."""
        ...

    def pair_budgets(self, requests: Sequence[Score], starts: Sequence[int]) -> list[int] | None:
        """For a fused pass: (head, block) pairs that each sequence may attend to; None: all of them."""
        ...

    def inputs(self, flags: Tensor, pairs: Tensor | None, kernels: Kernels) -> SparsityInputs:
        """For one fused pass with these kernels; flags and pairs are on the device, [B]."""
        ...

    def record(self, slot: int, start: int, tokens: Sequence[int], checked: bool = False) -> None:
        """A pass wrote these tokens into the cache; `checked`: it verified a draft."""
        ...

    def copied(self, source: int, target: int) -> None:
        """The target slot holds a prefix of the source now."""
        ...


def checks(request: Score) -> bool:
    """Whether a request checks a draft: it wants a row for every token, and has more than one."""
    return request.keep == len(request.tokens) > 1
