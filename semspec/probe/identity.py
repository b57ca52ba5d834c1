"""Which model is this? A name made of a checkpoint's shape and some of its weights, the same in every dtype."""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

from semspec.errors import ModelError
from semspec.model.linear import evenly_spaced
from semspec.model.wrapper import unwrap
from semspec.types import Runner


def fingerprint(runner: Runner) -> str:
    """Reads a few thousand weights; a runner that is no native one may bring a `fingerprint` of its own."""
    inner = unwrap(runner)
    if isinstance(getattr(inner, "fingerprint", None), str):
        return str(inner.fingerprint)
    if not hasattr(inner, "transformer"):
        raise ModelError(f"{type(inner).__name__} has no weights to tell its model by; give it a `fingerprint`")
    model = inner.transformer
    shape = model.shape
    digest = hashlib.sha256()
    sizes = (shape.vocab_size, shape.width, shape.num_layers, shape.heads, shape.kv_heads, shape.head_dim, shape.ffn)
    digest.update(repr((shape.model_type, sizes)).encode())
    layers = [model.layers[i] for i in sorted({0, shape.num_layers // 2, shape.num_layers - 1})]
    projections = [linear.sample for layer in layers for linear in (layer.qkv, layer.out)]
    for some in [evenly_spaced(model.embedding), evenly_spaced(model.final_norm), *projections]:
        digest.update(_rounded(some))
    return f"{shape.model_type}-{shape.num_layers}x{shape.width}-{digest.hexdigest()[:16]}"


def precision(runner: Runner) -> tuple[str, str]:
    """How a model computes, which its fingerprint leaves out: the type of its activations, with that of its weights
    where they are quantised, and of its keys and values. Empty where a runner does not say."""
    inner = unwrap(runner)
    model = getattr(inner, "transformer", None)
    if model is None:
        return _name(getattr(getattr(inner, "model", None), "dtype", None)), ""
    weights = getattr(model, "weights", "plain")
    pools = getattr(getattr(inner, "cache", None), "pools", ())
    stored = "fp8" if any(pool.scales is not None for pool in pools) else _name(model.attention_dtype)
    return _name(model.dtype) + ("" if weights == "plain" else f" with weights in {weights}"), stored


def _name(dtype: torch.dtype | None) -> str:
    return "" if dtype is None else str(dtype).removeprefix("torch.")


def _rounded(some: Tensor) -> bytes:
    """Weights rounded so that a checkpoint widened or narrowed on loading reads the same."""
    return some.to(torch.bfloat16).view(torch.int16).cpu().numpy().tobytes()
