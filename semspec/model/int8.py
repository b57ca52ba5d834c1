"""Products with weights of one byte each, for CPUs, where decoding is bound by reading weights.

Weights have a scale for each output. Inputs are whole numbers too, two for each: torch's product rounds inputs to eight
bits, which costs more than the weights' rounding does, so what is lost is multiplied as a second row, and rows cost
little. Products and sums of whole numbers are exact: what a row gives does not depend on the rows beside it.
docs/lab-notes.md has the figures of what torch offers.
"""

from __future__ import annotations

import warnings

import torch
from torch import Tensor

from semspec.errors import ModelError

LARGEST = 127
SAMPLE = 4096  # weights of a tensor by which a model is told


def evenly(weight: Tensor) -> Tensor:
    """Evenly spaced weights, as they were given."""
    flat = weight.detach().reshape(-1)
    return flat[:: max(1, flat.numel() // SAMPLE)][:SAMPLE]


class Int8Linear:
    """Stands in for experts.Linear."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        scale = (weight.abs().amax(1) / LARGEST).clamp(min=1e-12).double()
        zero = torch.zeros(len(weight), dtype=torch.long)
        try:
            with warnings.catch_warnings():  # torch means to replace its quantised tensors; nothing else is as fast yet
                warnings.simplefilter("ignore")
                whole = torch.quantize_per_channel(weight, scale, zero, 0, torch.qint8)
                self._packed = torch.ops.quantized.linear_prepack(whole, None)
        except (AttributeError, RuntimeError, NotImplementedError) as error:
            raise ModelError(
                f"this build of torch cannot do int8 on a CPU ({error}); load with dtype float32"
            ) from error
        self._bias = bias
        self.some = evenly(weight).clone()  # what is packed cannot be read as it was
        # Without these instructions, pairs of products are summed in 16 bits, which only 7-bit inputs fit into.
        self._narrow = not torch.cpu._is_vnni_supported()
        self._most = LARGEST if not self._narrow else LARGEST // 2  # an input's largest whole number
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
        return out if self._bias is None else out.add_(self._bias)
