"""Mixtures without the experts that hardly count (arXiv 2512.21911, section 3.3; Lu et al. 2024 for two experts).

With a token's routing weights w_1 >= .. >= w_k, the share of the m smallest is r_m = (their sum) / (sum of the others).
The largest m up to a cap with r_m < beta_m is left out, where beta_m is what r_m stays below in a given share of a
layer's calibration tokens (the median, in the paper).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from semspec.errors import BadRequest


@dataclass(frozen=True)
class ExpertsPlan:
    betas: Tensor  # [depth, k - 1]; 0 leaves nothing out
    most: int = 2  # experts of a token that may be left out

    def __post_init__(self) -> None:
        if self.betas.dim() != 2 or bool((self.betas < 0).any()):
            raise BadRequest("betas are one number of 0 or more for each layer and number of experts left out")
        if not 0 <= self.most <= self.betas.shape[1]:
            raise BadRequest(
                f"at most {self.most} experts to be left out, of {self.betas.shape[1] + 1}; one must remain"
            )


def ratios(weights: Tensor) -> Tensor:
    """r_1 .. r_(k-1) [N, k - 1] of routing weights [N, k], best first."""
    small = weights.flip(-1).cumsum(-1)  # of the m smallest, for m = 1 .. k
    return small[:, :-1] / (small[:, -1:] - small[:, :-1])


def left_out(weights: Tensor, betas: Tensor, most: int) -> Tensor:
    """How many experts go, [N], for weights [N, k] and betas [k - 1]."""
    below = ratios(weights)[:, :most] < betas[:most]  # [N, most]
    return (below * torch.arange(1, most + 1, device=weights.device)).amax(-1) if most else below.sum(-1)


def skip(
    weights: Tensor, index: Tensor, betas: Tensor, most: int, rows: Tensor, renormalise: bool
) -> tuple[Tensor, Tensor]:
    """A router's answer with experts left out (index -1) in the tokens marked in rows [N]."""
    k = weights.shape[-1]
    gone = torch.where(rows, left_out(weights, betas, most), 0)
    keep = torch.arange(k, device=weights.device) < k - gone[:, None]
    kept = torch.where(keep, weights, 0)
    if renormalise:
        kept = torch.where(gone[:, None] > 0, kept / kept.sum(-1, keepdim=True), kept)
    return kept, torch.where(keep, index, -1)
