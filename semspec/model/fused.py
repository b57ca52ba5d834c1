"""A transformer's pass on a GPU: the same weights in fewer launches, and nothing in it that the host must see.

Every shape is fixed by (B sequences, Q tokens each, padded); which slots, where in them and how many tokens count is
read on the device. So a pass can be captured once and replayed while sequences grow.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from semspec.model.cache import Cache
from semspec.model.config import Rotary, Shape
from semspec.model.experts import FeedForward, Linear
from semspec.model.int8 import Int8Linear
from semspec.model.kernels import Kernels
from semspec.model.transformer import Transformer
from semspec.model.way import Blocks

LARGEST_HEAD = 256
FEW_ROWS = 16
SKINNY_BYTES = 0  # weights up to this size are multiplied by kernels/products.py; none until a GPU has shown it faster


@dataclass(slots=True)
class Places:
    """Where the new tokens of B sequences belong; all [B]."""

    slots: Tensor
    starts: Tensor  # place of the first new token
    counts: Tensor  # how many there are; 0: this row of the batch has nothing to do


def covers(shape: Shape) -> bool:
    """Experts are chosen on the host, layer by layer; no family has other parts than these."""
    return shape.mixture is None and shape.head_dim <= LARGEST_HEAD


class Fused:
    def __init__(self, transformer: Transformer, cache: Cache, kernels: Kernels) -> None:
        self.skinny_bytes = SKINNY_BYTES
        self.shape, self.transformer, self.cache, self.kernels = transformer.shape, transformer, cache, kernels
        device = transformer.device
        self.turns = {s.rotary: _turns(s.rotary, cache.capacity, device) for s in set(self.shape.sights)}

    def forward(
        self,
        tokens: Tensor,
        places: Places,
        layers: Iterable[int] = (),
        last: bool = False,
        blocks: Blocks | None = None,
    ) -> tuple[Tensor, dict[int, Tensor]]:
        """Feed tokens [B, Q]. Returns what the head reads for each token, [B, Q, width], and hidden states as
        `Transformer.forward` counts them; with `last`, of each sequence's last token only, [B, 1, width]. `blocks`
        says which of the cache are to be seen, if not all."""
        t, s, k = self.transformer, self.shape, self.kernels
        batch, queries = tokens.shape
        where = (places.slots, places.starts, places.counts)
        want, kept = set(layers), dict[int, Tensor]()
        x = F.embedding(tokens.flatten(), t.embedding)  # [N, width]
        if t.embedding_scale is not None:
            x = x * t.embedding_scale
        added: Tensor | None = None
        inner: Tensor | None = None
        for i, layer in enumerate(t.layers):
            normed = k.add_norm(x, added, layer.attention_norm, s.norm_eps, inner)
            if i in want:
                kept[i] = x.clone()
            keys, values = self.cache.keys[i], self.cache.values[i]
            qkv = self._product(layer.qkv, normed).view(batch, queries, -1, s.head_dim)
            norms = None
            if layer.query_norm is not None and layer.key_norm is not None:
                norms = (layer.query_norm, layer.key_norm)
            turns = self.turns[layer.sight.rotary]
            q = k.turn_and_keep(qkv, keys, values, *where, turns, s.heads, norms, s.norm_eps)
            chosen = None if blocks is None else blocks(i, q, *where)
            seen = k.attend(q, keys, values, *where, s.attention_scale, layer.sight.window, chosen=chosen)
            added = self._product(layer.out, seen.view(batch * queries, -1), parts=True)
            normed = k.add_norm(x, added, layer.ffn_norm, s.norm_eps, layer.attention_out_norm)
            assert isinstance(layer.ffn, FeedForward)
            active = k.gated(self._product(layer.ffn.gate_up, normed), s.activation)
            added = self._product(layer.ffn.down, active, parts=True)
            inner = layer.ffn_out_norm
        if last and queries > 1:
            at = torch.arange(batch, device=tokens.device) * queries + (places.counts - 1).clamp_min(0)
            x, added = x[at], None if added is None else added[..., at, :].contiguous()
            kept = {i: states[at] for i, states in kept.items()}
        normed = k.add_norm(x, added, t.norm, s.norm_eps, inner)
        if s.depth in want:
            kept[s.depth] = normed
        return normed.view(batch, -1, s.width), {i: h.view(batch, -1, s.width) for i, h in kept.items()}

    def _product(self, linear: Linear | Int8Linear, x: Tensor, parts: bool = False) -> Tensor:
        """By cuBLAS, or by a kernel of ours for few rows and small weights; `parts`: add_norm reads it."""
        assert isinstance(linear, Linear)
        if x.shape[0] <= FEW_ROWS and linear.weight.nbytes <= self.skinny_bytes:
            return self.kernels.product(x, linear.weight, linear.bias, parts)
        return linear(x)

    def head(self, normed: Tensor, out: Tensor) -> Tensor:
        """[B, Q, width] -> logits [B, Q, V], in the buffer given, of at least B x Q rows."""
        rows = normed.flatten(0, 1)
        assert isinstance(self.transformer.head, Linear)
        logits = torch.mm(rows, self.transformer.head.weight.t(), out=out[: len(rows)])
        return logits.view(*normed.shape[:2], -1)


def _turns(rotary: Rotary | None, length: int, device: torch.device) -> tuple[Tensor, Tensor] | None:
    """Cosines and sines [length, half of the turned dimensions], float32."""
    if rotary is None:
        return None
    inv_freq = torch.tensor(rotary.inv_freq, device=device)
    angles = torch.arange(length, device=device, dtype=torch.float32)[:, None] * inv_freq
    return angles.cos() * rotary.gain, angles.sin() * rotary.gain
