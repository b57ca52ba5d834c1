"""One readable decoder-only transformer, run over a ragged batch of sequences that each have their own cache slot.

All tokens of a pass lie in one packed row of N; projections and norms see only that. Attention is the one place where
sequences matter: each attends to its own slot. What differs between families is read from `Shape`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from semspec.model.cache import Cache
from semspec.model.config import Shape
from semspec.model.experts import Experts, FeedForward, Linear
from semspec.model.weights import Checkpoint


@dataclass(slots=True)
class Span:
    """One sequence's part of a pass: `count` tokens, the first at position `start` of its slot."""

    slot: int
    start: int
    count: int


@dataclass(slots=True)
class Layer:
    attention_norm: Tensor  # [width]
    qkv: Linear  # queries, keys and values in one product
    query_norm: Tensor | None  # [head_dim]
    key_norm: Tensor | None
    out: Linear
    ffn_norm: Tensor  # [width]
    ffn: FeedForward | Experts


class Transformer:
    def __init__(self, shape: Shape, checkpoint: Checkpoint, device: torch.device, dtype: torch.dtype) -> None:
        self.shape, self.device, self.dtype = shape, device, dtype

        def read(name: str, *size: int) -> Tensor:
            return checkpoint.read(name, size, device, dtype)

        def linear(names: Iterable[str], sizes: Iterable[int], width: int, biased: bool) -> Linear:
            """Several projections of the same input, packed into one."""
            pairs = list(zip(names, sizes, strict=True))
            weight = torch.cat([read(f"{n}.weight", size, width) for n, size in pairs])
            bias = torch.cat([read(f"{n}.bias", size) for n, size in pairs]) if biased else None
            return Linear(weight, bias)

        def feed_forward(names: tuple[str, str, str], size: int, biased: bool = False) -> FeedForward:
            gate, up, down = names
            return FeedForward(
                linear([gate, up], [size, size], shape.width, biased), linear([down], [shape.width], size, biased)
            )

        def ffn(at: str, i: int) -> FeedForward | Experts:
            mixture = shape.mixture
            if mixture is None or i in mixture.dense_layers:
                return feed_forward(
                    (f"{at}.mlp.gate_proj", f"{at}.mlp.up_proj", f"{at}.mlp.down_proj"), shape.ffn, shape.ffn_bias
                )
            gate, up, down = (f"{at}.{name}" for name in shape.family.expert)
            experts = [
                feed_forward((gate.format(e=e), up.format(e=e), down.format(e=e)), mixture.ffn)
                for e in range(mixture.experts)
            ]
            router = linear([f"{at}.{shape.family.router}"], [mixture.experts], shape.width, False)
            return Experts(router, experts, mixture.chosen, mixture.renormalise)

        def layer(i: int) -> Layer:
            at = f"model.layers.{i}.self_attn"
            q, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
            normed = shape.family.qk_norm
            return Layer(
                attention_norm=read(f"model.layers.{i}.input_layernorm.weight", shape.width),
                qkv=linear([f"{at}.{x}_proj" for x in "qkv"], [q, kv, kv], shape.width, shape.qkv_bias),
                query_norm=read(f"{at}.q_norm.weight", shape.head_dim) if normed else None,
                key_norm=read(f"{at}.k_norm.weight", shape.head_dim) if normed else None,
                out=linear([f"{at}.o_proj"], [shape.width], q, shape.out_bias),
                ffn_norm=read(f"model.layers.{i}.post_attention_layernorm.weight", shape.width),
                ffn=ffn(f"model.layers.{i}", i),
            )

        self.embedding = read("model.embed_tokens.weight", shape.vocab, shape.width)
        self.layers = [layer(i) for i in range(shape.depth)]
        self.norm = read("model.norm.weight", shape.width)
        self.head = Linear(self.embedding if shape.tied else read("lm_head.weight", shape.vocab, shape.width))
        self._cos, self._sin = self._rotations(0)
        self._floor = {n: torch.tensor((n * shape.norm_eps) ** 0.5) for n in (shape.width, shape.head_dim)}

    def forward(
        self, tokens: Tensor, spans: list[Span], cache: Cache, wanted: Tensor, layers: Iterable[int] = ()
    ) -> tuple[Tensor, dict[int, Tensor]]:
        """Run packed tokens [N] through the model.

        Returns logits of the rows `wanted` [M] of N as [M, V], and the hidden states [M, width] of the given layers:
        0 is the embedding, i the residual stream after layer i, and the last the one after the final norm.
        """
        kept: dict[int, Tensor] = {}
        want = set(layers)
        rotation = self._rotation_of(spans)
        masks = [_causal_mask(span, self.device) for span in spans]
        x = F.embedding(tokens, self.embedding)  # [N, width]
        for i, layer in enumerate(self.layers):
            if i in want:
                kept[i] = x[wanted]
            attended = self._attend(layer, i, self._norm(x, layer.attention_norm), spans, masks, cache, rotation)
            x = x + layer.out(attended)
            x = x + layer.ffn(self._norm(x, layer.ffn_norm))
        x = self._norm(x[wanted], self.norm)
        if len(self.layers) in want:
            kept[len(self.layers)] = x
        return self.head(x), kept

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        if x.is_cuda:
            return F.rms_norm(x, weight.shape, weight, self.shape.norm_eps)
        # On a CPU torch's own takes several times the operations of this, and small models are bound by their number.
        # hypot gives sqrt(|x|^2 + width * eps), which is sqrt(width) times the root mean square.
        size = x.shape[-1]
        y = x.float()
        length = torch.linalg.vector_norm(y, dim=-1, keepdim=True).hypot(self._floor[size])
        return (y * (size**0.5 / length)).to(x.dtype) * weight

    def _attend(
        self,
        layer: Layer,
        i: int,
        x: Tensor,
        spans: list[Span],
        masks: list[Tensor | None],
        cache: Cache,
        rotation: tuple[Tensor, Tensor],
    ) -> Tensor:
        """Attention of every sequence over its own slot. [N, width] -> [N, heads * head_dim]"""
        s = self.shape
        heads = layer.qkv(x).view(-1, s.heads + 2 * s.kv_heads, s.head_dim)  # [N, q heads + k heads + v heads, d]
        turning, v = heads.split([s.heads + s.kv_heads, s.kv_heads], dim=1)
        if layer.query_norm is not None and layer.key_norm is not None:
            q, k = turning.split([s.heads, s.kv_heads], dim=1)
            turning = torch.cat([self._norm(q, layer.query_norm), self._norm(k, layer.key_norm)], dim=1)
        q, k = _rotate(turning, *rotation).split([s.heads, s.kv_heads], dim=1)
        outs, row = [], 0
        for span, mask in zip(spans, masks, strict=True):
            rows = slice(row, row := row + span.count)
            end = span.start + span.count
            slot_keys, slot_values = cache.view(i, span.slot)
            keys, values = slot_keys[:, :end], slot_values[:, :end]  # [kv heads, end, d]
            keys[:, span.start :] = k[rows].transpose(0, 1)
            values[:, span.start :] = v[rows].transpose(0, 1)
            outs.append(_attention(q[rows].transpose(0, 1), keys, values, mask))
        return (outs[0] if len(outs) == 1 else torch.cat(outs, dim=1)).transpose(0, 1).flatten(1)

    def _rotation_of(self, spans: list[Span]) -> tuple[Tensor, Tensor]:
        """cos and sin [N, 1, head_dim] at every token's position."""
        end = max(s.start + s.count for s in spans)
        if end > len(self._cos):
            self._cos, self._sin = self._rotations(max(end, 2 * len(self._cos)))
        at = [slice(s.start, s.start + s.count) for s in spans]
        if len(at) == 1:
            return self._cos[at[0]], self._sin[at[0]]
        return torch.cat([self._cos[a] for a in at]), torch.cat([self._sin[a] for a in at])

    def _rotations(self, length: int) -> tuple[Tensor, Tensor]:
        """The tables [length, 1, head_dim] of rotations; they grow as sequences do."""
        inv_freq = torch.tensor(self.shape.inv_freq, device=self.device)
        angles = torch.arange(length, device=self.device, dtype=torch.float32)[:, None] * inv_freq
        cos, sin = angles.cos() * self.shape.rope_gain, angles.sin() * self.shape.rope_gain
        return torch.cat([cos, cos], -1)[:, None].to(self.dtype), torch.cat([-sin, sin], -1)[:, None].to(self.dtype)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the halves (a, b) of every head: (a cos - b sin, b cos + a sin). x [N, heads, d], sin carries the signs"""
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, dims=-1), sin)


def _causal_mask(span: Span, device: torch.device) -> Tensor | None:
    """[count, start + count] what each new token may see; a single one sees everything."""
    if span.count == 1:
        return None
    positions = torch.arange(span.start + span.count, device=device)
    return positions <= positions[span.start :, None]


def _attention(q: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> Tensor:
    """q [heads, n, d] over keys and values [kv heads, length, d] -> [heads, n, d]"""
    grouped = q.shape[0] != keys.shape[0]
    return F.scaled_dot_product_attention(q[None], keys[None], values[None], attn_mask=mask, enable_gqa=grouped)[0]
