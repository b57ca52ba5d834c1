"""The decoder layer: its weights, and the parts of a pass that are the same in models and in draft heads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from semspec.model.attention_metadata import AttentionMetadata, RotaryTables, SequenceChunk
from semspec.model.config import AttentionSpec, Shape
from semspec.model.experts import ACTIVATE, Experts, FeedForward
from semspec.model.layer_ops import DENSE, LayerOps
from semspec.model.linear import DenseLinear, Linear
from semspec.model.placement import numbered
from semspec.model.weight_loader import WeightLoader


@dataclass(slots=True)
class Layer:
    attention_spec: AttentionSpec
    attention_norm: Tensor  # [width]
    qkv: Linear  # queries, keys and values in one product
    query_norm: Tensor | None  # [head_dim]
    key_norm: Tensor | None
    out: Linear
    attention_out_norm: Tensor | None  # [width]
    ffn_norm: Tensor  # [width]
    ffn: FeedForward | Experts
    ffn_out_norm: Tensor | None  # [width]


class KeysAndValues(Protocol):
    def write(self, layer: int, chunk: SequenceChunk, k: Tensor, v: Tensor, begin: int) -> tuple[Tensor, Tensor]:
        """New keys and values into a sequence's slot; returns those from `begin` on. See `cache.Cache`."""
        ...


class LayerReader:
    """Reads the layers of a checkpoint, in the names of its family."""

    def __init__(self, shape: Shape, loader: WeightLoader) -> None:
        self.shape, self.loader = shape, loader

    def norm(self, name: str, size: int | None = None) -> Tensor:
        return self.loader.read(f"{name}.weight", size or self.shape.width) + self.shape.family.norm_offset

    def layer(self, i: int, at: str, inputs: int | None = None) -> Layer:
        """Layer i, whose tensors' names begin with `at`; `inputs`: the width of what its attention reads."""
        shape, family, norm, linear = self.shape, self.shape.family, self.norm, self.loader.linear
        q, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        sizes = [q, kv, kv] if len(family.qkv) == 3 else [q + 2 * kv]
        return Layer(
            attention_spec=shape.attention_specs[i],
            attention_norm=norm(f"{at}.{family.attention_norm}"),
            qkv=linear([f"{at}.{name}" for name in family.qkv], sizes, inputs or shape.width, shape.qkv_bias),
            query_norm=norm(f"{at}.self_attn.q_norm", shape.head_dim) if family.qk_norm else None,
            key_norm=norm(f"{at}.self_attn.k_norm", shape.head_dim) if family.qk_norm else None,
            out=linear([f"{at}.self_attn.o_proj"], [shape.width], q, shape.out_bias),
            attention_out_norm=norm(f"{at}.{family.attention_out_norm}") if family.attention_out_norm else None,
            ffn_norm=norm(f"{at}.{family.ffn_norm}"),
            ffn=self._ffn(at, i),
            ffn_out_norm=norm(f"{at}.{family.ffn_out_norm}") if family.ffn_out_norm else None,
        )

    def _ffn(self, at: str, i: int) -> FeedForward | Experts:
        shape, family, mixture = self.shape, self.shape.family, self.shape.mixture
        if mixture is None or i in mixture.dense_layers:
            names = [f"{at}.{name}" for name in family.gate_up]
            return self._feed_forward(names, f"{at}.mlp.down_proj", shape.ffn, shape.ffn_bias)
        experts = []
        for e in range(mixture.experts):
            gate, up, down = (f"{at}.{name.format(e=e)}" for name in family.expert)
            experts.append(self._feed_forward([gate, up], down, mixture.ffn))
        router = self.loader.read(f"{at}.{family.router}.weight", mixture.experts, shape.width)
        made = Experts(DenseLinear(router), experts, mixture.chosen, mixture.renormalise)
        if self.loader.device.type == "cuda":  # now, while only one layer has to fit twice
            made.pack()
        return made

    def _feed_forward(self, gate_up: Sequence[str], down: str, size: int, biased: bool = False) -> FeedForward:
        linear, width = self.loader.linear, self.shape.width
        return FeedForward(
            linear(gate_up, [2 * size // len(gate_up)] * len(gate_up), width, biased),
            linear([down], [width], size, biased),
            ACTIVATE[self.shape.activation],
        )


class LayerMath:
    """Norms and attention over a packed row of tokens."""

    def __init__(self, shape: Shape, device: torch.device, dtype: torch.dtype) -> None:
        self.shape, self.device, self.dtype = shape, numbered(device), dtype
        rotaries = {spec.rotary for spec in shape.attention_specs}
        self.rotary_tables = {rotary: RotaryTables(rotary, device, dtype) for rotary in rotaries}
        self._floors: dict[int, Tensor] = {}

    def norm(self, x: Tensor, weight: Tensor) -> Tensor:
        if x.is_cuda:
            return F.rms_norm(x, weight.shape, weight, self.shape.norm_eps)
        # On a CPU F.rms_norm is several times as many operations, and small models are bound by their number.
        # hypot gives sqrt(|x|^2 + width * eps), which is sqrt(width) times the root mean square.
        size = x.shape[-1]
        y = x if x.dtype == torch.float32 else x.float()
        length = torch.linalg.vector_norm(y, dim=-1, keepdim=True).hypot_(self._floor(size))
        return (y * length.reciprocal_().mul_(size**0.5)).to(x.dtype).mul_(weight)

    def _floor(self, size: int) -> Tensor:
        if size not in self._floors:
            self._floors[size] = torch.tensor((size * self.shape.norm_eps) ** 0.5)
        return self._floors[size]

    def attend(
        self,
        layer: Layer,
        i: int,
        x: Tensor,
        metadata: AttentionMetadata,
        cache: KeysAndValues,
        layer_ops: LayerOps = DENSE,
    ) -> Tensor:
        """Attention of every sequence over its own slot. [N, inputs] -> [N, heads * head_dim]"""
        q, k, v = self.project(layer, x, metadata)
        outs, row = [], 0
        masks = metadata.masks(layer.attention_spec)
        for n, (chunk, (begin, mask)) in enumerate(zip(metadata.chunks, masks, strict=True)):
            rows = slice(row, row := row + chunk.count)
            keys, values = cache.write(i, chunk, k[rows], v[rows], begin)
            own = q[rows].transpose(0, 1).to(keys.dtype)
            outs.append(layer_ops.attend(i, n, own, keys, values, mask, self.shape.attention_scale))
        return (outs[0] if len(outs) == 1 else torch.cat(outs, dim=1)).transpose(0, 1).flatten(1).to(x.dtype)

    def project(self, layer: Layer, x: Tensor, metadata: AttentionMetadata) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values of every token, [N, heads, head_dim] each, at their positions."""
        s = self.shape
        heads = layer.qkv(x).view(-1, s.heads + 2 * s.kv_heads, s.head_dim)
        qk, v = heads.split([s.heads + s.kv_heads, s.kv_heads], dim=1)
        if layer.query_norm is not None and layer.key_norm is not None:
            q, k = qk.split([s.heads, s.kv_heads], dim=1)
            qk = torch.cat([self.norm(q, layer.query_norm), self.norm(k, layer.key_norm)], dim=1)
        q, k = metadata.rotate(qk, layer.attention_spec).split([s.heads, s.kv_heads], dim=1)
        return q, k, v
