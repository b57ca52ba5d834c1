"""Products of a few rows with quantised weights, in Triton: as in gemm.py, but each program turns codes into bfloat16
in registers on their way from memory to the matrix units, so the time is that of reading the codes once.

A byte holds one code (fp8, int8) or two (int4, fp4). Of two, the low halves of a run's bytes are its first inputs and
the high halves its last, so that each half meets neighbouring columns of x. Scales of groups multiply partial sums.
From 65 rows on, weights are the left factor: Hopper's wide matrix instruction takes 64 rows there.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from semspec.model.kernels import QUANTISED_ROWS
from semspec.model.kernels.codes import INT4, KINDS, half_codes, whole_codes
from semspec.model.kernels.early_launch import early, lines_ahead, prefetch, wait_for_previous
from semspec.model.kernels.gemm import activated, rounded
from semspec.model.kernels.tiles import Card, card_of, fit_shared
from semspec.model.quantised import QuantisedLinear

RUN = 256  # inputs of a run at most


@dataclass(frozen=True, slots=True)
class QuantisedConfig:
    """How a product is tiled. The figures behind `QuantisedConfig.of` are in docs/lab-notes.md."""

    rows: int
    columns: int  # outputs of one program; with an activation, gates and as many ups
    depth: int  # bytes of each output at a time
    splits: int  # of the sum; a power of two
    warps: int = 4
    stages: int = 4

    @staticmethod
    def of(
        size: tuple[int, int], rows: int, card: Card, split: bool, gated: bool, depth: int, halves: int, scale: int = 0
    ) -> QuantisedConfig:
        """For weights [outputs, bytes of one]; `depth` is the most bytes at a time that scales allow, `scale` the bytes
        of a scale where several belong to one tile, which then holds one for each weight."""
        height = max(16, triton.next_power_of_2(rows))
        outputs, columns, warps, stages = size[0] // (2 if gated else 1), 32, 4, 4
        if height > 16:
            columns, depth, stages = 64, min(depth, 128), 3
            if height > 64 and gated:
                columns, warps = 128, 8
        elif gated:
            depth, stages = min(depth, 128), 6 if halves == 1 and depth >= 128 else 4
        elif (split and outputs >= 4096) or outputs // 64 >= 2 * card.processors:
            columns, depth = 64, min(depth, 128)
        splits, tiles = 1, triton.cdiv(outputs, columns)
        busy = card.processors * (3 if size[1] >= 16384 else 2.4)  # the reader adds parts up, which takes time too
        while split and splits < 8 and tiles * splits < busy and size[1] // (4 * splits) >= depth:
            splits *= 2
        each = columns * (2 if gated else 1) * (1 + halves * scale) + 2 * halves * height
        stages, depth = fit_shared(stages, depth, each, card.shared)
        return QuantisedConfig(height, columns, depth, splits, warps, stages)


def suits(linear: QuantisedLinear, x: Tensor) -> bool:
    """Whether there is a kernel for such weights; else they are dequantised."""
    capability = card_of(x.device).capability
    if linear.kind == "fp8" and x.is_cuda and capability < 89 and not _packed(x):
        return False
    group, inputs = linear.block[1], linear.size[1]
    if linear.kind in ("int4", "fp4"):
        return linear.run >= 32 and (group % (linear.run // 2) == 0 or group < linear.run // 2)
    return group >= inputs or (group & (group - 1) == 0 and group >= 16)


def prepare(linear: QuantisedLinear) -> None:
    """Codes of half a byte are put in the order that the kernel reads them in."""
    if linear.kind in ("int4", "fp4") and linear.run == 2:
        group, inputs = linear.block[1], linear.size[1]
        run = math.gcd(inputs, min(2 * group, RUN) if group >= 64 else RUN)
        if run >= 32 and run & (run - 1) == 0:
            linear.set_run(run)


def quantised_product(
    x: Tensor,
    linear: QuantisedLinear,
    parts: bool = False,
    activation: str | None = None,
    out: Tensor | None = None,
    cut: QuantisedConfig | None = None,
) -> Tensor | None:
    """As `gemm.product`, of at most QUANTISED_ROWS rows; None: there is no kernel for these weights."""
    if not suits(linear, x):
        return None
    rows, inputs = x.shape
    gated, halves = activation is not None, 2 if linear.kind in ("int4", "fp4") else 1
    outputs, group = linear.size[0], linear.block[1] if linear.block[1] < inputs else 0
    if cut is None:
        depth = linear.run // 2 if halves == 2 else min(256, group) if group >= 64 else 64 if group else 256
        size, scale = (outputs, inputs // halves), 0
        if 0 < group < depth:
            scale = linear.scales.element_size() + (0 if linear.zeros is None else linear.zeros.element_size())
        cut = QuantisedConfig.of(size, rows, card_of(x.device), parts, gated, depth, halves, scale)
    if halves == 2 and cut.depth != linear.run // 2:  # of a card with little shared memory
        return None
    assert rows <= QUANTISED_ROWS and x.is_contiguous() and linear.codes.is_contiguous()
    assert activation is None or cut.splits == 1
    outputs //= 2 if gated else 1
    form, dtype = ((rows, outputs), x.dtype) if cut.splits == 1 else ((cut.splits, rows, outputs), torch.float32)
    out = x.new_empty(form, dtype=dtype) if out is None else out
    zeros, gain, bias = linear.zeros, linear.gain, linear.bias
    _quantised_product[(triton.cdiv(outputs, cut.columns), cut.splits)](
        x, linear.codes.view(torch.uint8), linear.scales, linear.scales if zeros is None else zeros,
        linear.scales if gain is None else gain, x if bias is None else bias, out, rows, outputs, out.stride(-2),
        INPUTS=inputs, BLOCK_M=cut.rows, BLOCK_N=cut.columns, BLOCK_K=cut.depth, KIND=KINDS[linear.kind],
        GROUP=group, GROUP_OUT=linear.block[0], ZEROS=zeros is not None, GAIN=gain is not None, SPLITS=cut.splits,
        BIASED=bias is not None, GATED=gated, SILU=activation == "silu", SWAP=cut.rows > 64, ASM=_packed(x),
        AHEAD=lines_ahead(linear.size[0], inputs // halves, cut.splits), num_warps=cut.warps, num_stages=cut.stages,
        **early(x.device),
    )  # fmt: skip
    return out


def _packed(x: Tensor) -> bool:
    """Whether codes are turned into numbers four at a time, by instructions of our own."""
    return x.dtype == torch.bfloat16 and card_of(x.device).capability >= 80


@triton.jit(do_not_specialize=["rows"])
def _quantised_product(
    x, codes, scales, zeros, gain, bias, out, rows, outputs, out_stride,
    INPUTS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    KIND: tl.constexpr, GROUP: tl.constexpr, GROUP_OUT: tl.constexpr, ZEROS: tl.constexpr, GAIN: tl.constexpr,
    SPLITS: tl.constexpr, BIASED: tl.constexpr, GATED: tl.constexpr, SILU: tl.constexpr,
    SWAP: tl.constexpr, ASM: tl.constexpr, AHEAD: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """BLOCK_K bytes of each output at a time. GROUP inputs and GROUP_OUT outputs share a scale; 0: all inputs."""
    HALVES: tl.constexpr = 1 if KIND < INT4 else 2
    BYTES: tl.constexpr = INPUTS // HALVES
    split = tl.program_id(1)
    m, n, k = tl.arange(0, BLOCK_M), tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K)
    each: tl.constexpr = (BYTES + BLOCK_K * SPLITS - 1) // (BLOCK_K * SPLITS) * BLOCK_K
    inside, exists = m < rows, n < outputs
    from_n = codes + n.to(tl.int64) * BYTES
    begin = split * each
    if PDL:
        last = tl.minimum(n, outputs - 1).to(tl.int64)
        prefetch(codes + last * BYTES, begin, BYTES, AHEAD)
        if GATED:
            prefetch(codes + (last + outputs) * BYTES, 0, BYTES, AHEAD)
    wait_for_previous(PDL)
    up = n + outputs  # only with a gate
    sum = tl.zeros([BLOCK_N, BLOCK_M] if SWAP else [BLOCK_M, BLOCK_N], tl.float32)
    other = tl.zeros([BLOCK_N, BLOCK_M] if SWAP else [BLOCK_M, BLOCK_N], tl.float32)
    # Scales and zeros are loaded a step ahead: the compiler makes loads of tiles only part of its pipeline.
    low, high = _of_groups(scales, n, HALVES * begin, exists, INPUTS, BLOCK_K, GROUP, GROUP_OUT, HALVES)
    low_zero, high_zero = _of_groups(zeros, n, HALVES * begin, exists, INPUTS, BLOCK_K, GROUP, GROUP_OUT, HALVES)
    up_low, up_high, up_low_zero, up_high_zero = low, high, low_zero, high_zero
    if GATED:
        up_low, up_high = _of_groups(scales, up, HALVES * begin, exists, INPUTS, BLOCK_K, GROUP, GROUP_OUT, HALVES)
        up_low_zero, up_high_zero = _of_groups(
            zeros, up, HALVES * begin, exists, INPUTS, BLOCK_K, GROUP, GROUP_OUT, HALVES
        )
    for step in range(0, each, BLOCK_K):
        at = begin + step + k
        there = at < BYTES
        first = HALVES * (begin + step)
        later = first + HALVES * BLOCK_K
        where = _outer(from_n, at, SWAP)
        known = _outer(exists, there, SWAP, False)
        raw = tl.load(where, mask=known, other=0, eviction_policy="evict_first")
        from_x = x + m[:, None] * INPUTS + (first + k)[None, :]
        a = tl.load(from_x, mask=inside[:, None] & there[None, :], other=0.0)
        b = a
        if HALVES == 2:
            b = tl.load(from_x + BLOCK_K, mask=inside[:, None] & there[None, :], other=0.0)
        next_low, next_high = _of_groups(scales, n, later, exists, INPUTS, BLOCK_K, GROUP, GROUP_OUT, HALVES)
        sum = _add(
            sum, raw, a, b, low, high, low_zero, high_zero, scales, zeros, n, exists, first,
            INPUTS, BLOCK_K, KIND, GROUP, GROUP_OUT, ZEROS, SWAP, ASM,
        )  # fmt: skip
        low, high = next_low, next_high
        if ZEROS:
            low_zero, high_zero = _of_groups(zeros, n, later, exists, INPUTS, BLOCK_K, GROUP, GROUP_OUT, HALVES)
        if GATED:
            raw = tl.load(where + outputs.to(tl.int64) * BYTES, mask=known, other=0, eviction_policy="evict_first")
            next_low, next_high = _of_groups(scales, up, later, exists, INPUTS, BLOCK_K, GROUP, GROUP_OUT, HALVES)
            other = _add(
                other, raw, a, b, up_low, up_high, up_low_zero, up_high_zero, scales, zeros, up, exists, first,
                INPUTS, BLOCK_K, KIND, GROUP, GROUP_OUT, ZEROS, SWAP, ASM,
            )  # fmt: skip
            up_low, up_high = next_low, next_high
            if ZEROS:
                up_low_zero, up_high_zero = _of_groups(
                    zeros, up, later, exists, INPUTS, BLOCK_K, GROUP, GROUP_OUT, HALVES
                )
    if SWAP:
        sum, other = tl.trans(sum), tl.trans(other)
    sum = _finished(sum, low, gain, bias, n, exists, split, GROUP, GAIN, BIASED)
    if GATED:
        other = _finished(other, up_low, gain, bias, up, exists, split, GROUP, GAIN, BIASED)
        sum, other = rounded(sum, out), rounded(other, out)
        sum = rounded(activated(sum, SILU), out) * other
    target = out + (split * rows + m)[:, None].to(tl.int64) * out_stride + n[None, :]
    tl.store(target, sum, mask=inside[:, None] & exists[None, :])


@triton.jit
def _outer(n, k, SWAP: tl.constexpr, PLUS: tl.constexpr = True):
    """For each output and each byte, with outputs first if swapped."""
    if PLUS:
        made = n[:, None] + k[None, :] if SWAP else n[None, :] + k[:, None]
    else:
        made = n[:, None] & k[None, :] if SWAP else n[None, :] & k[:, None]
    return made


@triton.jit
def _of_groups(
    values, n, first, exists, INPUTS: tl.constexpr, BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr, GROUP_OUT: tl.constexpr, HALVES: tl.constexpr,
):  # fmt: skip
    """Scales or zeros of outputs n, for BLOCK_K inputs from the first on and for the BLOCK_K inputs after these."""
    if GROUP == 0:
        low = tl.load(values + n // GROUP_OUT, mask=exists, other=0.0).to(tl.float32)
        high = low
    elif GROUP < BLOCK_K:  # see _add_half
        low = tl.zeros_like(n).to(tl.float32)
        high = low
    else:
        at = values + n // GROUP_OUT * tl.cdiv(INPUTS, GROUP)
        low = tl.load(at + first // GROUP, mask=exists & (first < INPUTS), other=0.0).to(tl.float32)
        high = low
        if HALVES == 2:
            later = first + BLOCK_K
            high = tl.load(at + later // GROUP, mask=exists & (later < INPUTS), other=0.0).to(tl.float32)
    return low, high


@triton.jit
def _add(
    sum, raw, a, b, low, high, low_zero, high_zero, scales, zeros, n, exists, first,
    INPUTS: tl.constexpr, BLOCK_K: tl.constexpr, KIND: tl.constexpr, GROUP: tl.constexpr, GROUP_OUT: tl.constexpr,
    ZEROS: tl.constexpr, SWAP: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """The sum and the product with one tile of codes."""
    if KIND < INT4:
        w = whole_codes(raw, a.dtype, KIND, ASM)
        sum = _add_half(
            sum, a, w, low, low_zero, first, scales, zeros, n, exists,
            INPUTS, BLOCK_K, KIND, GROUP, GROUP_OUT, ZEROS, SWAP,
        )  # fmt: skip
    else:
        w, v = half_codes(raw, a.dtype, KIND, ASM)
        sum = _add_half(
            sum, a, w, low, low_zero, first, scales, zeros, n, exists,
            INPUTS, BLOCK_K, KIND, GROUP, GROUP_OUT, ZEROS, SWAP,
        )  # fmt: skip
        sum = _add_half(
            sum, b, v, high, high_zero, first + BLOCK_K, scales, zeros, n, exists,
            INPUTS, BLOCK_K, KIND, GROUP, GROUP_OUT, ZEROS, SWAP,
        )  # fmt: skip
    return sum


@triton.jit
def _add_half(
    sum, a, w, scale, zero, first, scales, zeros, n, exists, INPUTS: tl.constexpr, BLOCK_K: tl.constexpr,
    KIND: tl.constexpr, GROUP: tl.constexpr, GROUP_OUT: tl.constexpr, ZEROS: tl.constexpr, SWAP: tl.constexpr,
):  # fmt: skip
    MIDDLE: tl.constexpr = 8.0 if KIND == INT4 else 0.0  # is subtracted from codes of int4 already
    MANY: tl.constexpr = GROUP > 0 and GROUP < BLOCK_K  # scales in one tile: they multiply weights, not sums
    if MANY:
        k = first + tl.arange(0, BLOCK_K)
        at = _outer(n // GROUP_OUT * tl.cdiv(INPUTS, GROUP), k // GROUP, SWAP)
        known = _outer(exists, k < INPUTS, SWAP, False)
        if ZEROS:
            w = w - (tl.load(zeros + at, mask=known, other=0.0).to(tl.float32) - MIDDLE).to(w.dtype)
        w = (w.to(tl.float32) * tl.load(scales + at, mask=known, other=0.0).to(tl.float32)).to(w.dtype)
    made = tl.dot(w, tl.trans(a), input_precision="ieee") if SWAP else tl.dot(a, w, input_precision="ieee")
    if ZEROS and not MANY:  # once for all weights of a group, not for each
        total, zero = tl.sum(a.to(tl.float32), 1), zero - MIDDLE
        made -= zero[:, None] * total[None, :] if SWAP else total[:, None] * zero[None, :]
    if GROUP == 0 or MANY:
        sum += made
    else:
        sum += made * (scale[:, None] if SWAP else scale[None, :])
    return sum


@triton.jit
def _finished(sum, scale, gain, bias, n, exists, split, GROUP: tl.constexpr, GAIN: tl.constexpr, BIASED: tl.constexpr):
    if GROUP == 0:
        sum *= scale[None, :]
    if GAIN:
        sum *= tl.load(gain + n, mask=exists, other=0.0)[None, :]
    if BIASED:
        sum += tl.load(bias + n, mask=exists & (split == 0), other=0.0).to(tl.float32)[None, :]
    return sum
