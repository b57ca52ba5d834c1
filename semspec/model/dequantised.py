"""A quantised checkpoint's tensors as plain floats, by the names of the plain checkpoint: for models that only
transformers can run. Each is made when it is asked for, so that none is held twice."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from semspec.errors import ModelError
from semspec.model.quantisation import Scheme
from semspec.model.quantised import QuantisedLinear
from semspec.model.quantised_formats import MX_GROUP, codes_of, mx_blocks, size_of
from semspec.model.weights import FLOATS, Checkpoint

CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class Later:
    """What transformers takes for a tensor while it loads: `[...]` reads it."""

    shape: tuple[int, ...]
    make: Callable[[], Tensor]

    def __getitem__(self, index: object) -> Tensor:
        return self.make()


def dequantised(checkpoint: Checkpoint, dtype: torch.dtype) -> dict[str, Later]:
    """What cannot be read is refused by name before any weight is."""
    found = dict[str, Later]()
    for module, names in checkpoint.modules.items():
        plain = names
        scheme = checkpoint.scheme_of(module)
        if scheme is not None and f"{module}.{codes_of(scheme)}" in names:
            found[f"{module}.weight"], plain = _matrix(checkpoint, module, scheme, dtype), names & {f"{module}.bias"}
        blocks = {name.removesuffix("_blocks") for name in names if name.endswith("_blocks")}
        experts = {name for name in blocks if f"{name}_scales" in names}
        found |= {name: _experts(checkpoint, name, dtype) for name in experts}
        plain = plain - {f"{name}_{part}" for name in experts for part in ("blocks", "scales")}
        found |= {name: _as_it_is(checkpoint, name) for name in plain}
    return found


def parameters(tensors: dict[str, Later]) -> int:
    return sum(math.prod(tensor.shape) for tensor in tensors.values())


def _as_it_is(checkpoint: Checkpoint, name: str) -> Later:
    shape, kind = checkpoint.size(name), checkpoint.kind(name)
    if kind not in (*FLOATS, "I64", "BOOL"):  # the last are tables that models make anew
        raise ModelError(
            f"{checkpoint.folder}: {name} is stored as {kind}, and the config does not say how that is read; take the "
            "checkpoint in bfloat16"
        )
    return Later(shape, lambda: checkpoint.stored(name, shape, (kind,), CPU))


def _matrix(checkpoint: Checkpoint, module: str, scheme: Scheme, dtype: torch.dtype) -> Later:
    if scheme.layout == "packed":  # the last word of a row may not be full
        outputs, inputs = checkpoint.integers(f"{module}.weight_shape", 2, CPU).tolist()
        size = outputs, inputs
    else:
        codes = f"{module}.{codes_of(scheme)}"
        if len(shape := checkpoint.size(codes)) != 2:
            raise ModelError(
                f"{checkpoint.folder}: {codes} has shape {shape}, where a quantised matrix has two dimensions; the "
                "checkpoint is damaged, or of a variant that is not supported"
            )
        size = size_of(scheme, (shape[0], shape[1]))

    def make() -> Tensor:
        made = checkpoint.matrix(module, size, CPU, dtype)
        return made.dequantised(dtype) if isinstance(made, QuantisedLinear) else made

    return Later(size, make)


def _experts(checkpoint: Checkpoint, name: str, dtype: torch.dtype) -> Later:
    """All experts of a layer of gpt-oss, whose products are inputs @ weights."""
    codes, scales = checkpoint.size(f"{name}_blocks"), checkpoint.size(f"{name}_scales")
    if len(codes) != 4 or codes[:3] != scales or 2 * codes[3] != MX_GROUP:
        raise ModelError(
            f"{checkpoint.folder}: {name}_blocks has shape {codes} and {name}_scales {scales}, where one scale is for "
            f"{MX_GROUP} weights; the checkpoint is damaged"
        )

    def make() -> Tensor:
        parts = [
            checkpoint.stored(f"{name}_{part}", shape, ("U8",), CPU)
            for part, shape in (("blocks", codes), ("scales", scales))
        ]
        return mx_blocks(*parts).dequantised(dtype).transpose(-1, -2).contiguous()

    return Later((codes[0], codes[2] * MX_GROUP, codes[1]), make)
