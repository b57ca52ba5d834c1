"""Products of a few rows with quantised weights, in Triton: as in gemm.py, but each program turns codes into bfloat16
in registers on their way from memory to the matrix units, so the time is that of reading the codes once.

A byte holds one code (fp8, int8) or two (int4, fp4). Of two, the low halves of a run's bytes are its first inputs and
the high halves its last, so that each half meets neighbouring columns of x. A tile has inputs of one group in each
half, so that scales multiply partial sums; zeros are subtracted where codes become numbers.
From 65 rows on, weights are the left factor: Hopper's wide matrix instruction takes 64 rows there.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from semspec.model.kernels import QUANTISED_ROWS, int4
from semspec.model.kernels.codes import INT4, KINDS, half_codes, half_codes_less, whole_codes
from semspec.model.kernels.early_launch import early, lines_ahead, prefetch, wait_for_previous
from semspec.model.kernels.gemm import activated, rounded
from semspec.model.kernels.scale_order import put_in_order
from semspec.model.kernels.tiles import Card, card_of, fit_shared
from semspec.model.quantised import QuantisedLinear

RUN = 256  # inputs of a run at most
NO_ZEROS, WORDS, ANY_ZEROS = (tl.constexpr(i) for i in range(3))  # WORDS: a small whole zero and a scale in one word


@dataclass(frozen=True, slots=True)
class QuantisedConfig:
    """How a product is tiled. The figures behind `QuantisedConfig.of` are in docs/lab-notes.md."""

    rows: int
    columns: int  # outputs of one program; with an activation, gates and as many ups
    depth: int  # bytes of each output in a tile
    splits: int  # of the sum; a power of two
    warps: int = 4
    stages: int = 4
    unroll: int = 1  # tiles at a time

    @staticmethod
    def of(
        size: tuple[int, int], rows: int, card: Card, split: bool, gated: bool, depth: int, halves: int, item: int = 2
    ) -> QuantisedConfig:
        """For weights [outputs, bytes of one]; `depth` is the most bytes of a tile that scales allow, `item` the bytes
        of an activation."""
        height = max(16, triton.next_power_of_2(rows))
        outputs, columns, warps, stages = size[0] // (2 if gated else 1), 32, 4, 4
        if height > 16:
            columns, depth, stages = 64, min(depth, 128), 3
            if height > 64 and gated:
                columns, warps = 128, 8
        elif gated:
            depth, stages = min(depth, 128), 7 if halves == 1 and depth >= 128 else 4
        elif (split and outputs >= 4096) or outputs // 64 >= 2 * card.processors:
            if halves == 2 or size[1] < 16384:
                columns, depth, stages = 64, min(depth, 128), 6 if halves == 1 else 4
        elif halves == 1 and not split and size[1] >= 4096:
            stages = 6
        if height == 16 and depth < 64 and outputs >= 2048:  # small groups: what a tile costs besides its weights
            columns = min(128, 2 * columns)
        splits, tiles = 1, triton.cdiv(outputs, columns)
        # The reader adds parts up, which takes time too.
        busy = card.processors * (3 if size[1] >= (4096 if halves == 1 else 8192) else 2.4)
        while split and splits < 8 and tiles * splits < busy and size[1] // (4 * splits) >= depth:
            splits *= 2
        unroll = max(1, 128 // depth)
        each = columns * (2 if gated else 1) + item * halves * height
        while unroll > 1 and 2 * unroll * depth * each > card.shared:
            unroll //= 2
        stages, depth = fit_shared(stages, depth * unroll, each, card.shared)
        return QuantisedConfig(height, columns, max(16, depth // unroll), splits, warps, stages, unroll)


def suits(linear: QuantisedLinear, x: Tensor) -> bool:
    """Whether there is a kernel for such weights; else they are dequantised."""
    capability = card_of(x.device).capability
    if linear.kind == "fp8" and x.is_cuda and capability < 89 and not packed(x):
        return False
    group, inputs = linear.block[1], linear.size[1]
    if linear.kind in ("int4", "fp4"):
        depth = linear.run // 2
        if x.dtype == torch.float32 and len(x) > 64:  # a tile of both halves would not fit into shared memory
            return False
        return linear.run >= 32 and (group % depth == 0 or (2 * group == depth and linear.zeros is None))
    return group >= inputs or (group & (group - 1) == 0 and group >= (16 if linear.zeros is None else 32))


def prepare(linear: QuantisedLinear, expert: bool = False, fragments: bool = False) -> None:
    """Codes of half a byte are put in the order that the kernel reads them in (`fragments`: that of int4.py, where it
    fits), and scales in theirs, but for experts."""
    group, inputs = linear.block[1], linear.size[1]
    if fragments and not expert and int4.fits(linear):
        linear.set_fragments()
    elif linear.kind in ("int4", "fp4") and linear.run == 2 and not linear.fragments:
        run = math.gcd(inputs, 2 * max(32, min(group, RUN // 2)))
        if run >= 32 and run & (run - 1) == 0:
            linear.set_run(run)
    if not expert and group < inputs and linear.scales.element_size() > 1:
        put_in_order(linear)


def quantised_product(
    x: Tensor,
    linear: QuantisedLinear,
    parts: bool = False,
    activation: str | None = None,
    out: Tensor | None = None,
    cut: QuantisedConfig | None = None,
) -> Tensor | None:
    """As `gemm.product`, of at most QUANTISED_ROWS rows; None: there is no kernel for these weights."""
    if linear.fragments:
        return int4.int4_product(x, linear, parts, activation, out)
    if not suits(linear, x):
        return None
    rows, inputs = x.shape
    gated, halves = activation is not None, 2 if linear.kind in ("int4", "fp4") else 1
    outputs, group = linear.size[0], linear.block[1] if linear.block[1] < inputs else 0
    if cut is None:
        depth = linear.run // 2 if halves == 2 else max(32, min(256, group)) if group else 256
        size = (outputs, inputs // halves)
        cut = QuantisedConfig.of(size, rows, card_of(x.device), parts, gated, depth, halves, x.element_size())
    if halves == 2 and cut.depth != linear.run // 2:  # of a card with little shared memory
        return None
    assert rows <= QUANTISED_ROWS and x.is_contiguous() and linear.codes.is_contiguous()
    assert activation is None or cut.splits == 1
    outputs //= 2 if gated else 1
    form, dtype = ((rows, outputs), x.dtype) if cut.splits == 1 else ((cut.splits, rows, outputs), torch.float32)
    out = x.new_empty(form, dtype=dtype) if out is None else out
    scales, zeros, words, gain, bias = linear.scales, linear.zeros, linear.words, linear.gain, linear.bias
    kind = NO_ZEROS if zeros is None else ANY_ZEROS if words is None else WORDS
    strides = scales.stride() if words is None else words.stride()[::-1]
    assert zeros is None or words is not None or zeros.stride() == strides
    _quantised_product[(triton.cdiv(outputs, cut.columns), cut.splits)](
        x, linear.codes.view(torch.uint8), scales, scales if zeros is None else zeros if words is None else words,
        scales if gain is None else gain, x if bias is None else bias, out, rows, outputs, out.stride(-2), *strides,
        INPUTS=inputs, BLOCK_M=cut.rows, BLOCK_N=cut.columns, BLOCK_K=cut.depth, UNROLL=cut.unroll,
        KIND=KINDS[linear.kind], GROUP=group, GROUP_OUT=linear.block[0], ZEROS=kind, GAIN=gain is not None,
        SPLITS=cut.splits, BIASED=bias is not None, GATED=gated, SILU=activation == "silu", SWAP=cut.rows > 64,
        ASM=packed(x), STAGES=cut.stages, AHEAD=lines_ahead(linear.size[0], inputs // halves, cut.splits),
        num_warps=cut.warps, num_stages=cut.stages, **early(x.device),
    )  # fmt: skip
    return out


def packed(x: Tensor) -> bool:
    """Whether codes are turned into numbers four at a time, by instructions of our own."""
    return x.dtype == torch.bfloat16 and card_of(x.device).capability >= 80


@triton.jit(do_not_specialize=["rows"])
def _quantised_product(
    x, codes, scales, zeros, gain, bias, out, rows, outputs, out_stride, scale_row, scale_group,
    INPUTS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, UNROLL: tl.constexpr,
    KIND: tl.constexpr, GROUP: tl.constexpr, GROUP_OUT: tl.constexpr, ZEROS: tl.constexpr, GAIN: tl.constexpr,
    SPLITS: tl.constexpr, BIASED: tl.constexpr, GATED: tl.constexpr, SILU: tl.constexpr,
    SWAP: tl.constexpr, ASM: tl.constexpr, STAGES: tl.constexpr, AHEAD: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """UNROLL tiles of BLOCK_K bytes of each output at a time. GROUP inputs and GROUP_OUT outputs share a scale; 0: all
    inputs."""
    HALVES: tl.constexpr = 1 if KIND < INT4 else 2
    BYTES: tl.constexpr = INPUTS // HALVES
    STEP: tl.constexpr = BLOCK_K * UNROLL
    split = tl.program_id(1)
    m, n = tl.arange(0, BLOCK_M), tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    row = x + m[:, None] * INPUTS
    each: tl.constexpr = (BYTES + STEP * SPLITS - 1) // (STEP * SPLITS) * STEP
    inside, exists = m < rows, n < outputs
    begin = split * each
    if PDL:
        last = tl.minimum(n, outputs - 1).to(tl.int64)
        prefetch(codes + last * BYTES, begin, BYTES, AHEAD)
        if GATED:
            prefetch(codes + (last + outputs) * BYTES, 0, BYTES, AHEAD)
    wait_for_previous(PDL)
    up = n + outputs  # only with a gate
    from_n, from_up = codes + n.to(tl.int64) * BYTES, codes + up.to(tl.int64) * BYTES
    of_n, of_up = n // GROUP_OUT * scale_row, up // GROUP_OUT * scale_row
    sum = tl.zeros([BLOCK_N, BLOCK_M] if SWAP else [BLOCK_M, BLOCK_N], tl.float32)
    other = tl.zeros([BLOCK_N, BLOCK_M] if SWAP else [BLOCK_M, BLOCK_N], tl.float32)
    for step in tl.range(0, each, STEP, num_stages=STAGES):  # said here, so that scales are part of the pipeline too
        for tile in tl.static_range(UNROLL):
            start = begin + step + tile * BLOCK_K
            sum, other = add_tile(
                sum, other, row, inside, from_n, from_up, of_n, of_up, scales, zeros, scale_group, start, exists,
                INPUTS, BLOCK_K, KIND, GROUP, ZEROS, GATED, SWAP, ASM,
            )  # fmt: skip
    if SWAP:
        sum, other = tl.trans(sum), tl.trans(other)
    sum = finished(sum, scales + of_n, gain, bias, n, exists, split, GROUP, GAIN, BIASED)
    if GATED:
        other = finished(other, scales + of_up, gain, bias, up, exists, split, GROUP, GAIN, BIASED)
        sum, other = rounded(sum, out), rounded(other, out)
        sum = rounded(activated(sum, SILU), out) * other
    target = out + (split * rows + m)[:, None].to(tl.int64) * out_stride + n[None, :]
    tl.store(target, sum, mask=inside[:, None] & exists[None, :])


@triton.jit
def add_tile(
    sum, other, row, inside, from_n, from_up, of_n, of_up, scales, zeros, scale_group, start, exists,
    INPUTS: tl.constexpr, BLOCK_K: tl.constexpr, KIND: tl.constexpr, GROUP: tl.constexpr, ZEROS: tl.constexpr,
    GATED: tl.constexpr, SWAP: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Both sums (the second only with a gate), and the products of rows of x with one tile of codes."""
    HALVES: tl.constexpr = 1 if KIND < INT4 else 2
    k = tl.arange(0, BLOCK_K)
    known = inside[:, None] & (start + k < INPUTS // HALVES)[None, :]
    from_x = row + (HALVES * start + k)[None, :]
    a = tl.load(from_x, mask=known, other=0.0)
    b = a
    if HALVES == 2:
        b = tl.load(from_x + BLOCK_K, mask=known, other=0.0)
    sum = _add(
        sum, from_n, of_n, scales, zeros, scale_group, a, b, start, exists,
        INPUTS, BLOCK_K, KIND, GROUP, ZEROS, SWAP, ASM,
    )  # fmt: skip
    if GATED:
        other = _add(
            other, from_up, of_up, scales, zeros, scale_group, a, b, start, exists,
            INPUTS, BLOCK_K, KIND, GROUP, ZEROS, SWAP, ASM,
        )  # fmt: skip
    return sum, other


@triton.jit
def _add(
    sum, codes, own, scales, zeros, scale_group, a, b, start, exists, INPUTS: tl.constexpr, BLOCK_K: tl.constexpr,
    KIND: tl.constexpr, GROUP: tl.constexpr, ZEROS: tl.constexpr, SWAP: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """The sum and the product with one tile of codes."""
    HALVES: tl.constexpr = 1 if KIND < INT4 else 2
    at = start + tl.arange(0, BLOCK_K)
    known = _outer(exists, at < INPUTS // HALVES, SWAP, False)
    raw = tl.load(_outer(codes, at, SWAP), mask=known, other=0, eviction_policy="evict_first")
    first = HALVES * start
    scale, zero = _of_group(scales, zeros, own, first, scale_group, exists, INPUTS, GROUP, ZEROS)
    second, low, high, w, v = scale, zero, zero, raw, raw
    if HALVES == 1:
        w = whole_codes(raw, a.dtype, KIND, ASM)
    else:
        second, high = _of_group(scales, zeros, own, first + BLOCK_K, scale_group, exists, INPUTS, GROUP, ZEROS)
        if ZEROS == WORDS:
            w, v = half_codes_less(raw, _beside(low, SWAP), _beside(high, SWAP), a.dtype, KIND, ASM)
        else:
            w, v = half_codes(raw, a.dtype, KIND, ASM)
    MIDDLE: tl.constexpr = 8.0 if KIND == INT4 else 0.0  # is subtracted from codes of int4 already
    TWO: tl.constexpr = GROUP > 0 and GROUP < BLOCK_K  # groups in half a tile, which multiply weights in place of sums
    if TWO:
        w = _scaled(w, scale, scales, own, first, scale_group, exists, INPUTS, BLOCK_K, GROUP, SWAP)
    sum = _add_half(sum, a, w, scale, low - MIDDLE, GROUP, ZEROS, TWO, SWAP)
    if HALVES == 2:
        if TWO:
            v = _scaled(v, second, scales, own, first + BLOCK_K, scale_group, exists, INPUTS, BLOCK_K, GROUP, SWAP)
        sum = _add_half(sum, b, v, second, high - MIDDLE, GROUP, ZEROS, TWO, SWAP)
    return sum


@triton.jit
def _outer(n, k, SWAP: tl.constexpr, PLUS: tl.constexpr = True):
    """For each output and each byte, with outputs first if swapped."""
    if PLUS:
        made = n[:, None] + k[None, :] if SWAP else n[None, :] + k[:, None]
    else:
        made = n[:, None] & k[None, :] if SWAP else n[None, :] & k[:, None]
    return made


@triton.jit
def _beside(n, SWAP: tl.constexpr):
    return n[:, None] if SWAP else n[None, :]


@triton.jit
def _of_group(
    scales, zeros, own, first, scale_group, exists, INPUTS: tl.constexpr, GROUP: tl.constexpr, ZEROS: tl.constexpr
):
    """Scales and zeros of outputs for the group of the first of some inputs."""
    at, known = own, exists
    if GROUP > 0:
        at, known = own + first // GROUP * scale_group, exists & (first < INPUTS)
    scale = tl.zeros_like(own).to(tl.float32)
    zero = scale
    if ZEROS == WORDS:
        word = tl.load(zeros + at, mask=known, other=0)
        zero = (word << 16).to(tl.float32, bitcast=True)
        if scales.dtype.element_ty == tl.bfloat16:
            scale = (word & -65536).to(tl.float32, bitcast=True)
        else:
            scale = (word >> 16).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    else:
        if GROUP > 0:
            scale = tl.load(scales + at, mask=known, other=0.0).to(tl.float32)
        if ZEROS == ANY_ZEROS:
            zero = tl.load(zeros + at, mask=known, other=0.0).to(tl.float32)
    return scale, zero


@triton.jit
def _scaled(
    w, scale, scales, own, first, scale_group, exists,
    INPUTS: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr, SWAP: tl.constexpr,
):  # fmt: skip
    """Weights of two groups. What fp4 and its scales make is exact in bfloat16."""
    later = tl.load(
        scales + own + (first + GROUP) // GROUP * scale_group, mask=exists & (first + GROUP < INPUTS), other=0.0
    )
    early, k = _beside(scale.to(w.dtype), SWAP), tl.arange(0, BLOCK_K)
    chosen = (k < GROUP)[None, :] if SWAP else (k < GROUP)[:, None]
    return w * tl.where(chosen, early, _beside(later.to(tl.float32).to(w.dtype), SWAP))


@triton.jit
def _add_half(sum, a, w, scale, zero, GROUP: tl.constexpr, ZEROS: tl.constexpr, TWO: tl.constexpr, SWAP: tl.constexpr):
    made = tl.dot(w, tl.trans(a), input_precision="ieee") if SWAP else tl.dot(a, w, input_precision="ieee")
    if ZEROS == ANY_ZEROS:  # once for all weights of a group, not for each
        total = tl.sum(a.to(tl.float32), 1)
        made -= zero[:, None] * total[None, :] if SWAP else total[:, None] * zero[None, :]
    if GROUP == 0 or TWO:
        sum += made
    else:
        sum += made * _beside(scale, SWAP)
    return sum


@triton.jit
def finished(sum, scales, gain, bias, n, exists, split, GROUP: tl.constexpr, GAIN: tl.constexpr, BIASED: tl.constexpr):
    if GROUP == 0:
        sum *= tl.load(scales, mask=exists, other=0.0).to(tl.float32)[None, :]
    if GAIN:
        sum *= tl.load(gain + n, mask=exists, other=0.0)[None, :]
    if BIASED:
        sum += tl.load(bias + n, mask=exists & (split == 0), other=0.0).to(tl.float32)[None, :]
    return sum
