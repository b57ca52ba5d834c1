"""Products with weights of four bits, for CPUs: torch's own, which reads half the bytes of int8 and rounds inputs to
bfloat16. A row's result does not depend on the other rows of the batch.

Where torch's product does not take a matrix (outputs that are no multiple of 16, small groups, a last group that is
smaller than the others), it is stored as int8.
"""

from __future__ import annotations

import torch
from torch import Tensor

from semspec.errors import ModelError
from semspec.model.int8 import Int8Linear
from semspec.model.linear import Linear
from semspec.model.quantised import MIDDLE, QuantisedLinear

GROUPS = (32, 64, 128, 256)  # inputs that may share a scale
OUTPUTS = 16  # a matrix has a multiple of these


def cpu_int4(linear: QuantisedLinear) -> Linear:
    (outputs, inputs), (rows, group) = linear.size, linear.block
    suits = rows == 1 and group in GROUPS and inputs % group == 0 and outputs % OUTPUTS == 0
    return Int4Linear(linear) if suits else Int8Linear(linear.dequantised(), linear.bias)


class Int4Linear(Linear):
    def __init__(self, linear: QuantisedLinear) -> None:
        codes = torch.stack([linear.codes & 15, linear.codes >> 4], -1).flatten(-2).int()
        try:
            self._product = torch.ops.aten._weight_int4pack_mm_for_cpu.default  # looked up once: that takes time too
            self._packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes, 1)
        except (AttributeError, RuntimeError, NotImplementedError) as error:
            raise ModelError(
                f"this build of torch cannot do int4 on a CPU ({error}); load with dtype int8 or float32"
            ) from error
        scales = linear.scales.float()
        zeros = MIDDLE if linear.zeros is None else linear.zeros.float()
        # torch has (code - 8) * scale + offset
        both = torch.stack([scales, (MIDDLE - zeros) * scales], -1)  # [out, groups, 2]
        self._scales = both.transpose(0, 1).bfloat16().contiguous()
        self._group = linear.block[1]
        self.bias = linear.bias
        self._sample = linear.sample.clone()  # packed weights cannot be read as they were

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
