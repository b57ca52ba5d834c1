"""Weights in 8 or 4 bits with scales: the few layouts that all formats of checkpoints are turned into while loading.

A weight is (code - zero) * scale * gain, where a block of weights shares a scale and a zero, and an output its gain.
So one kernel for each kind of code serves every format. Activations stay floats.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from semspec.errors import ModelError
from semspec.model.fragments import from_fragments, to_fragments
from semspec.model.kernels import QUANTISED_ROWS, Kernels
from semspec.model.linear import Linear, evenly_spaced

Kind = Literal["fp8", "int8", "int4", "fp4"]
LARGEST = {"fp8": 448.0, "int8": 127.0, "int4": 15.0}  # code of a kind that we quantise to
GROUP, CPU_GROUP = 128, 32  # inputs that share a scale of int4, at most; on a CPU smaller groups cost no time
AT_A_TIME = 1 << 24  # weights that are quantised at once
FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # e2m1 by code; bit 3 is the sign
MIDDLE = 8  # the zero of int4 without zeros


@dataclass(slots=True)
class QuantisedLinear(Linear):
    """Tensors may have one more dimension in front, of experts."""

    kind: Kind
    # fp8: float8_e4m3fn [out, in]; int8: int8 [out, in]; int4 and fp4: uint8 [out, in / 2], see `run`.
    codes: Tensor
    scales: Tensor  # [ceil(out / block[0]), ceil(in / block[1])], float32, bfloat16, float16 or float8_e4m3fn
    block: tuple[int, int]  # (outputs, inputs) that share a scale; (1, in): one for each output
    zeros: Tensor | None = None  # in the shape of scales, any floats; None: 0, and MIDDLE for int4
    gain: Tensor | None = None  # float32 [out]: a format's scale of the whole matrix; None: 1
    bias: Tensor | None = None  # [out]
    original: Tensor | None = None  # a sample of the plain weights these were made from, if it was we who quantised
    # Of so many inputs, the low four bits of bytes are the first half's and the high four bits the second half's.
    run: int = 2
    fragments: bool = False  # int4: codes are in the order of fragments.py instead
    words: Tensor | None = (
        None  # int32 [groups, out]: a zero and a scale each, whose views `zeros` and `scales` are then
    )

    @property
    def size(self) -> tuple[int, int]:
        """(outputs, inputs)"""
        outputs, columns = self.codes.shape[-2:]
        return outputs, columns * (2 if self.kind in ("int4", "fp4") else 1)

    @property
    def layout(self) -> tuple[object, ...]:
        """Matrices that agree in this can be joined, if their inputs are as many, and stacked, if they are as large."""
        return self.kind, self.block[1], self.scales.dtype, None if self.zeros is None else self.zeros.dtype

    def dequantised(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """As plain floats: the reference for kernels, and what prompts are multiplied with if nothing is faster."""
        zeros = None if self.zeros is None else self._spread(self.zeros)
        return self._weights(self.codes, self._spread(self.scales), zeros, self.gain, self.fragments).to(dtype)

    def _weights(
        self, codes: Tensor, scales: Tensor, zeros: Tensor | None, gain: Tensor | None, fragments: bool = False
    ) -> Tensor:
        """Of some outputs, [..., n, codes], with what each weight has: scales and zeros [..., n, in or 1], gain [n]."""
        if fragments:
            codes = from_fragments(codes)
        elif self.kind in ("int4", "fp4"):
            codes = codes.unflatten(-1, (-1, self.run // 2))
            codes = torch.cat([codes & 15, codes >> 4], -1).flatten(-2)
        if self.kind == "fp4":
            codes = torch.tensor([*FP4, *(-value for value in FP4)], device=codes.device)[codes.int()]
        values = codes.float()
        if zeros is not None:
            values = values - zeros
        elif self.kind == "int4":
            values = values - MIDDLE
        values = values * scales
        return values if gain is None else values * gain[..., None]

    def _spread(self, scales: Tensor) -> Tensor:
        """What blocks share, for each weight."""
        (outputs, inputs), (rows, columns), made = self.size, self.block, scales.float()
        if rows > 1:
            made = made.repeat_interleave(rows, -2)[..., :outputs, :]
        return made if columns >= inputs else made.repeat_interleave(columns, -1)[..., :inputs]

    def __call__(self, x: Tensor) -> Tensor:
        if x.is_cuda and self.codes.dim() == 2:
            from semspec.model.kernels.dequantise import dequantise  # needs Triton

            return F.linear(x, dequantise(self, x.dtype), self.bias)
        return F.linear(x, self.dequantised(x.dtype), self.bias)

    def fused(self, kernels: Kernels, x: Tensor, parts: bool, activation: str | None) -> Tensor | None:
        if kernels.quantised_product is None or len(x) > QUANTISED_ROWS:
            return None
        return kernels.quantised_product(x, self, parts, activation)

    def set_run(self, run: int) -> None:
        """Reorder codes of four bits, in place of the former ones."""
        assert self.run == 2 and self.size[1] % run == 0
        self.original, self.run = self.sample, run
        for codes in self.codes.flatten(0, -2).split(4096):  # not a second copy of a large matrix
            whole = torch.stack([codes & 15, codes >> 4], -1).flatten(-2).unflatten(-1, (-1, 2, run // 2))
            codes.copy_((whole[..., 0, :] | whole[..., 1, :] << 4).flatten(-2))

    def set_fragments(self) -> None:
        """The same for codes that kernels/int4.py reads."""
        assert self.run == 2 and not self.fragments
        self.original, self.fragments = self.sample, True
        for codes in self.codes.split(4096):
            codes.copy_(to_fragments(codes))

    @property
    def sample(self) -> Tensor:
        if self.original is not None:
            return self.original
        # Of a flat matrix's every n-th weight; codes, two of which may share a byte, as rows of one or two weights.
        outputs, inputs = self.size
        index = evenly_spaced(torch.arange(outputs * inputs, device=self.codes.device))
        row, column = index // inputs, index % inputs
        block, each = (row // self.block[0], column // self.block[1]), inputs // self.codes.shape[-1]
        zeros, gain = None if self.zeros is None else self.zeros[block].float()[:, None], self.gain
        codes = self.codes.view(torch.uint8)[row, column // each].view(self.codes.dtype)[:, None]
        scales = self.scales.float()[block][:, None]
        weights = self._weights(codes, scales, zeros, None if gain is None else gain[row])  # [n, each]
        return weights.gather(1, (column % each)[:, None])[:, 0]

    @property
    def nbytes(self) -> int:
        tensors = (self.codes, self.scales, self.zeros, self.gain, self.bias, self.original)
        return sum(t.nbytes for t in tensors if t is not None)

    @property
    def halves(self) -> tuple[QuantisedLinear, QuantisedLinear]:
        """Of gate and up in one product: each by itself, in the same memory."""
        half = self.size[0] // 2
        whole = self if half % self.block[0] == 0 else self.with_rows(math.gcd(half, self.block[0]))
        optional = [(None, None) if t is None else t.chunk(2, -1) for t in (whole.gain, whole.bias)]
        zeros = (None, None) if whole.zeros is None else whole.zeros.chunk(2, -2)
        parts = zip(whole.codes.chunk(2, -2), whole.scales.chunk(2, -2), zeros, *optional, strict=True)
        one, two = (
            replace(whole, codes=codes, scales=scales, zeros=zero, gain=gain, bias=bias, original=None, words=None)
            for codes, scales, zero, gain, bias in parts
        )
        return one, two

    def picked(self, index: Tensor) -> QuantisedLinear:
        """Of stacked matrices, those of an index [n]; of one matrix, outputs."""
        codes = pack_nibbles(from_fragments(self.codes)) if self.fragments else self.codes
        codes = codes.view(torch.uint8)[index].view(codes.dtype)
        zeros, gain = (None if t is None else t[index] for t in (self.zeros, self.gain))
        return replace(
            self, codes=codes, scales=self.scales[index], zeros=zeros, gain=gain, fragments=False, words=None
        )

    def with_rows(self, rows: int) -> QuantisedLinear:
        """The same with blocks of fewer outputs, which divide those of before."""
        count, times = math.ceil(self.size[0] / rows), self.block[0] // rows

        def more(scales: Tensor) -> Tensor:
            return scales.repeat_interleave(times, -2)[..., :count, :].contiguous()

        zeros = None if self.zeros is None else more(self.zeros)
        return replace(self, scales=more(self.scales), zeros=zeros, block=(rows, self.block[1]), words=None)


def group_of(device: torch.device) -> int:
    return CPU_GROUP if device.type == "cpu" else GROUP


def quantise(weight: Tensor, kind: Kind, bias: Tensor | None = None, group: int | None = None) -> QuantisedLinear:
    """Plain weights [out, in] in fewer bits: a scale for each output, for int4 a scale and a zero for each `group`, or
    as much of it as divides the inputs."""
    inputs = weight.shape[1]
    group = inputs if kind != "int4" else math.gcd(group or group_of(weight.device), inputs)
    if group < 2:
        raise ModelError(f"a matrix of {inputs} inputs cannot be stored as {kind}; load with another dtype")
    # A part at a time: the floats between take several times the memory of the weights.
    parts = [_quantised(part, kind, group) for part in weight.split(max(1, AT_A_TIME // inputs))]
    codes, scales, *zeros = (torch.cat(tensors) for tensors in zip(*parts, strict=True))
    original = evenly_spaced(weight).clone()
    return QuantisedLinear(kind, codes, scales, (1, group), zeros[0] if zeros else None, None, bias, original)


def _quantised(weight: Tensor, kind: Kind, group: int) -> tuple[Tensor, ...]:
    """Codes, scales and perhaps zeros."""
    grouped = weight.float().unflatten(1, (-1, group))  # [out, groups, group]
    low, high = grouped.amin(-1).clamp_(max=0), grouped.amax(-1).clamp_(min=0)
    if kind == "int4":
        scales = ((high - low) / LARGEST[kind]).clamp_(min=1e-12).bfloat16()  # codes are chosen for the rounded scale
        zeros = (-low / scales.float()).half()
        if weight.device.type != "cpu":  # there, whole zeros cost nothing, others do
            zeros = zeros.round()
        codes = (grouped / scales.float()[..., None]).add_(zeros.float()[..., None])
        return pack_nibbles(codes.round_().clamp_(0, LARGEST[kind]).to(torch.uint8).flatten(1)), scales, zeros
    scales = (torch.maximum(high, -low) / LARGEST[kind]).clamp_(min=1e-12)
    codes = (grouped / scales[..., None]).flatten(1)
    if kind == "int8":
        return codes.round_().to(torch.int8), scales
    return codes.clamp_(-LARGEST[kind], LARGEST[kind]).to(torch.float8_e4m3fn), scales


def pack_nibbles(codes: Tensor) -> Tensor:
    """Codes of four bits [..., n], each in a byte -> two in a byte, the even one low."""
    return codes[..., ::2] | codes[..., 1::2] << 4


def join(parts: Sequence[QuantisedLinear], bias: Tensor | None = None) -> QuantisedLinear | None:
    """Matrices with the same inputs as one, their outputs one after the other. None: their layouts differ."""
    first = parts[0]
    if len({p.layout for p in parts}) > 1:
        return None
    rows = math.gcd(*(p.block[0] for p in parts), *(p.size[0] for p in parts)) if len(parts) > 1 else first.block[0]
    parts = [p if p.block[0] == rows else p.with_rows(rows) for p in parts]
    gain = None
    if any(p.gain is not None for p in parts):
        ones = (torch.ones(p.size[0], device=p.codes.device) if p.gain is None else p.gain for p in parts)
        gain = torch.cat(list(ones))
    zeros = None if first.zeros is None else torch.cat([p.zeros for p in parts if p.zeros is not None])
    codes, scales = torch.cat([p.codes for p in parts]), torch.cat([p.scales for p in parts])
    return QuantisedLinear(first.kind, codes, scales, (rows, first.block[1]), zeros, gain, bias)


def stack(experts: Sequence[QuantisedLinear]) -> QuantisedLinear:
    """Matrices of one layout as one with a dimension of experts in front; each expert then holds a view of it."""
    first = experts[0]

    def together(name: str) -> Tensor | None:
        if getattr(first, name) is None:
            return None
        whole = torch.stack([getattr(expert, name) for expert in experts])
        for expert, part in zip(experts, whole, strict=True):
            setattr(expert, name, part)
        return whole

    codes, scales = together("codes"), together("scales")
    assert codes is not None and scales is not None
    zeros, gain = together("zeros"), together("gain")
    return QuantisedLinear(first.kind, codes, scales, first.block, zeros, gain, run=first.run)
