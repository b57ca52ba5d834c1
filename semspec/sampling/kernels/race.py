"""Draws and their noise in Triton: the exponential race of each part of the vocabulary, then of the winners of parts.

As single operations it is some twenty, on whole numbers of 64 bits for every token of the vocabulary.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from semspec.sampling.kernels.filter import PART, WARPS, Filter, kept
from semspec.sampling.noise import BITS, MULTIPLIERS, signed

KEYS = 128  # that one program makes
REST, MASK, UNIT = tl.constexpr(64 - BITS), tl.constexpr((1 << BITS) - 1), tl.constexpr(2.0**-BITS)
GOLDEN, SECOND, THIRD = (tl.constexpr(signed(m)) for m in MULTIPLIERS)


def choose(log_weights: Tensor, key: Tensor) -> Tensor:
    """As draw.choose."""
    log_weights = log_weights if log_weights.stride(1) == 1 else log_weights.contiguous()
    race = Race(len(key), log_weights.shape[1], log_weights.device)
    if len(key):
        _race[race.grid](
            log_weights, log_weights.stride(0), key.contiguous(), *race.results, *race.sizes, PART=PART, num_warps=WARPS
        )
    return race.winners(if_nan=-1)


def draw(
    rows: Filter, key: Tensor, at: Tensor | None = None, history: Tensor | None = None, step: Tensor | None = None,
    if_nan: int = -1,
) -> Tensor:  # fmt: skip
    """A token of each row, or of the rows `at` [N], each with a key [N] of its own: [N]; `if_nan` where there is NaN.
    Row step [1] of history [steps, R, V] gets what was drawn from: the raw logits where the temperature is 0."""
    race = Race(len(key), rows.source.shape[1], key.device)
    if len(key):
        _draw[race.grid](
            *rows.rows, *rows.found, key if at is None else at, key, key if step is None else step,
            rows.source if history is None else history, *race.results, *race.sizes, PART=PART, PICKED=at is not None,
            KEEP=history is not None, num_warps=WARPS, **rows.kinds,
        )  # fmt: skip
    return race.winners(if_nan)


class Race:
    """The best token of each part of a vocabulary, and of all parts."""

    def __init__(self, rows: int, size: int, device: torch.device) -> None:
        self.grid = (triton.cdiv(size, PART), rows)
        self.sizes = (rows, size, self.grid[0])
        self.results = (
            torch.empty((rows, self.grid[0]), dtype=torch.float32, device=device),
            torch.empty((rows, self.grid[0]), dtype=torch.int32, device=device),
        )

    def winners(self, if_nan: int) -> Tensor:
        """[R] the first of equals; `if_nan` where a part has NaN"""
        parts, rows = self.grid
        tokens = torch.empty(rows, dtype=torch.long, device=self.results[0].device)
        if rows:
            padded = triton.next_power_of_2(parts)
            _winner[(rows,)](*self.results, tokens, parts, IF_NAN=if_nan, PARTS=padded, num_warps=4)
        return tokens


def keys(seed: Tensor, position: Tensor, stream: Tensor, uniform: bool = False) -> Tensor:
    """noise.key or noise.uniform, of tensors that broadcast to at most two dimensions."""
    given = torch.broadcast_tensors(seed, position, stream)
    seen = [torch.atleast_2d(one) for one in given]
    made = torch.empty(given[0].shape, dtype=torch.float32 if uniform else torch.long, device=seed.device)
    if made.numel():
        columns, size = seen[0].shape[1], made.numel()
        strides = [number for one in seen for number in one.stride()]
        _keys[(triton.cdiv(size, KEYS),)](
            *seen, *strides, made, columns, size, BLOCK=KEYS, UNIFORM=uniform, num_warps=1
        )
    return made


@triton.jit(do_not_specialize=["columns", "size"])
def _keys(
    seed, position, stream, s0, s1, p0, p1, t0, t1, made, columns, size, BLOCK: tl.constexpr, UNIFORM: tl.constexpr
):  # fmt: skip
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    row, column, there = i // columns, i % columns, i < size
    own = _mix(tl.load(seed + row * s0 + column * s1, mask=there, other=0) + GOLDEN)
    own = _mix(own + tl.load(position + row * p0 + column * p1, mask=there, other=0) * GOLDEN + GOLDEN)
    own = _mix(own + tl.load(stream + row * t0 + column * t1, mask=there, other=0) * GOLDEN + GOLDEN)
    if UNIFORM:
        tl.store(made + i, (((own >> REST) & MASK).to(tl.float32) + 0.5) * UNIT, mask=there)
    else:
        tl.store(made + i, own, mask=there)


@triton.jit(do_not_specialize=["rows"])
def _race(weights, stride, keys, scores, winners, rows, size, parts, PART: tl.constexpr):
    part, row = tl.program_id(0), tl.program_id(1)
    i = part * PART + tl.arange(0, PART)
    own = tl.load(weights + row.to(tl.int64) * stride + i, mask=i < size, other=float("-inf")).to(tl.float32)
    best, won = _best(own, tl.load(keys + row), i, size)
    tl.store(scores + row * parts + part, best)
    tl.store(winners + row * parts + part, won)


@triton.jit(do_not_specialize=["rows"])
def _draw(
    logits, stride, columns, by_row, by_column, found, numbers, earlier, picked, keys, step, history, scores, winners,
    rows, size, parts, PART: tl.constexpr, PICKED: tl.constexpr, KEEP: tl.constexpr, FILTERED: tl.constexpr,
    SHIFT: tl.constexpr,
):  # fmt: skip
    part, row = tl.program_id(0), tl.program_id(1)
    source = row.to(tl.int64)
    if PICKED:
        source = tl.load(picked + row)
    i = part * PART + tl.arange(0, PART)
    own = tl.load(logits + source * stride + i, mask=i < size, other=float("-inf")).to(tl.float32)
    processed = kept(
        own, i, part, source, columns, by_row, by_column, found, numbers, earlier, size, parts, FILTERED, SHIFT
    )  # fmt: skip
    if KEEP:
        place = (tl.load(step) * rows + row) * size
        greedy = tl.load(columns + source * by_row) == 0.0
        tl.store(history + place + i, tl.where(greedy, own, processed), mask=i < size)
    best, won = _best(processed, tl.load(keys + row), i, size)
    tl.store(scores + row * parts + part, best)
    tl.store(winners + row * parts + part, won)


@triton.jit
def _best(weights, key, i, size):
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
def _winner(scores, winners, tokens, parts, IF_NAN: tl.constexpr, PARTS: tl.constexpr):
    row = tl.program_id(0)
    p = tl.arange(0, PARTS)
    score = tl.load(scores + row * parts + p, mask=p < parts, other=float("-inf"))
    won = tl.load(winners + row * parts + p, mask=p < parts, other=0)
    part = tl.minimum(tl.min(tl.where(score == tl.max(score, 0), p, PARTS), 0), parts - 1)
    token = tl.where(tl.min(won, 0) < 0, -1, tl.load(winners + row * parts + part))
    tl.store(tokens + row, tl.maximum(token, IF_NAN).to(tl.int64))


@triton.jit
def _mix(x):
    x = (x ^ ((x >> 30) & ((1 << 34) - 1))) * SECOND
    x = (x ^ ((x >> 27) & ((1 << 37) - 1))) * THIRD
    return x ^ ((x >> 31) & ((1 << 33) - 1))


@triton.jit
def _exponential(key, i):
    """semspec.sampling.noise.exponential of a key, for tokens i."""
    bits = (_mix(key + (i.to(tl.int64) + 1) * GOLDEN) >> 32) & ((1 << 32) - 1)
    v = (bits.to(tl.float32) + 0.5) * 2.3283064365386963e-10  # 2^-32
    # -log(1 - v): by its series where 1 - v would lose the digits of v. There is no log1p in the language itself.
    series = v * (1 + v * (1 / 2 + v * (1 / 3 + v * (1 / 4 + v * (1 / 5 + v * (1 / 6))))))
    return tl.where(v < 0.0625, series, -tl.log(1 - tl.minimum(v, 0.99999994)))
