"""Products of a few rows with float32 weights on a CPU: decoding a token, scoring a draft.

MKL's `F.linear` reads weights at half the memory's bandwidth, and multiplies a draft's rows at half the processor's
speed. Two other paths are nearly twice as fast, each for its number of rows:

- transposed, with the weight as the left matrix, for one or two rows: these take the time of reading the weights;
- with weights packed by oneDNN, for more rows, up to whole prompts. The packed weights are a second copy.

docs/lab-notes.md has the figures. The choice depends on shapes alone: the text that a seed gives must not depend on a
clock.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

CPU_CACHE_BYTES = 32 << 20  # a model that fits into the CPU's cache: F.linear is twice as fast for one row
MIN_PACKED_BYTES = 4 << 20  # of a model; in a smaller one calls cost more than the products
MAX_PACKED_BYTES = 1 << 30  # of a model; a second copy of a larger one takes too much memory
MAX_ROWS_BESIDE_PACKED = 2  # that are multiplied transposed where packed weights could be used
MAX_TRANSPOSED_ROWS = 9  # without packed weights; for more rows,
MAX_TRANSPOSED_INPUTS = 4096  # or for so many inputs in all, F.linear is faster again


@dataclass(frozen=True, slots=True)
class GemmPaths:
    """Which paths besides F.linear the products of a model have."""

    transposed: bool = False
    packed: bool = False

    @staticmethod
    def of(parameters: int, device: torch.device, dtype: torch.dtype) -> GemmPaths:
        if device.type != "cpu" or dtype != torch.float32:
            return GemmPaths()
        size = parameters * dtype.itemsize
        return GemmPaths(
            transposed=size > CPU_CACHE_BYTES and torch.backends.mkl.is_available(),
            packed=MIN_PACKED_BYTES <= size <= MAX_PACKED_BYTES and can_pack(),
        )


@cache
def can_pack() -> bool:
    """Whether this build of torch has the private operators that pack weights and multiply with them."""
    x, weight = torch.ones(3, 4), torch.arange(8.0).reshape(2, 4)
    try:
        made = packed_product(x, pack(weight), torch.ones(2))
    except (AttributeError, NotImplementedError, RuntimeError, TypeError):
        return False
    return torch.allclose(made, F.linear(x, weight, torch.ones(2)))


def pack(weight: Tensor) -> Tensor:
    """A copy of a weight [out, in] in oneDNN's own layout; for `packed_product` only."""
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous())
    return packed


def packed_product(x: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
    made: Tensor = torch.ops.mkldnn._linear_pointwise(x.contiguous(), packed, bias, "none", [], "")
    return made


def suits_transposed(x: Tensor) -> bool:
    """Whether rows are few enough to be multiplied transposed where nothing is packed."""
    rows, width = x.shape
    return rows <= MAX_TRANSPOSED_ROWS and max(rows, 2) * width < MAX_TRANSPOSED_INPUTS


def transposed_product(x: Tensor, weight: Tensor) -> Tensor:
    """F.linear of x [N, in] with weight [out, in], for few rows."""
    rows = x.shape[0]
    columns = torch.cat([x, x]) if rows == 1 else x.contiguous()  # MKL has a slower path for a single column
    return torch.mm(weight, columns.t())[:, :rows].t().contiguous()
