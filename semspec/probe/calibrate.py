"""From what a probe predicts to calibrated probabilities: learnt on problems that the probe was not trained on.

`temperature` divides the logit by one number; `isotonic` is the non-decreasing function nearest to the labels, its
plateaus tilted a little, so that what the probe tells apart stays apart and a threshold can lie anywhere. Both are made
of a few numbers, and applying them needs no host synchronisation.
"""

from __future__ import annotations

import math
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor, nn

from semspec.errors import BadRequest

KINDS = ("none", "temperature", "isotonic")
TILT = 0.4  # below a half, or neighbouring pools would cross
MAX_TILT = 0.02  # the order within a pool may mean nothing


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
        raw = logits.sigmoid()
        return interpolate(raw, self.x, self.y) if self.kind == "isotonic" else raw

    @staticmethod
    def fit(kind: str, logits: Tensor, labels: Tensor) -> Calibrator:
        """The calibrator of this kind that fits the labels [N], which are shares in [0, 1]."""
        made = Calibrator(kind)
        if kind == "temperature":
            made.temperature = _temperature(logits, labels)
        elif kind == "isotonic":
            made.x, made.y = tilted(isotonic(logits.double().sigmoid(), labels.double()))
        return made.to(logits.device)


def _temperature(logits: Tensor, labels: Tensor) -> Tensor:
    """The temperature of least cross-entropy."""
    from scipy.optimize import minimize_scalar  # slow to import, and only fitting needs it

    logits, labels = logits.double(), labels.double()

    def loss(log_t: float) -> float:
        return float(nn.functional.binary_cross_entropy_with_logits(logits / math.exp(log_t), labels))

    return torch.tensor(minimize_scalar(loss, bounds=(-4.0, 4.0), method="bounded").x).float().exp()


class Pool(NamedTuple):
    """Neighbouring rows that a monotone fit cannot tell apart."""

    first: float  # x
    last: float
    x: float  # sums over its rows
    y: float
    rows: int

    @property
    def value(self) -> float:
        return self.y / self.rows


def isotonic(x: Tensor, y: Tensor) -> list[Pool]:
    """The non-decreasing least-squares fit, in plateaus.

    At either end one more row is taken to have gone the other way, so that nothing is ever quite sure: a pool of n
    rows at the upper end that all were 1 says n / (n + 1)."""
    from semspec import statistics  # as above

    points, group, weights = x.unique(return_inverse=True, return_counts=True)  # equal x share a value
    sums = y.new_zeros(len(points)).index_add_(0, group, y)
    sums[0] += 1
    weights[0] += 1
    weights[-1] += 1
    at, n, total = (t.double().cpu().numpy() for t in (points, weights, sums))
    _, bounds = statistics.isotonic(total / n, n)
    return [Pool(at[a], at[b - 1], at[a:b] @ n[a:b], total[a:b].sum(), int(n[a:b].sum())) for a, b in pairwise(bounds)]


def tilted(pools: list[Pool]) -> tuple[Tensor, Tensor]:
    """Knots of a strictly increasing function that has each pool's value on average over the pool's rows.

    Within a pool it is a line through their mean, as steep as it can be if it may leave the value by `MAX_TILT`, and go
    `TILT` of the way to those of the pools beside it (0 and 1 beside the outermost). Beyond these it goes on, half of
    the way to 0 and 1."""
    values = [0.0, *(pool.value for pool in pools), 1.0]
    found: list[tuple[float, float]] = []
    for below, pool, above in zip(values, pools, values[2:], strict=False):
        middle = pool.x / pool.rows
        if not pool.first < middle < pool.last:  # one point, or as good as one: nearly all rows at one of its ends
            found.append((middle, pool.value))
            continue
        fall, rise = (min(TILT * gap, MAX_TILT) for gap in (pool.value - below, above - pool.value))
        slope = min(fall / (middle - pool.first), rise / (pool.last - middle))
        found += [(at, pool.value + slope * (at - middle)) for at in (pool.first, pool.last)]
    (first, low), (last, high) = found[0], found[-1]
    found = [*([(0.0, low / 2)] if first > 0 else []), *found, *([(1.0, (1 + high) / 2)] if last < 1 else [])]
    table = torch.tensor(found if len(found) > 1 else found * 2, dtype=torch.float32)  # [knots, 2]
    return table[:, 0].contiguous(), table[:, 1].contiguous()


def interpolate(at: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """Linear between knots x (non-decreasing), constant outside them. [B] -> [B]"""
    right = torch.searchsorted(x, at.contiguous()).clamp(1, len(x) - 1)
    left = right - 1
    gap = (x[right] - x[left]).clamp_min(torch.finfo(x.dtype).tiny)
    share = ((at - x[left]) / gap).clamp(0, 1)
    return y[left] + share * (y[right] - y[left])
