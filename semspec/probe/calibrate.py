"""From what a probe says to what it should say: learnt on problems that the probe was not trained on.

`temperature` divides the logit by one number; `isotonic` is the non-decreasing function nearest to the labels, linear
between its knots. Both are made of a few numbers, and applying them needs no host synchronisation.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from semspec.errors import BadRequest

KINDS = ("none", "temperature", "isotonic")


class Calibrator(nn.Module):
    """Applied to logits [B]; gives probabilities [B]."""

    def __init__(self, kind: str = "none", knots: int = 0) -> None:
        super().__init__()
        if kind not in KINDS:
            raise BadRequest(f"there is no calibration {kind!r}; give one of: {', '.join(KINDS)}")
        self.kind = kind
        self.temperature: Tensor
        self.x: Tensor
        self.y: Tensor
        if kind == "temperature":
            self.register_buffer("temperature", torch.ones(()))
        if kind == "isotonic":
            self.register_buffer("x", torch.linspace(0, 1, max(knots, 2)))
            self.register_buffer("y", torch.linspace(0, 1, max(knots, 2)))

    @property
    def knots(self) -> int:
        return len(self.x) if self.kind == "isotonic" else 0

    def forward(self, logits: Tensor) -> Tensor:
        if self.kind == "temperature":
            return (logits / self.temperature).sigmoid()
        said = logits.sigmoid()
        return interpolate(said, self.x, self.y) if self.kind == "isotonic" else said

    @staticmethod
    def fit(kind: str, logits: Tensor, labels: Tensor) -> Calibrator:
        """The calibrator of this kind that suits the labels [N], which are shares in [0, 1]."""
        made = Calibrator(kind)
        if kind == "temperature":
            made.temperature = _temperature(logits, labels)
        elif kind == "isotonic":
            made.x, made.y = isotonic(logits.double().sigmoid(), labels.double())
        return made.to(logits.device)


def _temperature(logits: Tensor, labels: Tensor) -> Tensor:
    """The temperature of least cross-entropy, by golden-section search over its logarithm (it has one minimum)."""
    logits, labels = logits.double(), labels.double()

    def loss(log_t: float) -> float:
        return float(nn.functional.binary_cross_entropy_with_logits(logits / torch.tensor(log_t).exp(), labels))

    low, high, ratio = -4.0, 4.0, (5**0.5 - 1) / 2
    while high - low > 1e-4:
        a, b = high - ratio * (high - low), low + ratio * (high - low)
        low, high = (low, b) if loss(a) < loss(b) else (a, high)
    return torch.tensor((low + high) / 2).exp()


def isotonic(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Knots of the non-decreasing least-squares fit, by pooling neighbours that are in the wrong order.

    A pool of equal values becomes two knots, its first and last x, so that between pools the fit is linear."""
    places, group, weights = x.unique(return_inverse=True, return_counts=True)  # equal x share a value
    sums = y.new_zeros(len(places)).index_add_(0, group, y)
    pools: list[tuple[float, float, float, int]] = []  # first x, last x, sum of y, weight
    for at, total, weight in zip(places.tolist(), sums.tolist(), weights.tolist(), strict=True):
        pools.append((at, at, total, weight))
        while len(pools) > 1 and pools[-2][2] / pools[-2][3] >= pools[-1][2] / pools[-1][3]:
            (first, _, s, w), (_, last, t, v) = pools[-2:]
            pools[-2:] = [(first, last, s + t, w + v)]
    knots = [(at, s / w) for first, last, s, w in pools for at in sorted({first, last})]
    table = torch.tensor(knots if len(knots) > 1 else knots * 2, dtype=torch.float32)  # [knots, 2]
    return table[:, 0].contiguous(), table[:, 1].contiguous()


def interpolate(at: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """Linear between knots x (non-decreasing), constant outside them. [B] -> [B]"""
    right = torch.searchsorted(x, at.contiguous()).clamp(1, len(x) - 1)
    left = right - 1
    gap = (x[right] - x[left]).clamp_min(torch.finfo(x.dtype).tiny)
    share = ((at - x[left]) / gap).clamp(0, 1)
    return y[left] + share * (y[right] - y[left])
