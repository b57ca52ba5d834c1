"""Which models `kernels.run_layers` can run for a single token, and what it wants to know of them."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from semspec.model.cache import Cache
from semspec.model.experts import FeedForward
from semspec.model.kernels import KernelFlags, Kernels
from semspec.model.layers import Layer
from semspec.model.linear import DenseLinear, Linear
from semspec.model.quantised import QuantisedLinear
from semspec.model.transformer import Transformer

if TYPE_CHECKING:
    from semspec.model.kernels.one_token import OneTokenConfig

log = logging.getLogger(__name__)

CosSin = tuple[Tensor, Tensor]
CAPABILITY = 90  # from which on it was measured
PAGE = 64  # positions that have to lie in one page


class OneToken:
    """All layers of a model for one token, in one launch."""

    def __init__(
        self, transformer: Transformer, cache: Cache, kernels: Kernels, cut: OneTokenConfig | None = None
    ) -> None:
        from semspec.model.kernels.one_token import OneTokenConfig, Scratch, Sizes  # needs Triton
        from semspec.model.kernels.tiles import card_of

        s, device, first = transformer.shape, transformer.device, transformer.layers[0]
        assert kernels.run_layers is not None and isinstance(first.ffn, FeedForward)
        self.dtype = transformer.dtype
        self.run_layers, self.eps, self.scale = kernels.run_layers, s.norm_eps, s.attention_scale
        self.sizes = Sizes(
            s.width, s.heads, s.kv_heads, s.head_dim, s.ffn, isinstance(first.qkv, QuantisedLinear),
            first.qkv.bias is not None, first.query_norm is not None, s.activation == "silu",
        )  # fmt: skip
        self.cut = cut or OneTokenConfig.of(self.sizes, card_of(device))
        self.scratch = Scratch(self.sizes, self.cut, device, transformer.dtype)
        self.cached = cache.layer(0)
        self.kept: list[Tensor] = []  # what only addresses refer to
        rows = [self._row(layer, cache, i) for i, layer in enumerate(transformer.layers)]
        self.table = torch.tensor(rows, dtype=torch.long).to(device)

    def _row(self, layer: Layer, cache: Cache, i: int) -> list[int]:
        """In the order of `kernels.one_token`'s columns."""
        keys, values, _, _ = cache.layer(i)
        assert isinstance(layer.ffn, FeedForward)
        tensors: list[Tensor | None] = [
            layer.attention_norm, *self._matrix(layer.qkv), layer.qkv.bias, layer.query_norm, layer.key_norm, keys,
            values, *self._matrix(layer.out), layer.ffn_norm, *self._matrix(layer.ffn.gate_up),
            *self._matrix(layer.ffn.down),
        ]  # fmt: skip
        return [0 if tensor is None else tensor.data_ptr() for tensor in tensors]

    def _matrix(self, linear: Linear) -> tuple[Tensor, Tensor | None]:
        """Weights, and scales of outputs."""
        if isinstance(linear, DenseLinear):
            return linear.weight, None
        assert isinstance(linear, QuantisedLinear)
        scales = linear.scales[:, 0].float().repeat_interleave(linear.block[0])[: linear.size[0]]
        self.kept.append((scales if linear.gain is None else scales * linear.gain).contiguous())
        return linear.codes, self.kept[-1]

    def __call__(self, x: Tensor, where: tuple[Tensor, Tensor, Tensor], cos_sin: CosSin | None) -> Tensor:
        """x [1, width], which is written over; `where` is slots, starts, counts."""
        self.run_layers(
            x, self.table, self.sizes, self.scratch, self.cached.keys, *where, cos_sin, self.eps, self.scale,
            self.cached.tables, self.cut,
        )  # fmt: skip
        return x


def one_token(
    transformer: Transformer, cache: Cache, kernels: Kernels, flags: KernelFlags, cos_sin: CosSin | None
) -> OneToken | None:
    """None: there is no such kernel, or not for this model; then its layers are run by a launch for each operation."""
    if not flags.one_token or kernels.run_layers is None or not suits(transformer, cache):
        return None
    if transformer.device.type != "cuda" or torch.version.hip:
        return None
    major, minor = torch.cuda.get_device_capability(transformer.device)
    return tried(OneToken(transformer, cache, kernels), cos_sin) if 10 * major + minor >= CAPABILITY else None


def tried(made: OneToken, cos_sin: CosSin | None) -> OneToken | None:
    """None if it cannot be launched: all its programs have to run at a time, and a part of a GPU may have no room."""
    device = made.table.device
    ended = torch.zeros(1, dtype=torch.long, device=device)
    try:
        made(torch.zeros(1, made.sizes.width, device=device, dtype=made.dtype), (ended, ended, ended), cos_sin)
    except Exception as refusal:  # whatever it is, there is another way
        log.warning("single tokens are made by a launch for each operation, which is slower: %s", refusal)
        return None
    return made


def suits(transformer: Transformer, cache: Cache) -> bool:
    """Layers that are alike, with what the kernel knows: no windows, no experts, norms before networks only, weights as
    they are or fp8 with a scale for each output, keys and values as they are."""
    s, layers, first = transformer.shape, transformer.layers, cache.layer(0)
    sizes = (s.width, s.heads * s.head_dim, s.ffn)
    return (
        len(set(s.attention_specs)) == 1
        and s.attention_specs[0].window is None
        and s.head_dim in (16, 32, 64, 128, 256)
        and all(size % 16 == 0 for size in sizes)
        and first.scales is None
        and (first.tables is None or first.keys.shape[2] % PAGE == 0)
        and all(cache.layer(i).keys.stride() == first.keys.stride() for i in range(s.num_layers))
        and len({(layer.qkv.bias is None, layer.query_norm is None) for layer in layers}) == 1
        and all(_suits(layer, transformer.dtype) for layer in layers)
        and len({type(linear) for layer in layers for linear in _matrices(layer)}) == 1
    )


def _suits(layer: Layer, dtype: torch.dtype) -> bool:
    if not isinstance(layer.ffn, FeedForward) or layer.attention_out_norm is not None or layer.ffn_out_norm is not None:
        return False
    if any(linear.bias is not None for linear in _matrices(layer)[1:]):
        return False
    vectors = [layer.attention_norm, layer.ffn_norm, layer.query_norm, layer.key_norm, layer.qkv.bias]
    if any(vector is not None and vector.dtype != dtype for vector in vectors):
        return False
    return all(_plain(linear, dtype) or _codes(linear) for linear in _matrices(layer))


def _plain(linear: Linear, dtype: torch.dtype) -> bool:
    return isinstance(linear, DenseLinear) and linear.weight.dtype == dtype and linear.weight.is_contiguous()


def _codes(linear: Linear) -> bool:
    return (
        isinstance(linear, QuantisedLinear)
        and linear.kind == "fp8"
        and linear.zeros is None
        and linear.codes.is_contiguous()
        and linear.block[1] >= linear.size[1]
    )


def _matrices(layer: Layer) -> list[Linear]:
    assert isinstance(layer.ffn, FeedForward)
    return [layer.qkv, layer.out, layer.ffn.gate_up, layer.ffn.down]
