"""A transformer's pass on a GPU: the same weights in fewer launches, and nothing in it that the host must see.

A forward pass of its own because a CUDA graph needs fixed shapes: they are set by (B sequences, Q tokens each, padded),
while slots, positions and counts are read on the device. So a pass is captured once and replayed as sequences grow. The
tokens of a packed pass (packed_rows.py) are as many sequences of one token, but for attention.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from semspec.model.attention_metadata import cos_sin
from semspec.model.cache import Cache
from semspec.model.config import Shape
from semspec.model.experts import Experts, FeedForward
from semspec.model.kernels import KernelFlags, Kernels, RowTiles, TreeMask
from semspec.model.layer_ops import SparsityInputs
from semspec.model.layers import Layer
from semspec.model.limited_head import LimitedHead
from semspec.model.linear import DenseLinear, Linear
from semspec.model.one_token import one_token
from semspec.model.quantised import QuantisedLinear
from semspec.model.transformer import Transformer

MAX_HEAD_DIM = 256


@dataclass(slots=True)
class AttentionTiles:
    """Tokens of a packed pass that attend together, as a sequence of their own; all [tiles]."""

    slots: Tensor
    starts: Tensor
    counts: Tensor
    rows: RowTiles
    tree: TreeMask | None = None


@dataclass(slots=True)
class BatchMetadata:
    """Where the new tokens of B sequences belong; all [B]."""

    slots: Tensor
    starts: Tensor  # position of the first new token
    counts: Tensor  # how many there are; 0: this row of the batch is padding
    tree: TreeMask | None = None  # where some of them are trees
    tiles: AttentionTiles | None = None  # of a packed pass: then each sequence is a single token


def covers(shape: Shape) -> bool:
    """Whether the kernels can run a model; heads that are too wide are all that they cannot."""
    return shape.head_dim <= MAX_HEAD_DIM


class FusedForward:
    def __init__(self, transformer: Transformer, cache: Cache, kernels: Kernels, flags: KernelFlags) -> None:
        self.flags = flags
        self.small = all(
            sum(m.nbytes for m in _matrices(layer)) <= flags.skinny_gemm_bytes for layer in transformer.layers
        )
        half = transformer.embedding.dtype in (torch.bfloat16, torch.float16)
        if kernels.prepare is not None:
            for linear in (transformer.head, *(m for layer in transformer.layers for m in _matrices(layer))):
                if isinstance(linear, QuantisedLinear):
                    kernels.prepare(linear, fragments=flags.int4_fragments and half)
        self.shape, self.transformer, self.cache, self.kernels = transformer.shape, transformer, cache, kernels
        for layer in transformer.layers:
            if isinstance(layer.ffn, Experts) and layer.ffn.gate_up is None:
                for linear in (m for expert in layer.ffn.experts for m in (expert.gate_up, expert.down)):
                    if kernels.prepare is not None and isinstance(linear, QuantisedLinear):
                        kernels.prepare(linear, expert=True)
                layer.ffn.pack()
        rotaries = {spec.rotary for spec in self.shape.attention_specs}
        self.rotary = {r: None if r is None else cos_sin(r, cache.capacity, transformer.device) for r in rotaries}
        self.one_token = None
        if self.small:
            rotary = self.rotary[self.shape.attention_specs[0].rotary]
            self.one_token = one_token(transformer, cache, kernels, flags, rotary)

    def forward(
        self,
        tokens: Tensor,
        metadata: BatchMetadata,
        layers: Iterable[int] = (),
        last: bool = False,
        sparsity: SparsityInputs | None = None,
    ) -> tuple[Tensor, dict[int, Tensor]]:
        """Feed tokens [B, Q]. Returns the head's inputs for each token, [B, Q, width], and hidden states numbered as in
        `Transformer.forward`; with `last`, of each sequence's last token only, [B, 1, width]. `sparsity` says what to
        leave out."""
        t, s, k = self.transformer, self.shape, self.kernels
        batch, queries = tokens.shape
        where, tiles = (metadata.slots, metadata.starts, metadata.counts), metadata.tiles
        attending = where if tiles is None else (tiles.slots, tiles.starts, tiles.counts)
        want, hidden = set(layers), dict[int, Tensor]()
        x = F.embedding(tokens.flatten(), t.embedding)  # [N, width]
        if t.embedding_scale is not None:
            x = x * t.embedding_scale
        added: Tensor | None = None
        inner: Tensor | None = None
        alone = tokens.numel() == 1 and not want and sparsity is None and metadata.tree is None and tiles is None
        if alone and self.one_token is not None:
            x = self.one_token(x, where, self.rotary[s.attention_specs[0].rotary])
        for i, layer in enumerate(() if alone and self.one_token is not None else t.layers):
            qkv = self._norm_product(x, added, layer.attention_norm, inner, layer.qkv)
            if i in want:
                hidden[i] = x.clone()
            keys, values, tables, scales = self.cache.layer(i)
            qkv = qkv.view(batch, queries, -1, s.head_dim)
            norms = None
            if layer.query_norm is not None and layer.key_norm is not None:
                norms = (layer.query_norm, layer.key_norm)
            spec = layer.attention_spec
            rope = (self.rotary[spec.rotary], s.heads, norms, s.norm_eps)
            scale_and_window = (s.attention_scale, spec.window)
            if queries == 1 and self.flags.fused_rope and metadata.tree is None and tiles is None:
                attended = k.rope_cache_attend(
                    qkv, keys, values, *where, *rope, *scale_and_window, tables=tables, scales=scales
                )
            else:
                q = k.rope_and_cache(qkv, keys, values, *where, *rope, metadata.tree, tables, scales)
                chosen = None if sparsity is None or sparsity.blocks is None else sparsity.blocks(i, q, *where)
                attended = k.attend(
                    q, keys, values, *attending, *scale_and_window, metadata.tree if tiles is None else tiles.tree,
                    chosen=chosen, tables=tables, scales=scales, rows=None if tiles is None else tiles.rows,
                )  # fmt: skip
            added = self._product(layer.out, attended.view(batch * queries, -1), parts=True)
            added = self._feed(i, layer, x, added, metadata.counts, sparsity)
            inner = layer.ffn_out_norm
        if last and queries > 1:
            at = torch.arange(batch, device=tokens.device) * queries + (metadata.counts - 1).clamp_min(0)
            x, added = x[at], None if added is None else added[..., at, :].contiguous()
            hidden = {i: states[at] for i, states in hidden.items()}
        normed = k.add_norm(x, added, t.final_norm, s.norm_eps, inner)
        if s.num_layers in want:
            hidden[s.num_layers] = normed
        return normed.view(batch, -1, s.width), {i: h.view(batch, -1, s.width) for i, h in hidden.items()}

    def _feed(
        self, i: int, layer: Layer, x: Tensor, added: Tensor, counts: Tensor, sparsity: SparsityInputs | None
    ) -> Tensor:
        """The feed-forward network over the norm of the residual stream, which is updated in place."""
        k, ffn, activation = self.kernels, layer.ffn, self.shape.activation
        before = (layer.ffn_norm, layer.attention_out_norm)
        threshold = sparsity.thresholds[i] if sparsity and sparsity.thresholds else 0.0
        if isinstance(ffn, FeedForward) and not threshold:
            return self._product(ffn.down, self._norm_product(x, added, *before, ffn.gate_up, activation), parts=True)
        normed = k.add_norm(x, added, before[0], self.shape.norm_eps, before[1])
        if isinstance(ffn, Experts):
            skipping = None
            if sparsity is not None and sparsity.betas is not None:
                skipping = (sparsity.betas[i], sparsity.most, sparsity.marks)
            logits = self._product(ffn.router, normed, parts=True)
            return k.fused_moe(
                normed, logits, ffn.gate_up, ffn.down, activation, ffn.chosen, ffn.renormalise, counts, skipping
            )
        assert sparsity is not None and isinstance(ffn.gate_up, DenseLinear)
        gate, up = ffn.gate_up.halves
        return k.sparse_mlp(
            normed, self._product(gate, normed), up.weight, up.bias, sparsity.columns[i], ffn.down.bias, activation,
            threshold, counts, sparsity.marks,
        )  # fmt: skip

    def _norm_product(
        self,
        x: Tensor,
        added: Tensor | None,
        norm: Tensor,
        inner: Tensor | None,
        linear: Linear,
        activation: str | None = None,
    ) -> Tensor:
        """The product with the norm of the residual stream, which is updated in place; perhaps an activation of it."""
        normed = self.kernels.add_norm(x, added, norm, self.shape.norm_eps, inner)
        return self._product(linear, normed, activation=activation)

    def _product(self, linear: Linear, x: Tensor, parts: bool = False, activation: str | None = None) -> Tensor:
        """By a kernel of ours for few rows and small weights, else by cuBLAS; `parts`: the reader adds them up."""
        made = None
        within = activation if self.flags.fused_activation else None
        if self.small or isinstance(linear, QuantisedLinear):
            made = linear.fused(self.kernels, x, parts, within)
        if made is None:
            made, within = linear(x), None
        return made if activation is None or within else self.kernels.act_and_mul(made, activation)

    def head(self, normed: Tensor, out: Tensor) -> Tensor:
        """[B, Q, width] -> logits [B, Q, V], in the buffer given, of at least B x Q rows."""
        rows, head = normed.flatten(0, 1), self.transformer.head
        if isinstance(head, LimitedHead):
            return head.spread(self._product(head.inner, rows), out[: len(rows)]).view(*normed.shape[:2], -1)
        if isinstance(head, QuantisedLinear) and (made := self._product(head, rows)) is not None:
            return out[: len(rows)].copy_(made).view(*normed.shape[:2], -1)
        return self.transformer.head.write(rows, out[: len(rows)]).view(*normed.shape[:2], -1)


def _matrices(layer: Layer) -> list[Linear]:
    """Of a layer, without experts: those have kernels of their own, whatever their size."""
    matrices = [layer.qkv, layer.out]
    if isinstance(layer.ffn, FeedForward):
        matrices += [layer.ffn.gate_up, layer.ffn.down]
    return matrices
