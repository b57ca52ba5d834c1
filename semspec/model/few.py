"""Products of a few rows with large float32 weights on a CPU, where all that counts is how fast weights are read.

MKL's way for `F.linear` reads them at half of what the memory gives, and its product with a vector hardly faster. The
same product turned round, with the weight as the left matrix, has another way, nearly twice as fast; two rows take no
longer than one. docs/lab-notes.md has the figures. What is chosen depends on shapes alone: a text that a seed gives
must not depend on a clock.
"""

from __future__ import annotations

import torch
from torch import Tensor

CACHED = 32 << 20  # bytes of a model that a cache may hold; out of a cache, F.linear is twice as fast
ROWS = 9  # with more of them,
NUMBERS = 4096  # or with inputs of so many numbers, F.linear is the faster one again


def pays(parameters: int, device: torch.device, dtype: torch.dtype) -> bool:
    """Whether a model of so many parameters has products that are worth turning."""
    large = parameters * dtype.itemsize > CACHED
    return large and device.type == "cpu" and dtype == torch.float32 and torch.backends.mkl.is_available()


def is_few(x: Tensor) -> bool:
    rows, width = x.shape
    return rows <= ROWS and max(rows, 2) * width < NUMBERS


def product(x: Tensor, weight: Tensor) -> Tensor:
    """F.linear of x [N, in] with weight [out, in], for few rows."""
    rows = x.shape[0]
    columns = torch.cat([x, x]) if rows == 1 else x.contiguous()  # a single column would go the way of vectors
    return torch.mm(weight, columns.t())[:, :rows].t().contiguous()
