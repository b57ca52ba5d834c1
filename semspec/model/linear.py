"""Matrix products with a model's weights: one protocol, and the format that stores weights as plain floats.

Another format (`quantised.py`; `int8.py` and `int4.py` for CPUs) is one more class with these members.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from semspec.model import cpu_gemm
from semspec.model.kernels import SKINNY_ROWS, Kernels

SAMPLE = 4096  # weights of a tensor that a model's fingerprint reads


class Linear(Protocol):
    bias: Tensor | None  # [out]

    def __call__(self, x: Tensor) -> Tensor:
        """x [N, in] -> [N, out]"""
        ...

    @property
    def nbytes(self) -> int:
        """All the memory it takes, biases and second copies included."""
        ...

    @property
    def sample(self) -> Tensor:
        """Evenly spaced weights, as the checkpoint has them: for the model's fingerprint."""
        ...

    def write(self, x: Tensor, out: Tensor) -> Tensor:
        """The product, into memory that a GPU's graphs have at a fixed address."""
        return out.copy_(self(x))

    def fused(self, kernels: Kernels, x: Tensor, parts: bool, activation: str | None) -> Tensor | None:
        """A GPU's product, as `Kernels.product` gives it; None: this format has no kernel for so many rows, and is
        called instead."""
        return None


def evenly_spaced(weight: Tensor) -> Tensor:
    flat = weight.detach().reshape(-1)
    return flat[:: max(1, flat.numel() // SAMPLE)][:SAMPLE]


@dataclass(slots=True)
class DenseLinear(Linear):
    weight: Tensor  # [out, in]
    bias: Tensor | None = None
    transposed: bool = False  # a few rows are multiplied as `cpu_gemm.transposed_product` does
    packed: Tensor | None = None  # the weight again, for more rows

    def __call__(self, x: Tensor) -> Tensor:
        if self.packed is not None and len(x) > (cpu_gemm.MAX_ROWS_BESIDE_PACKED if self.transposed else 1):
            return cpu_gemm.packed_product(x, self.packed, self.bias)
        if self.transposed and cpu_gemm.suits_transposed(x):
            made = cpu_gemm.transposed_product(x, self.weight)
            return made if self.bias is None else made.add_(self.bias)
        return F.linear(x, self.weight, self.bias)

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in (self.weight, self.bias, self.packed) if t is not None)

    @property
    def sample(self) -> Tensor:
        return evenly_spaced(self.weight)

    def write(self, x: Tensor, out: Tensor) -> Tensor:
        assert self.bias is None
        return torch.mm(x, self.weight.t(), out=out)

    def fused(self, kernels: Kernels, x: Tensor, parts: bool, activation: str | None) -> Tensor | None:
        return kernels.product(x, self.weight, self.bias, parts, activation) if len(x) <= SKINNY_ROWS else None

    def dequantised(self, dtype: torch.dtype) -> Tensor:
        return self.weight

    @property
    def halves(self) -> tuple[DenseLinear, DenseLinear]:
        """Of gate and up in one product: each by itself, in the same memory."""
        biases = (None, None) if self.bias is None else self.bias.chunk(2)
        pairs = zip(self.weight.chunk(2), biases, strict=True)
        gate, up = (DenseLinear(weight, bias, self.transposed) for weight, bias in pairs)
        return gate, up


def stack_dense(experts: Sequence[DenseLinear]) -> Tensor:
    """Matrices of one size as one tensor, of which each expert then holds a view."""
    together = torch.stack([expert.weight for expert in experts])
    for expert, part in zip(experts, together, strict=True):
        expert.weight = part
    return together
