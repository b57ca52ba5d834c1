"""The few largest values of long rows, in Triton: of each part of a row, then of what the parts have."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from semspec.sampling.kernels.filter import PART, WARPS

MOST = 8  # values; more are sorted for


def largest(values: Tensor, n: int) -> Tensor:
    """[R, V] -> [R, n] float32, in falling order; -inf where a row has fewer."""
    values = values if values.stride(1) == 1 else values.contiguous()
    rows, size = values.shape
    parts = triton.cdiv(size, PART)
    made = torch.empty((rows, parts, n), dtype=torch.float32, device=values.device)
    if rows:
        _largest[(parts, rows)](values, values.stride(0), made, size, parts, PART=PART, N=n, num_warps=WARPS)
    return made[:, 0] if parts == 1 else largest(made.flatten(1), n)


@triton.jit
def _largest(values, stride, made, size, parts, PART: tl.constexpr, N: tl.constexpr):
    part, row = tl.program_id(0), tl.program_id(1)
    i = part * PART + tl.arange(0, PART)
    own = tl.load(values + row.to(tl.int64) * stride + i, mask=i < size, other=float("-inf")).to(tl.float32)
    for j in tl.static_range(N):
        top = tl.max(own, 0)
        tl.store(made + (row * parts + part) * N + j, top)
        own = tl.where(i == tl.min(tl.where(own == top, i, size), 0), float("-inf"), own)
