"""Quantised weights as floats, in Triton: what passes of many rows are multiplied with, one matrix at a time."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from semspec.model.kernels.codes import INT4, KINDS, half_codes, whole_codes
from semspec.model.quantised import QuantisedLinear


def dequantise(linear: QuantisedLinear, dtype: torch.dtype) -> Tensor:
    """All weights as floats, [out, in]: what many rows are multiplied with."""
    outputs, inputs = linear.size
    halves = 2 if linear.kind in ("int4", "fp4") else 1
    out = torch.empty((outputs, inputs), device=linear.codes.device, dtype=dtype)
    zeros, gain = linear.zeros, linear.gain
    assert zeros is None or zeros.stride() == linear.scales.stride()
    _dequantise[(outputs, triton.cdiv(inputs // halves, 1024))](
        linear.codes.view(torch.uint8), linear.scales, linear.scales if zeros is None else zeros,
        linear.scales if gain is None else gain, out, *linear.scales.stride(), INPUTS=inputs, KIND=KINDS[linear.kind],
        GROUP=min(linear.block[1], inputs), GROUP_OUT=linear.block[0], FRAGMENTS=linear.fragments,
        HALF_RUN=32 if linear.fragments else linear.run // 2, ZEROS=zeros is not None, GAIN=gain is not None,
        BLOCK=1024, num_warps=4,
    )  # fmt: skip
    return out


@triton.jit
def _dequantise(
    codes, scales, zeros, gain, out, scale_row, scale_group, INPUTS: tl.constexpr, KIND: tl.constexpr,
    GROUP: tl.constexpr, GROUP_OUT: tl.constexpr, HALF_RUN: tl.constexpr, ZEROS: tl.constexpr, GAIN: tl.constexpr,
    FRAGMENTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    HALVES: tl.constexpr = 1 if KIND < INT4 else 2
    MIDDLE: tl.constexpr = 8.0 if KIND == INT4 else 0.0  # is subtracted from codes of int4 already
    row, i = tl.program_id(0), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = i < INPUTS // HALVES
    if FRAGMENTS:  # see fragments.py: a byte has an input of two outputs, and two bytes become one of a run of 64
        k, half = i % 32, row % 2 * 4
        place = (row // 32).to(tl.int64) * (16 * INPUTS) + row // 2 % 2 * 512 + row // 4 % 8 * 64
        place += i // 32 * 1024 + k // 8 * 16 + k // 4 % 2 * 4 + k % 2 * 2 + k // 2 % 2
        low = tl.load(codes + place, mask=inside, other=0).to(tl.int32) >> half & 15
        high = tl.load(codes + place + 8, mask=inside, other=0).to(tl.int32) >> half & 15
        raw = low | high << 4
    else:
        raw = tl.load(codes + row.to(tl.int64) * (INPUTS // HALVES) + i, mask=inside, other=0)
    own = row // GROUP_OUT * scale_row
    times = 1.0
    if GAIN:
        times = tl.load(gain + row)
    if KIND < INT4:
        low = whole_codes(raw, tl.float32, KIND, False)
        _store(out, low, scales, zeros, own, scale_group, times, row, i, inside, INPUTS, GROUP, ZEROS, MIDDLE)
    else:
        low, high = half_codes(raw, tl.float32, KIND, False)
        at = i // HALF_RUN * (2 * HALF_RUN) + i % HALF_RUN
        _store(out, low, scales, zeros, own, scale_group, times, row, at, inside, INPUTS, GROUP, ZEROS, MIDDLE)
        at += HALF_RUN
        _store(out, high, scales, zeros, own, scale_group, times, row, at, inside, INPUTS, GROUP, ZEROS, MIDDLE)


@triton.jit
def _store(
    out, value, scales, zeros, own, scale_group, times, row, at, inside,
    INPUTS: tl.constexpr, GROUP: tl.constexpr, ZEROS: tl.constexpr, MIDDLE: tl.constexpr,
):  # fmt: skip
    scale = tl.load(scales + own + at // GROUP * scale_group, mask=inside, other=0.0).to(tl.float32)
    if ZEROS:
        value -= tl.load(zeros + own + at // GROUP * scale_group, mask=inside, other=0.0).to(tl.float32) - MIDDLE
    tl.store(out + row.to(tl.int64) * INPUTS + at, value * scale * times, mask=inside)
