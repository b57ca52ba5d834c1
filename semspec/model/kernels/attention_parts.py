"""What the attention kernel is made of besides its loop: the online softmax, and the rotation of single tokens."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def weighed(score, best, total):
    """Online softmax over some more scores [rows, keys]: the new maximum and sum, the weights of these scores, and the
    factor by which earlier sums are rescaled."""
    better = tl.maximum(best, tl.max(score, 1))
    level = tl.where(better == float("-inf"), 0.0, better)  # a row that has seen nothing yet
    weight = tl.exp2(score - level[:, None])
    decay = tl.exp2(best - level)
    return better, total * decay + tl.sum(weight, 1), weight, decay


@triton.jit
def rotated(
    heads, d, loaded, cos, sin, norm, eps, position,
    NORMED: tl.constexpr, HALF: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """Heads [rows, d] at a position, normed and rotated: dimension i pairs with dimension i + HALF."""
    rotating = d < 2 * HALF
    other = tl.where(rotating, tl.where(d < HALF, d + HALF, d - HALF), d)
    one = tl.load(heads + d, mask=loaded, other=0.0).to(tl.float32)
    two = tl.load(heads + other, mask=loaded, other=0.0).to(tl.float32)
    if NORMED:
        size = tl.rsqrt(tl.sum(one * one, 1) / D + eps)[:, None]
        one = one * size * tl.load(norm + d, mask=d < D, other=0.0).to(tl.float32)
        two = two * size * tl.load(norm + other, mask=d < D, other=0.0).to(tl.float32)
    if HALF > 0:
        at = position * HALF + tl.where(d < HALF, d, d - HALF)
        c = tl.load(cos + at, mask=rotating, other=1.0)
        s = tl.load(sin + at, mask=rotating, other=0.0)
        one = one * c + tl.where(d < HALF, -two, two) * s
    return one
