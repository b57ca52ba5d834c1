"""Products of a few rows with a weight matrix, in Triton: for small models, where cuBLAS reads weights at half speed.

Such a product is nothing but reading the weights once. Each program takes a few outputs; where there are too few of
those to keep a GPU busy, the sum over inputs is split too, and whoever reads the result adds the parts up (`add_norm`
does): no launch of its own, no atomics, the same bits every time.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from semspec.model.kernels.attention import card_of

ROWS = 16  # at most


@dataclass(frozen=True, slots=True)
class Skinny:
    """How a product is cut."""

    columns: int  # outputs of one program
    depth: int  # inputs at a time
    splits: int  # of the sum; a power of two
    warps: int = 4
    stages: int = 4

    @staticmethod
    def of(size: tuple[int, int], device: torch.device, split: bool) -> Skinny:
        """For weights [outputs, inputs]; `split` says whether the reader adds parts up."""
        outputs, inputs = size
        busy = 2 * card_of(device).processors
        columns = next((c for c in (64, 32) if outputs // c >= busy), 16)
        splits = 1
        while split and splits < 8 and outputs // columns * splits < busy and inputs // (2 * splits) >= 256:
            splits *= 2
        return Skinny(columns, 256 if columns < 64 else 128, splits)


def product(x: Tensor, weight: Tensor, bias: Tensor | None, cut: Skinny) -> Tensor:
    """x [N, in] of at most 16 rows, weight [out, in] -> [N, out]; in parts, float32: [splits, N, out]."""
    rows, inputs = x.shape
    outputs = weight.shape[0]
    assert rows <= ROWS and x.is_contiguous() and weight.is_contiguous()
    size, dtype = ((rows, outputs), x.dtype) if cut.splits == 1 else ((cut.splits, rows, outputs), torch.float32)
    out = x.new_empty(size, dtype=dtype)
    _product[(triton.cdiv(outputs, cut.columns), cut.splits)](
        x, weight, weight if bias is None else bias, out, rows, outputs,
        INPUTS=inputs, BLOCK_M=ROWS, BLOCK_N=cut.columns, BLOCK_K=cut.depth, SPLITS=cut.splits, BIASED=bias is not None,
        num_warps=cut.warps, num_stages=cut.stages,
    )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["rows"])
def _product(
    x, weight, bias, out, rows, outputs,
    INPUTS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    SPLITS: tl.constexpr, BIASED: tl.constexpr,
):  # fmt: skip
    split = tl.program_id(1)
    m, n, k = tl.arange(0, BLOCK_M), tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K)
    each: tl.constexpr = (INPUTS + BLOCK_K * SPLITS - 1) // (BLOCK_K * SPLITS) * BLOCK_K
    inside, exists = m < rows, n < outputs
    row = weight + n.to(tl.int64)[None, :] * INPUTS
    sum = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for step in range(0, each, BLOCK_K):
        at = split * each + step + k
        there = at < INPUTS
        w = tl.load(row + at[:, None], mask=there[:, None] & exists[None, :], other=0.0, eviction_policy="evict_first")
        a = tl.load(x + m[:, None] * INPUTS + at[None, :], mask=inside[:, None] & there[None, :], other=0.0)
        sum = tl.dot(a, w, sum, input_precision="ieee")
    if BIASED:
        more = tl.load(bias + n, mask=exists & (split == 0), other=0.0)
        sum += more.to(tl.float32)[None, :]
    target = out + (split * rows + m)[:, None].to(tl.int64) * outputs + n[None, :]
    tl.store(target, sum, mask=inside[:, None] & exists[None, :])
