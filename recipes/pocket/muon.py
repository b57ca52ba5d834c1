"""Muon: momentum whose matrices are made orthogonal before they move the weights (Jordan et al., 2024).

Steps in all directions of a matrix are equally large, so rare directions are learnt as fast as common ones. Matrices
of one shape are updated together, stacked: a small model is bound by launches, not by arithmetic. Update sizes are
scaled to what AdamW's would be, so both take the same learning rate and decay.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

_STEPS = 5
_A, _B, _C = 3.4445, -4.7750, 2.0315  # a quintic that drives singular values towards 1, fastest from below
_ADAM_LIKE = 0.2  # root mean square of an AdamW update, relative to its rate


def orthogonal(matrices: Tensor) -> Tensor:
    """The nearest matrices whose singular values are all about 1. [N, A, B]"""
    tall = matrices.shape[-2] > matrices.shape[-1]
    x = (matrices.mT if tall else matrices).to(torch.bfloat16 if matrices.is_cuda else torch.float32)
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(_STEPS):
        square = x @ x.mT
        x = _A * x + (_B * square + _C * square @ square) @ x
    return (x.mT if tall else x).to(matrices.dtype)


class Muon(torch.optim.Optimizer):
    """For weight matrices only; every parameter group holds matrices of one shape."""

    def __init__(
        self, matrices: Iterable[nn.Parameter], lr: float | Tensor, momentum: float = 0.95, decay: float = 0.1
    ) -> None:
        by_shape: dict[torch.Size, list[nn.Parameter]] = defaultdict(list)
        for matrix in matrices:
            by_shape[matrix.shape].append(matrix)
        groups = [{"params": same} for same in by_shape.values()]
        super().__init__(groups, {"lr": lr, "momentum": momentum, "decay": decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            matrices = group["params"]
            gradients = torch.stack([matrix.grad for matrix in matrices])
            state = self.state[matrices[0]]  # one memory for the whole stack
            memory = state.setdefault("memory", torch.zeros_like(gradients))
            memory.lerp_(gradients, 1 - group["momentum"])
            update = orthogonal(gradients.lerp(memory, group["momentum"]))
            rate = group["lr"]  # a number, or a tensor where steps are recorded
            update = update * (rate * (_ADAM_LIKE * max(update.shape[-2:]) ** 0.5))
            torch._foreach_mul_(matrices, 1 - rate * group["decay"])
            torch._foreach_sub_(matrices, list(update.unbind(0)))
