"""Mixtures without the experts of small weight (arXiv 2512.21911, section 3.3; Lu et al. 2024 for two experts).

With a token's routing weights w_1 >= .. >= w_k, let r_m = (sum of the m smallest) / (sum of the others). The m smallest
are skipped for the largest m, up to a cap, with r_m < beta_m, where beta_m is a quantile of r_m over a layer's
calibration tokens (the median, in the paper). The rule itself is `skip` in model/experts.py, since GPU kernels need it.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from semspec.errors import BadRequest


@dataclass(frozen=True)
class ExpertsPlan:
    betas: Tensor  # [depth, k - 1]; 0 skips nothing
    most: int = 2  # experts of a token that may be skipped

    def __post_init__(self) -> None:
        if self.betas.dim() != 2 or bool((self.betas < 0).any()):
            raise BadRequest("betas are one number of 0 or more for each layer and number of experts left out")
        if not 0 <= self.most <= self.betas.shape[1]:
            raise BadRequest(
                f"at most {self.most} experts to be left out, of {self.betas.shape[1] + 1}; one must remain"
            )
