"""The two halves of a layer, attention and feed-forward, as a pass runs them; `semspec.sparse` overrides them."""

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
        self, layer: int, sequence: int, q: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scale: float
    ) -> Tensor:
        """Attention of one sequence of the pass: q [heads, n, d] over keys and values [kv heads, length, d], of which
        the last n are the new tokens'; `mask` is [n, length]. -> [heads, n, d]"""
        grouped = q.shape[0] != keys.shape[0]
        if grouped and q.shape[1] == 1 and mask is None:  # as rows: in bfloat16 on a CPU a fifth of the time
            rows = q.view(keys.shape[0], -1, q.shape[2])
            return F.scaled_dot_product_attention(rows[None], keys[None], values[None], scale=scale).reshape(q.shape)
        return F.scaled_dot_product_attention(
            q[None], keys[None], values[None], attn_mask=mask, scale=scale, enable_gqa=grouped
        )[0]

    def feed(self, layer: int, ffn: FeedForward | Experts, x: Tensor) -> Tensor:
        """[N, width] -> the same, all tokens of the pass"""
        return ffn(x)


DENSE = LayerOps()


Blocks = Callable[[int, Tensor, Tensor, Tensor, Tensor], SelectedBlocks | None]
"""(layer, its queries [B, Q, heads, d], slots, starts, counts, all [B]) -> blocks to attend to; None: all."""


@dataclass(frozen=True, slots=True)
class SparsityInputs:
    """What a fused pass leaves out for the marked sequences. What changes from pass to pass is in tensors on the
    device: a graph is captured once."""

    marks: Tensor  # [B]; 0: nothing is left out for this sequence
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

    def kept(self, slot: int, start: int, rows: Sequence[int]) -> None:
        """Of the tokens from `start` on the slot has only these now."""
        ...

    def copied(self, source: int, target: int) -> None:
        """The target slot holds a prefix of the source now."""
        ...


def checks(request: Score) -> bool:
    """Whether a request scores a draft: it has several tokens and wants a row for each."""
    return not request.dense and request.logits_to_keep == len(request.tokens) > 1
