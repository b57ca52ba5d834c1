"""One token of one sequence through a small model on a CPU, in NumPy: how a small draft model writes.

A forward pass of its own because torch takes several microseconds for each of a layer's forty operations, NumPy about
one; where the weights fit into the CPU's cache, that is most of a token's time. The arithmetic is that of
`Transformer.forward` up to rounding, on the same memory.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from semspec.model import cpu_gemm
from semspec.model.attention_metadata import SequenceChunk
from semspec.model.cache import Cache
from semspec.model.experts import ACTIVATE, FeedForward
from semspec.model.linear import DenseLinear, Linear
from semspec.model.transformer import Layer, Transformer
from semspec.types import Score, ScoreOutput

Array = NDArray[np.float32]
MAX_TOKENS = 3  # one by one these take no longer than torch takes for all


@dataclass(frozen=True, slots=True)
class _Linear:
    weight: Array  # [out, in]
    bias: Array | None

    @staticmethod
    def of(linear: Linear) -> _Linear:
        assert isinstance(linear, DenseLinear)
        return _Linear(linear.weight.numpy(), None if linear.bias is None else linear.bias.numpy())

    def __call__(self, x: Array) -> Array:
        made = self.weight @ x
        return made if self.bias is None else made + self.bias


class _Layer:
    def __init__(self, layer: Layer) -> None:
        assert isinstance(layer.ffn, FeedForward)
        self.attention_spec, self.qkv, self.out = layer.attention_spec, _Linear.of(layer.qkv), _Linear.of(layer.out)
        self.gate_up, self.down = _Linear.of(layer.ffn.gate_up), _Linear.of(layer.ffn.down)
        self.activate = _ACTIVATE[layer.ffn.activate]
        self.attention_norm, self.ffn_norm = layer.attention_norm.numpy(), layer.ffn_norm.numpy()
        self.query_norm, self.key_norm = _numpy(layer.query_norm), _numpy(layer.key_norm)
        self.attention_out_norm, self.ffn_out_norm = _numpy(layer.attention_out_norm), _numpy(layer.ffn_out_norm)


class NumpyDecoder:
    def __init__(self, transformer: Transformer, cache: Cache) -> None:
        self.shape = transformer.shape
        self.embedding = transformer.embedding.numpy()
        self.scale = None if transformer.embedding_scale is None else np.float32(transformer.embedding_scale.item())
        self.layers = [_Layer(layer) for layer in transformer.layers]
        self.norm, self.head = transformer.norm.numpy(), _Linear.of(transformer.head)
        self.keys, self.values = cache.keys.numpy(), cache.values.numpy()  # [depth, slots, kv heads, capacity, d]
        self.rotary_tables = transformer.rotary_tables

    @staticmethod
    def of(transformer: Transformer, cache: Cache) -> NumpyDecoder | None:
        """None: the model is too large to gain by this, or has a part that is not implemented here."""
        layers, head = transformer.layers, transformer.head
        plain = all(isinstance(linear, DenseLinear) for linear in (head, *(layer.qkv for layer in layers)))
        plain = plain and transformer.shape.mixture is None
        plain = plain and ACTIVATE[transformer.shape.activation] in _ACTIVATE
        small = transformer.shape.parameters * transformer.dtype.itemsize <= cpu_gemm.CPU_CACHE_BYTES
        here = transformer.device.type == "cpu" and transformer.dtype == torch.float32
        return NumpyDecoder(transformer, cache) if plain and small and here else None

    def supports(self, requests: Sequence[Score]) -> bool:
        return len(requests) == 1 and 0 < requests[0].keep <= len(requests[0].tokens) <= MAX_TOKENS

    def score(self, request: Score, start: int, vocab: int) -> ScoreOutput:
        made = [self.forward(t, request.slot, start + n, request.layers) for n, t in enumerate(request.tokens)]
        if len(made) == 1:
            return ScoreOutput(made[0][0][:, :vocab], made[0][1])
        rows = made[-request.keep :]
        states = {layer: torch.cat([hidden[layer] for _, hidden in rows]) for layer in request.layers}
        return ScoreOutput(torch.cat([logits for logits, _ in rows])[:, :vocab], states)

    def forward(
        self, token: int, slot: int, start: int, layers: Collection[int] = ()
    ) -> tuple[Tensor, dict[int, Tensor]]:
        """The token at position `start` of a slot: logits [1, V] and states [1, width] of the given layers."""
        hidden: dict[int, Tensor] = {}
        chunk = [SequenceChunk(slot, start, 1)]
        tables = {rotary: table.at(chunk) for rotary, table in self.rotary_tables.items()}
        cos_sin = {r: None if t is None else (t[0][0].numpy(), t[1][0].numpy()) for r, t in tables.items()}
        with np.errstate(over="ignore"):  # in the exponential of an activation whose value is then 0
            x = self.embedding[token] if self.scale is None else self.embedding[token] * self.scale
            for i, layer in enumerate(self.layers):
                if i in layers:
                    hidden[i] = torch.from_numpy(x.copy())[None]
                normed, spec = self._norm(x, layer.attention_norm), layer.attention_spec
                added = layer.out(self._attend(layer, i, normed, slot, start, cos_sin[spec.rotary]))
                x = x + (added if layer.attention_out_norm is None else self._norm(added, layer.attention_out_norm))
                gate, up = layer.gate_up(self._norm(x, layer.ffn_norm)).reshape(2, -1)
                added = layer.down(layer.activate(gate) * up)
                x = x + (added if layer.ffn_out_norm is None else self._norm(added, layer.ffn_out_norm))
            x = self._norm(x, self.norm)
        if len(self.layers) in layers:
            hidden[len(self.layers)] = torch.from_numpy(x)[None]
        return torch.from_numpy(self.head(x))[None], hidden

    def _norm(self, x: Array, weight: Array) -> Array:
        made: Array = x * (weight / np.sqrt(np.dot(x, x) / np.float32(len(x)) + np.float32(self.shape.norm_eps)))
        return made

    def _heads_norm(self, x: Array, weight: Array) -> Array:
        """Of each head by itself, [heads, d]."""
        made: Array = x / np.sqrt((x * x).mean(-1, keepdims=True) + np.float32(self.shape.norm_eps)) * weight
        return made

    def _attend(
        self, layer: _Layer, i: int, x: Array, slot: int, start: int, rotation: tuple[Array, Array] | None
    ) -> Array:
        """[width] -> [heads * d]"""
        s = self.shape
        heads = layer.qkv(x).reshape(s.heads + 2 * s.kv_heads, s.head_dim)
        qk, value = heads[: s.heads + s.kv_heads], heads[s.heads + s.kv_heads :]
        if layer.query_norm is not None and layer.key_norm is not None:
            q, k = qk[: s.heads], qk[s.heads :]
            qk = np.concatenate([self._heads_norm(q, layer.query_norm), self._heads_norm(k, layer.key_norm)])
        if rotation is not None:
            qk = _rotated(qk, *rotation)
        keys, values = self.keys[i, slot], self.values[i, slot]  # [kv heads, capacity, d]
        keys[:, start], values[:, start] = qk[s.heads :], value
        begin = 0 if layer.attention_spec.window is None else max(0, start - layer.attention_spec.window + 1)
        seen = slice(begin, start + 1)
        grouped = qk[: s.heads].reshape(s.kv_heads, -1, s.head_dim)
        weights = grouped @ keys[:, seen].transpose(0, 2, 1) * np.float32(s.attention_scale)  # [kv heads, group, seen]
        weights -= weights.max(-1, keepdims=True)
        np.exp(weights, out=weights)
        weights /= weights.sum(-1, keepdims=True)
        made: Array = (weights @ values[:, seen]).reshape(-1)
        return made


def _rotated(x: Array, cos: Array, sin: Array) -> Array:
    """As `AttentionMetadata.rotate`: halves (a, b) of each head become (a cos - b sin, b cos + a sin). [heads, d]"""
    size = cos.shape[-1]
    half, made = size // 2, x.copy()
    made[:, :size] *= cos
    made[:, :half] += x[:, half:size] * sin[:, :half]
    made[:, half:size] += x[:, :half] * sin[:, half:]
    return made


def _silu(x: Array) -> Array:
    made: Array = np.divide(x, np.float32(1) + np.exp(-x))
    return made


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
