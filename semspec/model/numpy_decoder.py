"""A few tokens through a model on a CPU, in NumPy: how a small draft model writes, and how a model with integer weights
writes and checks drafts.

A forward pass of its own because torch takes several microseconds for each of a layer's forty operations, NumPy about
one; where weights fit into the CPU's cache, or are few bytes, that is most of a token's time. The arithmetic is that of
`Transformer.forward` up to rounding, on the same memory. Each row is computed as if it were alone: what a token gets
does not depend on what else is in its pass.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from semspec import tree
from semspec.model import cpu_gemm
from semspec.model.attention_metadata import SequenceChunk
from semspec.model.cache import Cache
from semspec.model.experts import ACTIVATE, FeedForward
from semspec.model.int4 import Int4Linear
from semspec.model.int8 import Int8Linear
from semspec.model.layers import Layer
from semspec.model.limited_head import LimitedHead
from semspec.model.linear import DenseLinear, Linear
from semspec.model.paged_cache import PagedCache
from semspec.model.rows import chunks_of, last_rows, prefill, rest, split_rows
from semspec.model.transformer import Transformer
from semspec.types import Score, ScoreOutput

Array = NDArray[np.float32]
Part = tuple[Score, int]  # and the position of its first token
Product = Callable[[Array], Array]  # [T, in] -> [T, out]
MAX_TOKENS = 3  # one by one these take no longer than torch takes for all
MAX_INTEGER_TOKENS = 128  # of one sequence, with integer weights: no draft is longer, and torch reads prompts faster
INTEGERS = (Int8Linear, Int4Linear)


def _product(linear: Linear) -> Product:
    if not isinstance(linear, DenseLinear):
        return lambda x: linear(torch.from_numpy(x)).numpy()
    weight, bias = linear.weight.numpy(), _numpy(linear.bias)

    def product(x: Array) -> Array:
        made = (weight @ x[0])[None] if len(x) == 1 else np.stack([weight @ row for row in x])
        return made if bias is None else made + bias

    return product


class _Layer:
    def __init__(self, layer: Layer) -> None:
        assert isinstance(layer.ffn, FeedForward)
        self.attention_spec, self.qkv, self.out = layer.attention_spec, _product(layer.qkv), _product(layer.out)
        self.gate_up, self.down = _product(layer.ffn.gate_up), _product(layer.ffn.down)
        self.activate = _ACTIVATE[layer.ffn.activate]
        self.attention_norm, self.ffn_norm = layer.attention_norm.numpy(), layer.ffn_norm.numpy()
        self.query_norm, self.key_norm = _numpy(layer.query_norm), _numpy(layer.key_norm)
        self.attention_out_norm, self.ffn_out_norm = _numpy(layer.attention_out_norm), _numpy(layer.ffn_out_norm)


class NumpyDecoder:
    def __init__(self, transformer: Transformer, cache: Cache, integers: bool = False) -> None:
        self.shape, self.integers = transformer.shape, integers
        self.embedding = transformer.embedding.numpy()
        self.scale = None if transformer.embedding_scale is None else np.float32(transformer.embedding_scale.item())
        self.layers = [_Layer(layer) for layer in transformer.layers]
        self.norm, self.head = transformer.final_norm.numpy(), _product(transformer.head)
        self.attention_scale = np.float32(self.shape.attention_scale)
        self.keys, self.values = cache.keys.numpy(), cache.values.numpy()  # [depth, slots, kv heads, capacity, d]
        self.rotary_tables = transformer.rotary_tables

    @staticmethod
    def of(transformer: Transformer, cache: Cache) -> NumpyDecoder | None:
        """None: the model is too large to gain by this, or has a part that is not implemented here."""
        layers = transformer.layers
        if transformer.shape.mixture is not None or ACTIVATE[transformer.shape.activation] not in _ACTIVATE:
            return None
        if transformer.device.type != "cpu" or transformer.dtype != torch.float32 or isinstance(cache, PagedCache):
            return None
        head = transformer.head.inner if isinstance(transformer.head, LimitedHead) else transformer.head
        linears = [head, *(linear for layer in layers for linear in (layer.qkv, layer.out))]
        if all(isinstance(linear, INTEGERS) for linear in linears):
            return NumpyDecoder(transformer, cache, integers=True)
        small = transformer.shape.parameters * transformer.dtype.itemsize <= cpu_gemm.CPU_CACHE_BYTES
        dense = all(isinstance(linear, DenseLinear) for linear in linears)
        return NumpyDecoder(transformer, cache) if small and dense else None

    def supports(self, requests: Sequence[Score]) -> bool:
        if self.integers:
            return all(r.logits_to_keep <= MAX_INTEGER_TOKENS for r in requests)
        return len(requests) == 1 and 0 < requests[0].logits_to_keep <= len(requests[0].tokens) <= MAX_TOKENS

    def split(self, requests: Sequence[Score], starts: Sequence[int]) -> tuple[list[Part], list[Part]]:
        """(what torch reads first, what is computed here). A prompt is read by torch. Its last token and drafts are
        computed here, always: integer weights turn a difference in a float's last bit into a larger one, and a token
        must get the same logits after a prompt, alone or with a draft."""
        before, here = list[Part](), list[Part]()
        for r, start in zip(requests, starts, strict=True):
            cut = len(r.tokens) - r.logits_to_keep
            if (r.logits_to_keep or r.states) and cut <= MAX_TOKENS:
                cut = 0
            if cut:
                before.append((prefill(r, cut), start))
            here.append((rest(r, cut), start + cut))
        return before, here

    def score(self, parts: Sequence[Part], vocab: int) -> list[ScoreOutput]:
        requests = [r for r, _ in parts]
        chunks = chunks_of(requests, [start for _, start in parts])
        wanted, observed = last_rows(requests)
        layers = {layer for r, _ in parts for layer in r.layers}
        tokens = [t for r, _ in parts for t in r.tokens]
        if not tokens:
            return [ScoreOutput(torch.empty(0, vocab), {}) for _ in parts]
        logits, hidden = self.forward(tokens, chunks, wanted, layers, observed)
        return split_rows(requests, logits[:, :vocab], hidden)

    def forward(
        self,
        tokens: Sequence[int],
        chunks: list[SequenceChunk],
        wanted: list[int],
        layers: Collection[int] = (),
        observed: list[int] | None = None,
    ) -> tuple[Tensor, dict[int, Tensor]]:
        """As `Transformer.forward`."""
        hidden: dict[int, Tensor] = {}
        observed = wanted if observed is None else observed
        tables = {rotary: table.at(chunks) for rotary, table in self.rotary_tables.items()}
        cos_sin = {r: None if t is None else (t[0].numpy(), t[1].numpy()) for r, t in tables.items()}
        with np.errstate(over="ignore"):  # in the exponential of an activation whose value is then 0
            x = self.embedding[tokens]  # [N, width]
            x = x if self.scale is None else x * self.scale
            for i, layer in enumerate(self.layers):
                if i in layers:
                    hidden[i] = torch.from_numpy(x[observed])
                normed, spec = self._norm(x, layer.attention_norm), layer.attention_spec
                added = layer.out(self._attend(layer, i, normed, chunks, cos_sin[spec.rotary]))
                x = x + (added if layer.attention_out_norm is None else self._norm(added, layer.attention_out_norm))
                gate_up = layer.gate_up(self._norm(x, layer.ffn_norm))
                half = gate_up.shape[1] // 2
                active = layer.activate(gate_up[:, :half])
                active *= gate_up[:, half:]
                added = layer.down(active)
                x = x + (added if layer.ffn_out_norm is None else self._norm(added, layer.ffn_out_norm))
            if len(self.layers) in layers:
                hidden[len(self.layers)] = torch.from_numpy(self._norm(x[observed], self.norm))
            if not wanted:
                return torch.empty(0, self.shape.vocab_size), hidden
            x = self._norm(x[wanted], self.norm)
        return torch.from_numpy(self.head(x)), hidden

    def _norm(self, x: Array, weight: Array) -> Array:
        size, eps = x.shape[1], self.shape.norm_eps
        factors = np.array([[math.sqrt(1 / (float(row @ row) / size + eps))] for row in x], np.float32)
        made: Array = x * factors
        made *= weight
        return made

    def _heads_norm(self, x: Array, weight: Array) -> Array:
        """Of each head by itself, [T, heads, d]."""
        made: Array = x / np.sqrt((x * x).mean(-1, keepdims=True) + np.float32(self.shape.norm_eps)) * weight
        return made

    def _attend(
        self, layer: _Layer, i: int, x: Array, chunks: list[SequenceChunk], rotation: tuple[Array, Array] | None
    ) -> Array:
        """[N, width] -> [N, heads * d]"""
        s, count = self.shape, len(x)
        heads = layer.qkv(x).reshape(count, s.heads + 2 * s.kv_heads, s.head_dim)
        qk, value = heads[:, : s.heads + s.kv_heads], heads[:, s.heads + s.kv_heads :]
        if layer.query_norm is not None and layer.key_norm is not None:
            q, k = qk[:, : s.heads], qk[:, s.heads :]
            qk = np.concatenate([self._heads_norm(q, layer.query_norm), self._heads_norm(k, layer.key_norm)], 1)
        if rotation is not None:
            qk = _rotated(qk, *rotation)
        queries = (qk[:, : s.heads] * self.attention_scale).reshape(count, s.kv_heads, -1, s.head_dim)
        made, window, row = np.empty((count, s.heads, s.head_dim), np.float32), layer.attention_spec.window, 0
        grouped = made.reshape(queries.shape)
        for chunk in chunks:
            keys, values = self.keys[i, chunk.slot], self.values[i, chunk.slot]  # [kv heads, capacity, d]
            start, length = chunk.start, chunk.count
            new = slice(row, row + length)
            keys[:, start : start + length] = qk[new, s.heads :].transpose(1, 0, 2)
            values[:, start : start + length] = value[new].transpose(1, 0, 2)
            for seen_keys, seen_values in _seen(keys, values, chunk):  # one by one: several rows round differently
                begin = 0 if window is None else max(0, seen_keys.shape[1] - window)
                weights = queries[row] @ seen_keys[:, begin:].transpose(0, 2, 1)  # [kv heads, group, seen]
                weights -= np.maximum.reduce(weights, -1, keepdims=True)
                np.exp(weights, out=weights)
                total = np.add.reduce(weights, -1, keepdims=True)
                np.divide(weights @ seen_values[:, begin:], total, out=grouped[row])
                row += 1
        return made.reshape(count, -1)


def _seen(keys: Array, values: Array, chunk: SequenceChunk) -> Iterator[tuple[Array, Array]]:
    """What each new token attends to, in order. The line of a token of a tree is copied together: whatever else is in
    its pass, it reads the same numbers from memory of the same form as in a chain."""
    base, end = chunk.base, chunk.start + chunk.count
    for stop in range(chunk.start + 1, min(base, end) + 1):
        yield keys[:, :stop], values[:, :stop]
    if not chunk.parents:
        return
    deepest = base + 1 + max(tree.depths(chunk.parents))
    room = np.empty((2, keys.shape[0], deepest, keys.shape[2]), np.float32)
    room[0, :, :base], room[1, :, :base] = keys[:, :base], values[:, :base]
    for node in range(max(chunk.start - base, 0), len(chunk.parents)):
        line = [base + i for i in tree.path(chunk.parents, node)]
        stop = base + len(line)
        room[0, :, base:stop], room[1, :, base:stop] = keys[:, line], values[:, line]
        yield room[0, :, :stop], room[1, :, :stop]


def _rotated(x: Array, cos: Array, sin: Array) -> Array:
    """As `AttentionMetadata.rotate`: halves (a, b) of each head become (a cos - b sin, b cos + a sin). x [T, heads, d],
    cos and sin [T, 1, d]"""
    size = cos.shape[-1]
    half = size // 2
    made = x[..., :size] * cos
    made[..., :half] += x[..., half:size] * sin[..., :half]
    made[..., half:] += x[..., :half] * sin[..., half:]
    return made if size == x.shape[-1] else np.concatenate([made, x[..., size:]], -1)


def _silu(x: Array) -> Array:
    inner = np.exp(-x)
    inner += 1
    return np.divide(x, inner, out=inner)


def _gelu(x: Array) -> Array:
    inner = np.float32(0.7978845608028654) * (x + np.float32(0.044715) * x * x * x)
    made: Array = np.multiply(np.float32(0.5) * x, np.float32(1) + np.tanh(inner))
    return made


_ACTIVATE: dict[Callable[[Tensor], Tensor], Callable[[Array], Array]] = {
    ACTIVATE["silu"]: _silu,
    ACTIVATE["gelu_pytorch_tanh"]: _gelu,
}


def _numpy(tensor: Tensor | None) -> Array | None:
    return None if tensor is None else tensor.numpy()
