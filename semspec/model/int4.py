"""Products with weights of four bits, for CPUs: torch's own, which reads half the bytes of int8 and rounds inputs to
bfloat16. A row's result does not depend on the other rows of the batch.

Where torch's product does not take a matrix (outputs that are no multiple of 16, small groups, a last group that is
smaller than the others), it is stored as int8.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from semspec.errors import ModelError
from semspec.model.int8 import Int8Linear
from semspec.model.linear import Linear, evenly_spaced
from semspec.model.quantisation import GROUPS
from semspec.model.quantised import MIDDLE, QuantisedLinear

OUTPUTS = 16  # a matrix has a multiple of these


def fast() -> bool:
    """Whether this machine's processor has instructions for which torch's product was written."""
    return torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512") and hasattr(
        torch.ops.aten, "_weight_int4pack_mm_for_cpu"
    )


@dataclass(frozen=True, slots=True)
class Int4Blocks:
    """What the product is made of. A weight is code * scale + offset, or without offsets (code - 8) * scale."""

    codes: Tensor  # uint8 [out, in], each in a byte
    scales: Tensor  # float32 [out, groups]
    offsets: Tensor | None  # likewise
    original: Tensor | None = None  # a sample of the weights these were made from, where it was we who quantised

    @staticmethod
    def of(linear: QuantisedLinear) -> Int4Blocks:
        codes = torch.stack([linear.codes & 15, linear.codes >> 4], -1).flatten(-2)
        scales = linear.scales.float()
        zeros = MIDDLE if linear.zeros is None else linear.zeros.float()
        return Int4Blocks(codes, scales, -zeros * scales, linear.sample)

    @staticmethod
    def join(parts: Sequence[Int4Blocks]) -> Int4Blocks:
        """Matrices with the same inputs as one, their outputs one after the other."""
        own = [p.offsets for p in parts if p.offsets is not None]
        own = own if len(own) in (0, len(parts)) else [p.all_offsets for p in parts]
        offsets = torch.cat(own) if own else None
        return Int4Blocks(torch.cat([p.codes for p in parts]), torch.cat([p.scales for p in parts]), offsets)

    @property
    def group(self) -> int:
        return self.codes.shape[1] // self.scales.shape[1]

    @property
    def suits(self) -> bool:
        """Whether torch's product takes it."""
        return self.group in GROUPS and self.codes.shape[1] % self.group == 0 and len(self.codes) % OUTPUTS == 0

    @property
    def all_offsets(self) -> Tensor:
        return -MIDDLE * self.scales if self.offsets is None else self.offsets

    def rows(self, index: Tensor) -> Int4Blocks:
        return Int4Blocks(self.codes[index], self.scales[index], None if self.offsets is None else self.offsets[index])

    def dequantised(self) -> Tensor:
        grouped, offsets = self.codes.unflatten(1, (-1, self.group)), self.offsets
        return _weights(grouped, self.scales[..., None], None if offsets is None else offsets[..., None]).flatten(1)

    @property
    def sample(self) -> Tensor:
        if self.original is not None:
            return self.original
        inputs = self.codes.shape[1]
        index = evenly_spaced(torch.arange(self.codes.numel()))
        row, group = index // inputs, index % inputs // self.group
        offsets = None if self.offsets is None else self.offsets[row, group]
        return _weights(self.codes.reshape(-1)[index], self.scales[row, group], offsets)


def _weights(codes: Tensor, scales: Tensor, offsets: Tensor | None) -> Tensor:
    """Rounded as ggml does it, to the last bit: a model's fingerprint is made of them."""
    return (codes.float() - MIDDLE) * scales if offsets is None else codes.float() * scales + offsets


def cpu_int4(linear: QuantisedLinear) -> Linear:
    (_, inputs), (rows, group) = linear.size, linear.block
    if rows == 1 and inputs % group == 0 and (blocks := Int4Blocks.of(linear)).suits:
        return Int4Linear(blocks, linear.bias)
    return Int8Linear(linear.dequantised(), linear.bias)


class Int4Linear(Linear):
    def __init__(self, blocks: Int4Blocks, bias: Tensor | None) -> None:
        try:
            self._product = torch.ops.aten._weight_int4pack_mm_for_cpu.default  # looked up once: that takes time too
            self._packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(blocks.codes.int(), 1)
        except (AttributeError, RuntimeError, NotImplementedError) as error:
            raise ModelError(
                f"this build of torch cannot do int4 on a CPU ({error}); load with dtype int8 or float32"
            ) from error
        # torch has (code - 8) * scale + offset
        both = torch.stack([blocks.scales, blocks.all_offsets + MIDDLE * blocks.scales], -1)  # [out, groups, 2]
        self._scales = both.transpose(0, 1).bfloat16().contiguous()
        self._group = blocks.group
        self.bias = bias
        self._sample = blocks.sample.clone()  # packed weights cannot be read as they were

    def __call__(self, x: Tensor) -> Tensor:
        """x [N, in] -> [N, out]"""
        out: Tensor = self._product(x.bfloat16(), self._packed, self._group, self._scales).float()
        return out if self.bias is None else out.add_(self.bias)

    @property
    def nbytes(self) -> int:
        bias = 0 if self.bias is None else self.bias.nbytes
        return int(self._packed.nbytes + self._scales.nbytes + self._sample.nbytes + bias)

    @property
    def sample(self) -> Tensor:
        return self._sample
