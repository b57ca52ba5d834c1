"""Products with weights of one byte each, for CPUs, where decoding is bound by reading weights.

Weights have a scale for each output, inputs a scale for each row; products and sums are whole numbers, hence exact, so
that what a row gives does not depend on the rows beside it. docs/lab-notes.md has the figures of what torch offers.
"""

from __future__ import annotations

import warnings

import torch
from torch import Tensor

from semspec.errors import ModelError

LARGEST = 127


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
        # Without these instructions, pairs of products are summed in 16 bits, which only 7-bit inputs fit into.
        self._narrow = not torch.cpu._is_vnni_supported()
        self._guard = torch.zeros(1, weight.shape[1])
        self._guard[0, :2] = torch.tensor([-1.0, 1.0])

    def __call__(self, x: Tensor) -> Tensor:
        """x [N, in] -> [N, out]"""
        # torch scales inputs by their extremes over all rows. Rows brought to size one, beside a row that reaches
        # from -1 to 1, make that the same scale always.
        size = torch.linalg.vector_norm(x, float("inf"), dim=-1, keepdim=True).clamp_(min=1e-12)
        guarded = torch.cat([x / size, self._guard])
        product = torch.ops.quantized.linear_dynamic(guarded, self._packed, self._narrow)[:-1].mul_(size)
        return product if self._bias is None else product.add_(self._bias)
