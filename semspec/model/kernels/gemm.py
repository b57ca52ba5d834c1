"""Skinny products (a few rows, all of a weight matrix) in Triton: for small models, where cuBLAS is half as fast.

Their time is that of reading the weights once. Each program takes a few outputs; where these are too few to keep a GPU
busy, the sum over inputs is split too, and the reader of the result adds the parts up (`add_norm` does): no launch of
its own, no atomics, deterministic.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from semspec.model.kernels import SKINNY_ROWS
from semspec.model.kernels.early_launch import early, lines_ahead, prefetch, wait_for_previous
from semspec.model.kernels.tiles import Card, card_of, fit_shared

DEPTHS = {16: (256, 6), 32: (256, 4), 64: (64, 6)}  # outputs of a program -> inputs at a time, stages; measured


@dataclass(frozen=True, slots=True)
class SkinnyGemmConfig:
    """How a product is tiled. The figures in `SkinnyGemmConfig.of` are in docs/lab-notes.md."""

    columns: int  # outputs of one program; with an activation, gates and as many ups
    depth: int  # inputs at a time
    splits: int  # of the sum; a power of two
    warps: int = 4
    stages: int = 4

    @staticmethod
    def of(size: tuple[int, int], card: Card, split: bool, gated: bool = False, itemsize: int = 2) -> SkinnyGemmConfig:
        """For weights [outputs, inputs]; `split` says whether the reader adds parts up."""
        outputs, inputs = size
        busy = 2 * card.processors
        columns = 64 if outputs // 64 >= busy else 32 if inputs >= 4096 else 16
        splits = 1
        while split and splits < 4 and outputs // columns * splits < busy and inputs // (2 * splits) >= 256:
            splits *= 2
        depth, stages = DEPTHS[columns]
        while depth > 64 and depth * 3 > inputs // splits:  # a loop that is shorter than its stages hides nothing
            depth //= 2
        if gated:  # as many ups as gates; a tile has at least 16 of each
            columns = max(columns, 32)
        stages, depth = fit_shared(stages, depth, (columns + SKINNY_ROWS) * itemsize, card.shared)
        return SkinnyGemmConfig(columns // 2 if gated else columns, depth, splits, stages=stages)


def product(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    parts: bool = False,
    activation: str | None = None,
    cut: SkinnyGemmConfig | None = None,
) -> Tensor:
    """x [N, in] of at most SKINNY_ROWS rows, weight [out, in] -> [N, out], or, if it may come in `parts` and there are
    several: [splits, N, out], float32.

    With an activation, the first half of the outputs goes through it and is multiplied by the second: [N, out / 2].
    """
    rows, inputs = x.shape
    if cut is None:
        size, card = (weight.shape[0], inputs), card_of(x.device)
        cut = SkinnyGemmConfig.of(size, card, parts, activation is not None, weight.element_size())
    outputs = weight.shape[0] // (1 if activation is None else 2)
    assert rows <= SKINNY_ROWS and x.is_contiguous() and weight.is_contiguous()
    assert activation is None or cut.splits == 1
    form, dtype = ((rows, outputs), x.dtype) if cut.splits == 1 else ((cut.splits, rows, outputs), torch.float32)
    out = x.new_empty(form, dtype=dtype)
    _product[(triton.cdiv(outputs, cut.columns), cut.splits)](
        x, weight, weight if bias is None else bias, out, rows, outputs,
        INPUTS=inputs, BLOCK_M=SKINNY_ROWS, BLOCK_N=cut.columns, BLOCK_K=cut.depth, SPLITS=cut.splits,
        BIASED=bias is not None, GATED=activation is not None, SILU=activation == "silu",
        AHEAD=lines_ahead(weight.shape[0], inputs * weight.element_size(), cut.splits),
        num_warps=cut.warps, num_stages=cut.stages, **early(x.device),
    )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["rows"])
def _product(
    x, weight, bias, out, rows, outputs,
    INPUTS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    SPLITS: tl.constexpr, BIASED: tl.constexpr, GATED: tl.constexpr, SILU: tl.constexpr,
    AHEAD: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    split = tl.program_id(1)
    m, n, k = tl.arange(0, BLOCK_M), tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K)
    each: tl.constexpr = (INPUTS + BLOCK_K * SPLITS - 1) // (BLOCK_K * SPLITS) * BLOCK_K
    inside, exists = m < rows, n < outputs
    row = weight + n.to(tl.int64)[None, :] * INPUTS
    up = weight + (n + outputs).to(tl.int64)[None, :] * INPUTS  # only with a gate
    if PDL:
        bytes: tl.constexpr = weight.dtype.element_ty.primitive_bitwidth // 8
        last = tl.minimum(n, outputs - 1).to(tl.int64)
        prefetch(weight + last * INPUTS, split * each * bytes, INPUTS * bytes, AHEAD)
        if GATED:
            prefetch(weight + (last + outputs) * INPUTS, 0, INPUTS * bytes, AHEAD)
    wait_for_previous(PDL)
    sum = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    other = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for step in range(0, each, BLOCK_K):
        at = split * each + step + k
        there = at < INPUTS
        known = there[:, None] & exists[None, :]
        a = tl.load(x + m[:, None] * INPUTS + at[None, :], mask=inside[:, None] & there[None, :], other=0.0)
        w = tl.load(row + at[:, None], mask=known, other=0.0, eviction_policy="evict_first")
        sum = tl.dot(a, w, sum, input_precision="ieee")
        if GATED:
            w = tl.load(up + at[:, None], mask=known, other=0.0, eviction_policy="evict_first")
            other = tl.dot(a, w, other, input_precision="ieee")
    if BIASED:
        begin = tl.load(bias + n, mask=exists & (split == 0), other=0.0)
        sum += begin.to(tl.float32)[None, :]
    if GATED:
        if BIASED:
            other += tl.load(bias + outputs + n, mask=exists, other=0.0).to(tl.float32)[None, :]
        sum, other = rounded(sum, out), rounded(other, out)
        sum = rounded(activated(sum, SILU), out) * other
    target = out + (split * rows + m)[:, None].to(tl.int64) * outputs + n[None, :]
    tl.store(target, sum, mask=inside[:, None] & exists[None, :])


@triton.jit
def activated(x, SILU: tl.constexpr):
    inner = x
    if not SILU:  # gelu by tanh, in which 1 + tanh(z) is 2 sigmoid(2 z)
        inner = 1.5957691216057308 * (x + 0.044715 * x * x * x)
    return x * tl.sigmoid(inner)


@triton.jit
def rounded(x, out):
    """As if it had been written to memory like `out`: unfused kernels would round here."""
    return x.to(out.dtype.element_ty).to(tl.float32)
