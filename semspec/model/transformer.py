"""A decoder-only transformer over a ragged batch of sequences, each with its own cache slot: the readable forward pass,
which runs on any device, for prompts of any length. `fused_forward.py` and `numpy_decoder.py` are faster special cases.

All tokens of a pass lie in one packed row of N; projections and norms see only that. Attention is the one place where
sequences matter: each attends to its own slot. What differs between families is read from `Shape`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from copy import copy
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from semspec.model.attention_metadata import AttentionMetadata, RotaryTables, SequenceChunk
from semspec.model.cache import Cache
from semspec.model.config import AttentionSpec, Shape
from semspec.model.experts import ACTIVATE, Experts, FeedForward
from semspec.model.layer_ops import DENSE, LayerOps
from semspec.model.limited_head import LimitedHead
from semspec.model.linear import DenseLinear, Linear
from semspec.model.placement import Precision, Weights
from semspec.model.weight_loader import Tensors, WeightLoader


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


class Transformer:
    def __init__(
        self, shape: Shape, checkpoint: Tensors, device: torch.device, dtype: torch.dtype, weights: Weights = "plain"
    ) -> None:
        self.shape, self.device, self.dtype = shape, device, dtype
        precision = Precision(dtype, weights)
        self.attention_dtype = precision.attention(device, shape.mixture is not None)
        loader = WeightLoader(checkpoint, device, precision, shape.parameters)
        family, read, linear = shape.family, loader.read, loader.linear

        def norm(name: str, size: int = shape.width) -> Tensor:
            return read(f"{name}.weight", size) + family.norm_offset

        def feed_forward(gate_up: Sequence[str], down: str, size: int, biased: bool = False) -> FeedForward:
            return FeedForward(
                linear(gate_up, [2 * size // len(gate_up)] * len(gate_up), shape.width, biased),
                linear([down], [shape.width], size, biased),
                ACTIVATE[shape.activation],
            )

        def ffn(at: str, i: int) -> FeedForward | Experts:
            mixture = shape.mixture
            if mixture is None or i in mixture.dense_layers:
                names = [f"{at}.{name}" for name in family.gate_up]
                return feed_forward(names, f"{at}.mlp.down_proj", shape.ffn, shape.ffn_bias)
            experts = []
            for e in range(mixture.experts):
                gate, up, down = (f"{at}.{name.format(e=e)}" for name in family.expert)
                experts.append(feed_forward([gate, up], down, mixture.ffn))
            router = read(f"{at}.{family.router}.weight", mixture.experts, shape.width)
            made = Experts(DenseLinear(router), experts, mixture.chosen, mixture.renormalise)
            if device.type == "cuda":  # now, while only one layer has to fit twice
                made.pack()
            return made

        def layer(i: int) -> Layer:
            at = f"model.layers.{i}"
            q, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
            sizes = [q, kv, kv] if len(family.qkv) == 3 else [q + 2 * kv]
            return Layer(
                attention_spec=shape.attention_specs[i],
                attention_norm=norm(f"{at}.{family.attention_norm}"),
                qkv=linear([f"{at}.{name}" for name in family.qkv], sizes, shape.width, shape.qkv_bias),
                query_norm=norm(f"{at}.self_attn.q_norm", shape.head_dim) if family.qk_norm else None,
                key_norm=norm(f"{at}.self_attn.k_norm", shape.head_dim) if family.qk_norm else None,
                out=linear([f"{at}.self_attn.o_proj"], [shape.width], q, shape.out_bias),
                attention_out_norm=norm(f"{at}.{family.attention_out_norm}") if family.attention_out_norm else None,
                ffn_norm=norm(f"{at}.{family.ffn_norm}"),
                ffn=ffn(at, i),
                ffn_out_norm=norm(f"{at}.{family.ffn_out_norm}") if family.ffn_out_norm else None,
            )

        self.embedding = read("model.embed_tokens.weight", shape.vocab, shape.width)
        scale = torch.tensor(shape.width**0.5, dtype=dtype, device=device)
        self.embedding_scale = scale if family.scaled_embedding else None
        self.layers = [layer(i) for i in range(shape.depth)]
        self.norm = norm("model.norm")
        self.head = loader.head(self.embedding if shape.tied else None, shape.vocab, shape.width)
        rotaries = {spec.rotary for spec in shape.attention_specs}
        self.rotary_tables = {rotary: RotaryTables(rotary, device, dtype) for rotary in rotaries}
        self._floor = {n: torch.tensor((n * shape.norm_eps) ** 0.5) for n in (shape.width, shape.head_dim)}

    def with_head(self, ids: Sequence[int]) -> Transformer:
        """The same model, on the same memory, with a head for some tokens only."""
        other = copy(self)
        other.head = LimitedHead(self.head, self.embedding if self.shape.tied else None, ids, self.shape.vocab)
        return other

    def forward(
        self,
        tokens: Tensor,
        chunks: list[SequenceChunk],
        cache: Cache,
        wanted: Tensor,
        layers: Iterable[int] = (),
        layer_ops: LayerOps = DENSE,
        observed: Tensor | None = None,
    ) -> tuple[Tensor, dict[int, Tensor]]:
        """Run packed tokens [N] through the model.

        Returns logits of the rows `wanted` [M] of N as [M, V], and the hidden states [M, width] of the given layers:
        0 is the embedding, i the residual stream after layer i, and the last the one after the final norm. States are
        those of the rows `observed`, if these are others.
        """
        hidden: dict[int, Tensor] = {}
        want = set(layers)
        metadata = AttentionMetadata(
            chunks, self.device, self.rotary_tables, flash=self.device.type == "cuda" and self.dtype.itemsize == 2
        )
        x = F.embedding(tokens, self.embedding)  # [N, width]
        if self.embedding_scale is not None:
            x = x * self.embedding_scale
        for i, layer in enumerate(self.layers):
            if i in want:
                hidden[i] = x[wanted if observed is None else observed]
            normed = self._norm(x, layer.attention_norm)
            added = layer.out(self._attend(layer, i, normed, metadata, cache, layer_ops))
            x = x + (added if layer.attention_out_norm is None else self._norm(added, layer.attention_out_norm))
            added = layer_ops.feed(i, layer.ffn, self._norm(x, layer.ffn_norm))
            x = x + (added if layer.ffn_out_norm is None else self._norm(added, layer.ffn_out_norm))
        if len(self.layers) in want and observed is not None:
            hidden[len(self.layers)] = self._norm(x[observed], self.norm)
        x = self._norm(x[wanted], self.norm)
        if len(self.layers) in want and observed is None:
            hidden[len(self.layers)] = x
        return self.head(x), hidden

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        if x.is_cuda:
            return F.rms_norm(x, weight.shape, weight, self.shape.norm_eps)
        # On a CPU F.rms_norm is several times as many operations, and small models are bound by their number.
        # hypot gives sqrt(|x|^2 + width * eps), which is sqrt(width) times the root mean square.
        size = x.shape[-1]
        y = x if x.dtype == torch.float32 else x.float()
        length = torch.linalg.vector_norm(y, dim=-1, keepdim=True).hypot_(self._floor[size])
        return (y * length.reciprocal_().mul_(size**0.5)).to(x.dtype).mul_(weight)

    def _attend(
        self, layer: Layer, i: int, x: Tensor, metadata: AttentionMetadata, cache: Cache, layer_ops: LayerOps
    ) -> Tensor:
        """Attention of every sequence over its own slot. [N, width] -> [N, heads * head_dim]"""
        s = self.shape
        heads = layer.qkv(x).view(-1, s.heads + 2 * s.kv_heads, s.head_dim)  # [N, q heads + k heads + v heads, d]
        qk, v = heads.split([s.heads + s.kv_heads, s.kv_heads], dim=1)
        if layer.query_norm is not None and layer.key_norm is not None:
            q, k = qk.split([s.heads, s.kv_heads], dim=1)
            qk = torch.cat([self._norm(q, layer.query_norm), self._norm(k, layer.key_norm)], dim=1)
        q, k = metadata.rotate(qk, layer.attention_spec).split([s.heads, s.kv_heads], dim=1)
        outs, row = [], 0
        masks = metadata.masks(layer.attention_spec)
        for n, (chunk, (begin, mask)) in enumerate(zip(metadata.chunks, masks, strict=True)):
            rows = slice(row, row := row + chunk.count)
            end = chunk.start + chunk.count
            keys, values = cache.view(i, chunk.slot)  # [kv heads, capacity, d]
            keys[:, chunk.start : end] = k[rows].transpose(0, 1)
            values[:, chunk.start : end] = v[rows].transpose(0, 1)
            seen = (keys[:, begin:end], values[:, begin:end])
            own = q[rows].transpose(0, 1).to(keys.dtype)
            outs.append(layer_ops.attend(i, n, own, *seen, mask, s.attention_scale))
        return (outs[0] if len(outs) == 1 else torch.cat(outs, dim=1)).transpose(0, 1).flatten(1).to(x.dtype)
