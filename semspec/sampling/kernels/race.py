"""`choose` of draw.py in Triton: the exponential race of each part of the vocabulary, then among the winners of parts.

As single operations it is some twenty, on whole numbers of 64 bits for every token of the vocabulary.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from semspec.sampling.kernels.filter import PART, WARPS
from semspec.sampling.noise import MULTIPLIERS, signed

GOLDEN, SECOND, THIRD = (tl.constexpr(signed(m)) for m in MULTIPLIERS)


def choose(log_weights: Tensor, key: Tensor, rows: Tensor | None = None) -> Tensor:
    """As draw.choose."""
    log_weights = log_weights if log_weights.stride(1) == 1 else log_weights.contiguous()
    size, parts = log_weights.shape[1], triton.cdiv(log_weights.shape[1], PART)
    key = key.contiguous()
    scores = torch.empty((len(key), parts), dtype=torch.float32, device=key.device)
    winners = torch.empty((len(key), parts), dtype=torch.int32, device=key.device)
    if len(key):
        _race[(parts, len(key))](
            log_weights, key if rows is None else rows.contiguous(), key, scores, winners, log_weights.stride(0), size,
            parts, PART=PART, PICKED=rows is not None, num_warps=WARPS,
        )  # fmt: skip
    return winner(scores, winners, least=-1)


def winner(scores: Tensor, winners: Tensor, least: int) -> Tensor:
    """The token with the best score of all parts [R, P] -> [R], the first of equals; `least` where a part has NaN."""
    rows, parts = scores.shape
    tokens = torch.empty(rows, dtype=torch.long, device=scores.device)
    if rows:
        _winner[(rows,)](scores, winners, tokens, parts, LEAST=least, PARTS=triton.next_power_of_2(parts), num_warps=4)
    return tokens


@triton.jit
def _race(
    weights, picked, keys, scores, winners, stride, size, parts, PART: tl.constexpr, PICKED: tl.constexpr
):  # fmt: skip
    part, row = tl.program_id(0), tl.program_id(1)
    i = part * PART + tl.arange(0, PART)
    source = row.to(tl.int64)
    if PICKED:
        source = tl.load(picked + row)
    own = tl.load(weights + source * stride + i, mask=i < size, other=float("-inf")).to(tl.float32)
    best, won = race(own, tl.load(keys + row), i, size)
    tl.store(scores + row * parts + part, best)
    tl.store(winners + row * parts + part, won)


@triton.jit
def race(weights, key, i, size):
    """The best score of a part and the token that has it: the largest log(weight) - log(noise), the first of equals.
    Where there is NaN: +inf and -1. Tokens of weight 0 cannot win, so that parts without others need no noise."""
    best, won = float("-inf"), tl.min(i, 0)
    if tl.max((weights != float("-inf")).to(tl.int32), 0) > 0:
        score = tl.where(i < size, weights - tl.log(_exponential(key, i)), float("-inf"))
        best = tl.max(score, 0)
        won = tl.min(tl.where(score == best, i, size), 0)
    broken = tl.max((weights != weights).to(tl.int32), 0) > 0
    return tl.where(broken, float("inf"), best), tl.where(broken, -1, won)


@triton.jit
def _winner(scores, winners, tokens, parts, LEAST: tl.constexpr, PARTS: tl.constexpr):
    row = tl.program_id(0)
    p = tl.arange(0, PARTS)
    score = tl.load(scores + row * parts + p, mask=p < parts, other=float("-inf"))
    won = tl.load(winners + row * parts + p, mask=p < parts, other=0)
    part = tl.minimum(tl.min(tl.where(score == tl.max(score, 0), p, PARTS), 0), parts - 1)
    token = tl.where(tl.min(won, 0) < 0, -1, tl.load(winners + row * parts + part))
    tl.store(tokens + row, tl.maximum(token, LEAST).to(tl.int64))


@triton.jit
def _mix(x):
    x = (x ^ ((x >> 30) & ((1 << 34) - 1))) * SECOND
    x = (x ^ ((x >> 27) & ((1 << 37) - 1))) * THIRD
    return x ^ ((x >> 31) & ((1 << 33) - 1))


@triton.jit
def key_of(seed, position, stream):
    """semspec.sampling.noise.key"""
    x = _mix(seed + GOLDEN)
    x = _mix(x + position * GOLDEN + GOLDEN)
    return _mix(x + stream * GOLDEN + GOLDEN)


@triton.jit
def _exponential(key, i):
    """semspec.sampling.noise.exponential of a key, for tokens i."""
    bits = (_mix(key + (i.to(tl.int64) + 1) * GOLDEN) >> 32) & ((1 << 32) - 1)
    v = (bits.to(tl.float32) + 0.5) * 2.3283064365386963e-10  # 2^-32
    # -log(1 - v): by its series where 1 - v would lose the digits of v. There is no log1p in the language itself.
    series = v * (1 + v * (1 / 2 + v * (1 / 3 + v * (1 / 4 + v * (1 / 5 + v * (1 / 6))))))
    return tl.where(v < 0.0625, series, -tl.log(1 - tl.minimum(v, 0.99999994)))
