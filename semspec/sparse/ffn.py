"""Feed-forward networks without channels of small activation (arXiv 2512.21911, section 3.2).

A channel i of a token is skipped where |act(gate)_i| is below the layer's threshold. `token` does so for each token by
itself, which shows what the rule costs in quality; `union` skips what no draft token of a sequence needs, and neither
multiplies nor reads those rows of the up and columns of the down projection.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from semspec.errors import BadRequest
from semspec.model.experts import FeedForward
from semspec.model.linear import DenseLinear
from semspec.model.quantised import QuantisedLinear

MATRICES = (DenseLinear, QuantisedLinear)  # whose weights can be read
BY = ("token", "union")


@dataclass(frozen=True)
class FfnPlan:
    thresholds: Tensor  # [depth]; 0 skips nothing
    by: str = "union"
    sparsity: float = 0.0  # share of a token's channels that the thresholds skip, by calibration
    absolute: float = 0.0  # the threshold of all layers, where it was given (the paper's way); 0: calibrated ones

    def __post_init__(self) -> None:
        if self.by not in BY:
            raise BadRequest(f"channels are left out by {self.by!r}; give {' or '.join(BY)}")
        if self.thresholds.dim() != 1 or bool((self.thresholds < 0).any()):
            raise BadRequest("thresholds of gate activations are one number of 0 or more for each layer")

    def below(self, absolute: float) -> FfnPlan:
        """The same with one threshold for all layers."""
        return FfnPlan(torch.full_like(self.thresholds, absolute), self.by, absolute=absolute)

    def __str__(self) -> str:
        what = f"below {self.absolute:g}" if self.absolute else f"{self.sparsity:.0%}"
        return f"ffn {what} by {self.by}"


def sparse_ffn(ffn: FeedForward, x: Tensor, threshold: float, sequences: Tensor | None) -> Tensor:
    """[N, width] -> the same. With `sequences` [N], the sequence number of each token, channels are skipped by union,
    else by token."""
    if sequences is None:
        gate, up = ffn.gate_up(x).chunk(2, dim=-1)
        active = ffn.activate(gate)
        return ffn.down(torch.where(active.abs() >= threshold, active, 0) * up)
    assert isinstance(ffn.gate_up, MATRICES) and isinstance(ffn.down, MATRICES)
    gate_half, up_half = ffn.gate_up.halves
    active = ffn.activate(gate_half(x))
    needed = union_by_sequence(active.abs() >= threshold, sequences)  # [N, channels]
    channels = needed.any(0).nonzero()[:, 0]
    # Channels that only other sequences need are multiplied by 0: the result does not depend on the batch.
    active = torch.where(needed, active, 0).index_select(1, channels)
    bias = None if up_half.bias is None else up_half.bias[channels]
    up = F.linear(x, up_half.dequantised(x.dtype).index_select(0, channels), bias)
    return F.linear(active * up, ffn.down.dequantised(x.dtype).index_select(1, channels), ffn.down.bias)


def union_by_sequence(needed: Tensor, sequences: Tensor) -> Tensor:
    """For each token [N, channels]: what any token of its sequence needs."""
    _, number = sequences.unique(return_inverse=True)
    counts = torch.zeros(int(number.max()) + 1, needed.shape[1], dtype=torch.int32, device=needed.device)
    return counts.index_add_(0, number, needed.int())[number] > 0
