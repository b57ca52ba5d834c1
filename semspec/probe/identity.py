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
    sizes = (shape.vocab, shape.width, shape.depth, shape.heads, shape.kv_heads, shape.head_dim, shape.ffn)
    digest.update(repr((shape.model_type, sizes)).encode())
    layers = [model.layers[i] for i in sorted({0, shape.depth // 2, shape.depth - 1})]
    projections = [linear.sample for layer in layers for linear in (layer.qkv, layer.out)]
    for some in [evenly_spaced(model.embedding), evenly_spaced(model.final_norm), *projections]:
        digest.update(_rounded(some))
    return f"{shape.model_type}-{shape.depth}x{shape.width}-{digest.hexdigest()[:16]}"


def _rounded(some: Tensor) -> bytes:
    """Weights rounded so that a checkpoint widened or narrowed on loading reads the same."""
    return some.to(torch.bfloat16).view(torch.int16).cpu().numpy().tobytes()
