"""Feed-forward layers: one network, or a mixture of experts of which a router picks a few for each token."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from semspec.model.int8 import Int8Linear, evenly

ACTIVATE: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu_pytorch_tanh": partial(F.gelu, approximate="tanh"),
}


@dataclass(slots=True)
class Linear:
    weight: Tensor  # [out, in]
    bias: Tensor | None = None

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)

    @property
    def some(self) -> Tensor:
        return evenly(self.weight)


@dataclass(slots=True)
class FeedForward:
    gate_up: Linear | Int8Linear  # gate and up projections in one product
    down: Linear | Int8Linear
    activate: Callable[[Tensor], Tensor]

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

    def __call__(self, x: Tensor) -> Tensor:
        return self.mix(x, *self.route(x))

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """For each token its experts [N, chosen], best first, and what they weigh."""
        weights, index = self.router(x).float().softmax(-1).topk(self.chosen, dim=-1)
        if self.renormalise:
            weights = weights / weights.sum(-1, keepdim=True)
        return weights, index

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
