"""Products of a few rows with float32 weights on a CPU: writing a token, checking a draft.

MKL's way for `F.linear` reads weights at half of what the memory gives, and multiplies a draft's rows at half of what
the processor can. Two other ways are nearly twice as fast, each for its numbers of rows:

- turned round, with the weight as the left matrix, for one or two rows: these take the time of reading the weights;
- with weights packed by oneDNN, for more rows, up to whole prompts. The packed weights are a second copy.

docs/lab-notes.md has the figures. What is chosen depends on shapes alone: a text that a seed gives must not depend on
a clock.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

CACHED = 32 << 20  # bytes of a model that a cache may hold; out of a cache, F.linear is twice as fast for one row
LEAST = 4 << 20  # bytes of a model below which calls cost more than what they multiply
MOST = 1 << 30  # bytes of a model of which one would not want a second copy
TWO = 2  # rows: with weights packed, more of them are not turned
ROWS = 9  # without, more than these are not,
NUMBERS = 4096  # nor inputs of so many numbers: F.linear is the faster one again


@dataclass(frozen=True, slots=True)
class GemmPaths:
    """Which other ways the products of a model have."""

    turned: bool = False
    packed: bool = False

    @staticmethod
    def of(parameters: int, device: torch.device, dtype: torch.dtype) -> GemmPaths:
        if device.type != "cpu" or dtype != torch.float32:
            return GemmPaths()
        size = parameters * dtype.itemsize
        return GemmPaths(size > CACHED and torch.backends.mkl.is_available(), LEAST <= size <= MOST and can_pack())


@cache
def can_pack() -> bool:
    """Whether this build of torch packs weights, by operators that are its own affair, and multiplies with them."""
    x, weight = torch.ones(3, 4), torch.arange(8.0).reshape(2, 4)
    try:
        made = packed_product(x, pack(weight), torch.ones(2))
    except (AttributeError, NotImplementedError, RuntimeError, TypeError):
        return False
    return torch.allclose(made, F.linear(x, weight, torch.ones(2)))


def pack(weight: Tensor) -> Tensor:
    """A copy of a weight [out, in] in the order that oneDNN multiplies best with; for `packed_product` only."""
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous())
    return packed


def packed_product(x: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
    made: Tensor = torch.ops.mkldnn._linear_pointwise(x.contiguous(), packed, bias, "none", [], "")
    return made


def is_few(x: Tensor) -> bool:
    """Whether rows are turned where nothing is packed."""
    rows, width = x.shape
    return rows <= ROWS and max(rows, 2) * width < NUMBERS


def turned_product(x: Tensor, weight: Tensor) -> Tensor:
    """F.linear of x [N, in] with weight [out, in], for few rows."""
    rows = x.shape[0]
    columns = torch.cat([x, x]) if rows == 1 else x.contiguous()  # a single column would go the way of vectors
    return torch.mm(weight, columns.t())[:, :rows].t().contiguous()
