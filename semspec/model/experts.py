"""Feed-forward layers: one network, or a mixture of experts of which a router picks a few for each token."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from semspec.model.linear import DenseLinear, Linear, stack_dense
from semspec.model.quantised import QuantisedLinear, stack

ACTIVATE: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu_pytorch_tanh": partial(F.gelu, approximate="tanh"),
}


@dataclass(slots=True)
class FeedForward:
    gate_up: Linear  # gate and up projections in one product
    down: Linear
    activate: Callable[[Tensor], Tensor]
    _down_t: Tensor | None = None  # [channels, width]: the down projection again, for kernels that read some channels

    def transposed_down(self) -> Tensor:
        """A second copy, made once for all sparse plans: in a large model it takes much memory."""
        if self._down_t is None:
            assert isinstance(self.down, DenseLinear)
            self._down_t = self.down.weight.t().contiguous()
        return self._down_t

    def __call__(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.down(self.activate(gate) * up)


Run = Callable[[FeedForward, Tensor, Tensor], Tensor]
"""An expert, some tokens [n, width] and their rows in the pass [n] -> its output for them."""


@dataclass(slots=True)
class Experts:
    """Each distinct expert of a pass is read once, for all the tokens that chose it."""

    router: DenseLinear  # [experts, width]
    experts: list[FeedForward]
    chosen: int  # experts for each token
    renormalise: bool  # the chosen experts' weights are made to sum to one
    # [experts, 2 ffn, width], all in one, as the GPU's kernels need them
    gate_up: Tensor | QuantisedLinear | None = None
    down: Tensor | QuantisedLinear | None = None  # [experts, width, ffn]

    def pack(self) -> None:
        """Put the experts' weights into one tensor, of which each expert then holds a view."""
        for name in ("gate_up", "down"):
            own = [getattr(expert, name) for expert in self.experts]
            if len({linear.layout if isinstance(linear, QuantisedLinear) else None for linear in own}) > 1:
                own = [DenseLinear(linear.dequantised(self.router.weight.dtype), linear.bias) for linear in own]
                for expert, linear in zip(self.experts, own, strict=True):
                    setattr(expert, name, linear)
            setattr(self, name, stack(own) if isinstance(own[0], QuantisedLinear) else stack_dense(own))

    def __call__(self, x: Tensor) -> Tensor:
        return self.combine(x, *self.route(x))

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """For each token the weights of its experts [N, chosen], best first, and their numbers."""
        return route(self.router(x).float(), self.chosen, self.renormalise)

    def combine(
        self, x: Tensor, weights: Tensor, index: Tensor, run: Run = lambda expert, x, rows: expert(x)
    ) -> Tensor:
        """The weighted sum of each token's experts; an index of -1 is none."""
        out = torch.zeros_like(x)
        for e in index.unique().tolist():
            if e < 0:
                continue
            token, choice = (index == e).nonzero(as_tuple=True)
            made = run(self.experts[e], x[token], token)
            out.index_add_(0, token, made * weights[token, choice, None].to(x.dtype))
        return out


def route(logits: Tensor, chosen: int, renormalise: bool) -> tuple[Tensor, Tensor]:
    weights, index = logits.softmax(-1).topk(chosen, dim=-1)
    if renormalise:
        weights = weights / weights.sum(-1, keepdim=True)
    return weights, index


def ratios(weights: Tensor) -> Tensor:
    """r_1 .. r_(k-1) [N, k - 1] of routing weights [N, k], best first: the m smallest, over the sum of the others."""
    small = weights.flip(-1).cumsum(-1)  # of the m smallest, for m = 1 .. k
    return small[:, :-1] / (small[:, -1:] - small[:, :-1])


def num_skipped(weights: Tensor, betas: Tensor, most: int) -> Tensor:
    """How many experts to skip, [N], for weights [N, k], betas [k - 1]: the largest m <= `most` with r_m < beta_m."""
    return num_skipped_by(ratios(weights), betas, most)


def num_skipped_by(found: Tensor, betas: Tensor, most: int) -> Tensor:
    """The same from the ratios [N, k - 1] themselves."""
    below = found[:, :most] < betas[:most]  # [N, most]
    return (below * torch.arange(1, most + 1, device=found.device)).amax(-1) if most else below.sum(-1)


def skip(
    weights: Tensor, index: Tensor, betas: Tensor, most: int, rows: Tensor, renormalise: bool
) -> tuple[Tensor, Tensor]:
    """A router's output with experts skipped (index -1) for the tokens marked in rows [N]; see semspec.sparse."""
    k = weights.shape[-1]
    skipped = torch.where(rows, num_skipped(weights, betas, most), 0)
    keep = torch.arange(k, device=weights.device) < k - skipped[:, None]
    remaining = torch.where(keep, weights, 0)
    if renormalise:
        remaining = torch.where(skipped[:, None] > 0, remaining / remaining.sum(-1, keepdim=True), remaining)
    return remaining, torch.where(keep, index, -1)
