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
from semspec.model.weights import Checkpoint


@dataclass(slots=True)
class Span:
    """One sequence's part of a pass: `count` tokens, the first at position `start` of its slot."""

    slot: int
    start: int
    count: int


@dataclass(slots=True)
class Linear:
    weight: Tensor  # [out, in]
    bias: Tensor | None = None

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


@dataclass(slots=True)
class Layer:
    attention_norm: Tensor  # [width]
    qkv: Linear  # queries, keys and values in one product
    query_norm: Tensor | None  # [head_dim]
    key_norm: Tensor | None
    out: Linear
    ffn_norm: Tensor  # [width]
    gate_up: Linear  # gate and up projections in one product
    down: Linear


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

        def layer(i: int) -> Layer:
            at, ffn = f"model.layers.{i}.self_attn", f"model.layers.{i}.mlp"
            q, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
            normed = shape.family.qk_norm
            return Layer(
                attention_norm=read(f"model.layers.{i}.input_layernorm.weight", shape.width),
                qkv=linear([f"{at}.{x}_proj" for x in "qkv"], [q, kv, kv], shape.width, shape.qkv_bias),
                query_norm=read(f"{at}.q_norm.weight", shape.head_dim) if normed else None,
                key_norm=read(f"{at}.k_norm.weight", shape.head_dim) if normed else None,
                out=linear([f"{at}.o_proj"], [shape.width], q, shape.out_bias),
                ffn_norm=read(f"model.layers.{i}.post_attention_layernorm.weight", shape.width),
                gate_up=linear(
                    [f"{ffn}.gate_proj", f"{ffn}.up_proj"], [shape.ffn, shape.ffn], shape.width, shape.ffn_bias
                ),
                down=linear([f"{ffn}.down_proj"], [shape.width], shape.ffn, shape.ffn_bias),
            )

        self.embedding = read("model.embed_tokens.weight", shape.vocab, shape.width)
        self.layers = [layer(i) for i in range(shape.depth)]
        self.norm = read("model.norm.weight", shape.width)
        self.head = Linear(self.embedding if shape.tied else read("lm_head.weight", shape.vocab, shape.width))
        self._cos, self._sin = self._rotations(0)

    def forward(
        self, tokens: Tensor, spans: list[Span], cache: Cache, wanted: Tensor, layers: Iterable[int] = ()
    ) -> tuple[Tensor, dict[int, Tensor]]:
        """Run packed tokens [N] through the model.

        Returns logits of the rows `wanted` [M] of N as [M, V], and the hidden states [M, width] of the given layers:
        0 is the embedding, i the residual stream after layer i, and the last the one after the final norm.
        """
        kept: dict[int, Tensor] = {}
        want = set(layers)
        cos, sin = self._rotation_of(spans)
        x = F.embedding(tokens, self.embedding)  # [N, width]
        for i, layer in enumerate(self.layers):
            if i in want:
                kept[i] = x[wanted]
            x = x + self._attention(layer, i, self._norm(x, layer.attention_norm), spans, cache, cos, sin)
            gate, up = layer.gate_up(self._norm(x, layer.ffn_norm)).chunk(2, dim=-1)
            x = x + layer.down(F.silu(gate) * up)
        x = self._norm(x[wanted], self.norm)
        if len(self.layers) in want:
            kept[len(self.layers)] = x
        return self.head(x), kept

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x, weight.shape, weight, self.shape.norm_eps)

    def _attention(
        self, layer: Layer, i: int, x: Tensor, spans: list[Span], cache: Cache, cos: Tensor, sin: Tensor
    ) -> Tensor:
        s = self.shape
        q, k, v = layer.qkv(x).split([s.heads * s.head_dim, *[s.kv_heads * s.head_dim] * 2], dim=-1)
        q = q.view(-1, s.heads, s.head_dim)
        k, v = k.view(-1, s.kv_heads, s.head_dim), v.view(-1, s.kv_heads, s.head_dim)  # [N, heads, head_dim]
        if layer.query_norm is not None and layer.key_norm is not None:
            q, k = self._norm(q, layer.query_norm), self._norm(k, layer.key_norm)
        q, k = _rotate(q, cos, sin), _rotate(k, cos, sin)
        outs, row = [], 0
        for span in spans:
            rows = slice(row, row := row + span.count)
            end = span.start + span.count
            keys, values = cache.keys[i, span.slot], cache.values[i, span.slot]  # [kv_heads, capacity, head_dim]
            keys[:, span.start : end] = k[rows].transpose(0, 1)
            values[:, span.start : end] = v[rows].transpose(0, 1)
            outs.append(_attend(q[rows], keys[:, :end], values[:, :end]))
        return layer.out(torch.cat(outs).flatten(1))

    def _rotation_of(self, spans: list[Span]) -> tuple[Tensor, Tensor]:
        """cos and sin [N, 1, head_dim / 2] at every token's position."""
        end = max(s.start + s.count for s in spans)
        if end > len(self._cos):
            self._cos, self._sin = self._rotations(max(end, 2 * len(self._cos)))
        at = [slice(s.start, s.start + s.count) for s in spans]
        return torch.cat([self._cos[a] for a in at])[:, None], torch.cat([self._sin[a] for a in at])[:, None]

    def _rotations(self, length: int) -> tuple[Tensor, Tensor]:
        """The tables of rotations for positions below `length`; they grow as sequences do."""
        inv_freq = torch.tensor(self.shape.inv_freq, device=self.device)
        angles = torch.arange(length, device=self.device, dtype=torch.float32)[:, None] * inv_freq
        gain = self.shape.rope_gain
        return (angles.cos() * gain).to(self.dtype), (angles.sin() * gain).to(self.dtype)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the two halves of every head against each other. x [N, heads, head_dim]"""
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)


def _attend(q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """New queries [n, heads, d] over everything up to them: keys, values [kv_heads, length, d] -> [n, heads, d]."""
    n, length = q.shape[0], keys.shape[1]
    mask = None
    if n > 1:  # query i is token length - n + i
        positions = torch.arange(length, device=q.device)
        mask = positions <= positions[length - n :, None]  # [n, length]
    out = F.scaled_dot_product_attention(
        q.transpose(0, 1)[None], keys[None], values[None], attn_mask=mask, enable_gqa=q.shape[1] != keys.shape[0]
    )
    return out[0].transpose(0, 1)
