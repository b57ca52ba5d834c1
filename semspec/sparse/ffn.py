"""Feed-forward networks without the channels that hardly matter (arXiv 2512.21911, section 3.2).

A channel i of a token is left out where |act(gate)_i| is below the layer's threshold. `token` does so for each token by
itself, which says what the rule costs in quality; `union` leaves out what none of a sequence's checked tokens needs,
and neither multiplies nor reads those rows of the up and columns of the down projection.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from semspec.errors import BadRequest
from semspec.model.experts import FeedForward
from semspec.model.linear import DenseLinear

BY = ("token", "union")


@dataclass(frozen=True)
class FfnPlan:
    thresholds: Tensor  # [depth]; 0 leaves nothing out
    by: str = "union"
    sparsity: float = 0.0  # share of channels of a token that the thresholds were calibrated to leave out

    def __post_init__(self) -> None:
        if self.by not in BY:
            raise BadRequest(f"channels are left out by {self.by!r}; give {' or '.join(BY)}")
        if self.thresholds.dim() != 1 or bool((self.thresholds < 0).any()):
            raise BadRequest("thresholds of gate activations are one number of 0 or more for each layer")


def thin(ffn: FeedForward, x: Tensor, threshold: float, sequences: Tensor | None) -> Tensor:
    """[N, width] -> the same. `sequences` [N] numbers the sequence that each token is of: then channels are left out
    by their union, and else by token."""
    if sequences is None:
        gate, up = ffn.gate_up(x).chunk(2, dim=-1)
        active = ffn.activate(gate)
        return ffn.down(torch.where(active.abs() >= threshold, active, 0) * up)
    assert isinstance(ffn.gate_up, DenseLinear) and isinstance(ffn.down, DenseLinear)
    gates, ups = ffn.gate_up.halves
    active = ffn.activate(gates(x))
    needed = unions(active.abs() >= threshold, sequences)  # [N, channels]
    some = needed.any(0).nonzero()[:, 0]
    # Somebody else's channels are computed with, but count for nothing: a text does not depend on its neighbours.
    active = torch.where(needed, active, 0).index_select(1, some)
    made = F.linear(x, ups.weight.index_select(0, some), None if ups.bias is None else ups.bias[some])
    return F.linear(active * made, ffn.down.weight.index_select(1, some), ffn.down.bias)


def unions(needed: Tensor, sequences: Tensor) -> Tensor:
    """For each token [N, channels]: what any token of its sequence needs."""
    _, number = sequences.unique(return_inverse=True)
    seen = torch.zeros(int(number.max()) + 1, needed.shape[1], dtype=torch.int32, device=needed.device)
    return seen.index_add_(0, number, needed.int())[number] > 0
