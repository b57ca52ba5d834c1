"""Scales and zeros of quantised weights in the order that kernels read them in."""

from __future__ import annotations

import torch
from torch import Tensor

from semspec.model.quantised import QuantisedLinear


def put_in_order(linear: QuantisedLinear) -> None:
    """Neighbouring outputs beside each other; a scale and a zero in one word, where both fit."""
    scales, zeros = linear.scales, linear.zeros
    if zeros is None or linear.kind != "int4" or scales.element_size() != 2 or not _small_whole(zeros):
        linear.scales, linear.zeros = _by_group(scales), None if zeros is None else _by_group(zeros)
        return
    words = torch.stack([zeros.t().bfloat16().view(torch.int16), scales.t().view(torch.int16)], -1)  # low half first
    linear.words = words.view(torch.int32)[..., 0]
    linear.zeros, linear.scales = words[..., 0].view(torch.bfloat16).t(), words[..., 1].view(scales.dtype).t()


def _by_group(scales: Tensor) -> Tensor:
    """The same in another order of memory."""
    return scales.t().contiguous().t()


def _small_whole(zeros: Tensor) -> bool:
    """Whether a bfloat16 of 128 and a zero is exact."""
    return bool(((zeros >= 0) & (zeros < 128) & (zeros.float() == zeros.float().round())).all())
