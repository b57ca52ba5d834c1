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
from semspec.model.experts import Experts, FeedForward, Linear
from semspec.model.int8 import Int8Linear
from semspec.model.kernels import KernelFlags, Kernels
from semspec.model.layer_ops import SparsityInputs
from semspec.model.transformer import Layer, Transformer

LARGEST_HEAD = 256
FEW_ROWS = 16


@dataclass(slots=True)
class BatchMetadata:
    """Where the new tokens of B sequences belong; all [B]."""

    slots: Tensor
    starts: Tensor  # place of the first new token
    counts: Tensor  # how many there are; 0: this row of the batch has nothing to do


def covers(shape: Shape) -> bool:
    """No family has other parts than these."""
    return shape.head_dim <= LARGEST_HEAD


class FusedForward:
    def __init__(self, transformer: Transformer, cache: Cache, kernels: Kernels, choices: KernelFlags) -> None:
        self.choices = choices
        self.small = all(_weight(layer) <= choices.small for layer in transformer.layers)
        self.shape, self.transformer, self.cache, self.kernels = transformer.shape, transformer, cache, kernels
        for layer in transformer.layers:
            if isinstance(layer.ffn, Experts) and layer.ffn.gate_up is None:
                layer.ffn.pack()
        device = transformer.device
        self.turns = {s.rotary: _turns(s.rotary, cache.capacity, device) for s in set(self.shape.sights)}

    def forward(
        self,
        tokens: Tensor,
        places: BatchMetadata,
        layers: Iterable[int] = (),
        last: bool = False,
        fewer: SparsityInputs | None = None,
    ) -> tuple[Tensor, dict[int, Tensor]]:
        """Feed tokens [B, Q]. Returns what the head reads for each token, [B, Q, width], and hidden states as
        `Transformer.forward` counts them; with `last`, of each sequence's last token only, [B, 1, width]. `fewer`
        says what is to be left out."""
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
            qkv = self._read(x, added, layer.attention_norm, inner, layer.qkv)
            if i in want:
                kept[i] = x.clone()
            keys, values = self.cache.keys[i], self.cache.values[i]
            qkv = qkv.view(batch, queries, -1, s.head_dim)
            norms = None
            if layer.query_norm is not None and layer.key_norm is not None:
                norms = (layer.query_norm, layer.key_norm)
            turns = self.turns[layer.sight.rotary]
            turning, looking = (turns, s.heads, norms, s.norm_eps), (s.attention_scale, layer.sight.window)
            if queries == 1 and self.choices.turn:
                seen = k.rope_cache_attend(qkv, keys, values, *where, *turning, *looking)
            else:
                q = k.rope_and_cache(qkv, keys, values, *where, *turning)
                chosen = None if fewer is None or fewer.blocks is None else fewer.blocks(i, q, *where)
                seen = k.attend(q, keys, values, *where, *looking, chosen=chosen)
            added = self._product(layer.out, seen.view(batch * queries, -1), parts=True)
            added = self._feed(i, layer, x, added, places.counts, fewer)
            inner = layer.ffn_out_norm
        if last and queries > 1:
            at = torch.arange(batch, device=tokens.device) * queries + (places.counts - 1).clamp_min(0)
            x, added = x[at], None if added is None else added[..., at, :].contiguous()
            kept = {i: states[at] for i, states in kept.items()}
        normed = k.add_norm(x, added, t.norm, s.norm_eps, inner)
        if s.depth in want:
            kept[s.depth] = normed
        return normed.view(batch, -1, s.width), {i: h.view(batch, -1, s.width) for i, h in kept.items()}

    def _feed(
        self, i: int, layer: Layer, x: Tensor, added: Tensor, counts: Tensor, fewer: SparsityInputs | None
    ) -> Tensor:
        """What the feed-forward network makes of the residual stream's norm; the stream is added to."""
        k, ffn, activation = self.kernels, layer.ffn, self.shape.activation
        before = (layer.ffn_norm, layer.attention_out_norm)
        threshold = fewer.thresholds[i] if fewer and fewer.thresholds else 0.0
        if isinstance(ffn, FeedForward) and not threshold:
            return self._product(ffn.down, self._read(x, added, *before, ffn.gate_up, activation), parts=True)
        normed = k.add_norm(x, added, before[0], self.shape.norm_eps, before[1])
        if isinstance(ffn, Experts):
            skipping = None if fewer is None or fewer.betas is None else (fewer.betas[i], fewer.most, fewer.marks)
            logits = self._product(ffn.router, normed, parts=True)
            return k.fused_moe(
                normed, logits, ffn.gate_up, ffn.down, activation, ffn.chosen, ffn.renormalise, counts, skipping
            )
        assert fewer is not None and isinstance(ffn.gate_up, Linear) and isinstance(ffn.down, Linear)
        gate, up = ffn.gate_up.halves
        made = self._product(gate, normed)
        return k.sparse_mlp(
            normed, made, up.weight, up.bias, fewer.columns[i], ffn.down.bias, activation, threshold, counts,
            fewer.marks,
        )  # fmt: skip

    def _read(
        self,
        x: Tensor,
        added: Tensor | None,
        norm: Tensor,
        inner: Tensor | None,
        linear: Linear | Int8Linear,
        activation: str | None = None,
    ) -> Tensor:
        """The product with the residual stream's norm, perhaps through an activation; the stream is added to."""
        normed = self.kernels.add_norm(x, added, norm, self.shape.norm_eps, inner)
        within = activation if self._ours(x) and self.choices.gate else None
        made = self._product(linear, normed, activation=within)
        return made if activation is None or within else self.kernels.act_and_mul(made, activation)

    def _product(
        self, linear: Linear | Int8Linear, x: Tensor, parts: bool = False, activation: str | None = None
    ) -> Tensor:
        """By cuBLAS, or by a kernel of ours for few rows and small weights; `parts`: who reads it adds them up."""
        assert isinstance(linear, Linear)
        if self._ours(x):
            return self.kernels.product(x, linear.weight, linear.bias, parts, activation)
        return linear(x)

    def _ours(self, x: Tensor) -> bool:
        return self.small and x.shape[0] <= FEW_ROWS

    def head(self, normed: Tensor, out: Tensor) -> Tensor:
        """[B, Q, width] -> logits [B, Q, V], in the buffer given, of at least B x Q rows."""
        rows = normed.flatten(0, 1)
        assert isinstance(self.transformer.head, Linear)
        logits = torch.mm(rows, self.transformer.head.weight.t(), out=out[: len(rows)])
        return logits.view(*normed.shape[:2], -1)


def _weight(layer: Layer) -> int:
    """Bytes of a layer's matrices, without experts: those have kernels of their own, whatever their size."""
    matrices = [layer.qkv, layer.out]
    if isinstance(layer.ffn, FeedForward):
        matrices += [layer.ffn.gate_up, layer.ffn.down]
    return sum(m.weight.nbytes for m in matrices if isinstance(m, Linear))


def _turns(rotary: Rotary | None, length: int, device: torch.device) -> tuple[Tensor, Tensor] | None:
    """Cosines and sines [length, half of the turned dimensions], float32."""
    if rotary is None:
        return None
    inv_freq = torch.tensor(rotary.inv_freq, device=device)
    angles = torch.arange(length, device=device, dtype=torch.float32)[:, None] * inv_freq
    return angles.cos() * rotary.gain, angles.sin() * rotary.gain
