"""Feed-forward layers: one network, or a mixture of experts of which a router picks a few for each token."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from semspec.model import cpu_gemm as few
from semspec.model.int8 import Int8Linear, evenly

ACTIVATE: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu_pytorch_tanh": partial(F.gelu, approximate="tanh"),
}


@dataclass(slots=True)
class Linear:
    weight: Tensor  # [out, in]
    bias: Tensor | None = None
    turned: bool = False  # few rows go a way of their own, see few.py
    packed: Tensor | None = None  # the weight again, for more rows

    def __call__(self, x: Tensor) -> Tensor:
        if self.packed is not None and len(x) > (few.TWO if self.turned else 1):
            return few.packed_product(x, self.packed, self.bias)
        if self.turned and few.is_few(x):
            made = few.turned_product(x, self.weight)
            return made if self.bias is None else made.add_(self.bias)
        return F.linear(x, self.weight, self.bias)

    @property
    def some(self) -> Tensor:
        return evenly(self.weight)

    @property
    def halves(self) -> tuple[Linear, Linear]:
        """Of gate and up in one product: each by itself, in the same memory."""
        biases = (None, None) if self.bias is None else self.bias.chunk(2)
        gate, up = (
            Linear(weight, bias, self.turned) for weight, bias in zip(self.weight.chunk(2), biases, strict=True)
        )
        return gate, up


@dataclass(slots=True)
class FeedForward:
    gate_up: Linear | Int8Linear  # gate and up projections in one product
    down: Linear | Int8Linear
    activate: Callable[[Tensor], Tensor]
    turned: Tensor | None = None  # [channels, width]: the down projection again, for kernels that read some channels

    def turn(self) -> Tensor:
        """Once for all plans that need it: in a large model it takes much memory."""
        if self.turned is None:
            assert isinstance(self.down, Linear)
            self.turned = self.down.weight.t().contiguous()
        return self.turned

    def __call__(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.down(self.activate(gate) * up)


Run = Callable[[FeedForward, Tensor, Tensor], Tensor]
"""An expert, some tokens [n, width] and which of the pass they are [n] -> what it makes of them."""


@dataclass(slots=True)
class Experts:
    """Each distinct expert of a pass is read once, for all the tokens that chose it."""

    router: Linear  # [experts, width]
    experts: list[FeedForward]
    chosen: int  # experts for each token
    renormalise: bool  # the chosen experts' weights are made to sum to one
    gate_up: Tensor | None = None  # [experts, 2 ffn, width], all of them in one piece, as a GPU's kernels want them
    down: Tensor | None = None  # [experts, width, ffn]

    def pack(self) -> None:
        """Put the experts' weights into one piece. Each keeps its own, as a part of that."""
        for name in ("gate_up", "down"):
            own = [getattr(expert, name) for expert in self.experts]
            together = torch.stack([linear.weight for linear in own])
            for linear, part in zip(own, together, strict=True):
                linear.weight = part
            setattr(self, name, together)

    def __call__(self, x: Tensor) -> Tensor:
        return self.mix(x, *self.route(x))

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """For each token its experts [N, chosen], best first, and what they weigh."""
        return route(self.router(x).float(), self.chosen, self.renormalise)

    def mix(self, x: Tensor, weights: Tensor, index: Tensor, run: Run = lambda expert, x, rows: expert(x)) -> Tensor:
        """The weighted sum of each token's experts; an index of -1 is none."""
        out = torch.zeros_like(x)
        for e in index.unique().tolist():
            if e < 0:
                continue
            token, place = (index == e).nonzero(as_tuple=True)
            made = run(self.experts[e], x[token], token)
            out.index_add_(0, token, made * weights[token, place, None].to(x.dtype))
        return out


def route(logits: Tensor, chosen: int, renormalise: bool) -> tuple[Tensor, Tensor]:
    weights, index = logits.softmax(-1).topk(chosen, dim=-1)
    if renormalise:
        weights = weights / weights.sum(-1, keepdim=True)
    return weights, index


def ratios(weights: Tensor) -> Tensor:
    """r_1 .. r_(k-1) [N, k - 1] of routing weights [N, k], best first: what the m smallest weigh, by the others."""
    small = weights.flip(-1).cumsum(-1)  # of the m smallest, for m = 1 .. k
    return small[:, :-1] / (small[:, -1:] - small[:, :-1])


def left_out(weights: Tensor, betas: Tensor, most: int) -> Tensor:
    """How many experts go, [N], for weights [N, k] and betas [k - 1]: the largest m up to `most` with r_m < beta_m."""
    below = ratios(weights)[:, :most] < betas[:most]  # [N, most]
    return (below * torch.arange(1, most + 1, device=weights.device)).amax(-1) if most else below.sum(-1)


def skip(
    weights: Tensor, index: Tensor, betas: Tensor, most: int, rows: Tensor, renormalise: bool
) -> tuple[Tensor, Tensor]:
    """A router's answer with experts left out (index -1) in the tokens marked in rows [N]; see semspec.sparse."""
    k = weights.shape[-1]
    gone = torch.where(rows, left_out(weights, betas, most), 0)
    keep = torch.arange(k, device=weights.device) < k - gone[:, None]
    kept = torch.where(keep, weights, 0)
    if renormalise:
        kept = torch.where(gone[:, None] > 0, kept / kept.sum(-1, keepdim=True), kept)
    return kept, torch.where(keep, index, -1)
