"""Products with weights of one byte each, for CPUs, where decoding is bound by reading weights.

Weights have a scale for each output. torch's product rounds inputs to eight bits, which loses more than rounding the
weights does; so the remainder of each input is multiplied as a second row, and rows cost little. Integer products and
sums are exact: a row's result does not depend on the other rows of the batch.
docs/lab-notes.md has the figures of what torch offers.
"""

from __future__ import annotations

import warnings

import torch
from torch import Tensor

from semspec.errors import ModelError
from semspec.model.linear import Linear, evenly_spaced

LARGEST = 127


class Int8Linear(Linear):
    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        least, most = torch.aminmax(weight, dim=1)  # without a copy: a head may be the largest matrix there is
        scale = (torch.maximum(most, -least) / LARGEST).clamp(min=1e-12).double()
        zero = torch.zeros(len(weight), dtype=torch.long)
        try:
            with warnings.catch_warnings():  # torch deprecates its quantised tensors; nothing else is as fast yet
                warnings.simplefilter("ignore")
                whole = torch.quantize_per_channel(weight, scale, zero, 0, torch.qint8)
                self._packed = torch.ops.quantized.linear_prepack(whole, None)
        except (AttributeError, RuntimeError, NotImplementedError) as error:
            raise ModelError(
                f"this build of torch cannot do int8 on a CPU ({error}); load with dtype float32"
            ) from error
        self.bias = bias
        self._sample = evenly_spaced(weight).clone()  # packed weights cannot be read as they were
        self._nbytes = weight.numel() + 8 * len(weight)  # a byte each, and a scale for each output
        # Without these instructions, pairs of products are summed in 16 bits, which only 7-bit inputs fit into.
        self._narrow = not torch.cpu._is_vnni_supported()
        self._most = LARGEST if not self._narrow else LARGEST // 2  # an input's largest integer
        # torch scales inputs by their extremes over all rows. A row that reaches from one end of the range to the other
        # makes that scale one, always.
        self._guard = torch.zeros(1, weight.shape[1])
        self._guard[0, :2] = torch.tensor([-self._most - 0.5, self._most + 0.5])

    def __call__(self, x: Tensor) -> Tensor:
        """x [N, in] -> [N, out]"""
        rows = len(x)
        scale = self._most / torch.linalg.vector_norm(x, float("inf"), dim=-1, keepdim=True).clamp_(min=1e-12)
        scaled = x * scale
        whole = scaled.round()
        rest = scaled.sub_(whole).mul_(2 * self._most)
        inputs = torch.cat([whole, rest, self._guard])
        product = torch.ops.quantized.linear_dynamic(inputs, self._packed, self._narrow)
        out = torch.add(product[:rows], product[rows:-1], alpha=0.5 / self._most).div_(scale)
        return out if self.bias is None else out.add_(self.bias)

    def picked(self, index: Tensor) -> Int8Linear:
        """Some of its outputs."""
        whole, _ = torch.ops.quantized.linear_unpack(self._packed)
        return Int8Linear(whole.dequantize()[index], None if self.bias is None else self.bias[index])

    @property
    def nbytes(self) -> int:
        return self._nbytes + self._sample.nbytes + (0 if self.bias is None else self.bias.nbytes)

    @property
    def sample(self) -> Tensor:
        return self._sample
