"""What attention does otherwise where keys and values are in fp8.

They become float16, not bfloat16: that is one instruction for two numbers, where bfloat16 takes three, two of them on a
unit that has a sixteenth of the throughput. float16 reaches from 2^-24 to 2^16 only, so powers of two are taken out of
queries, and of weights times the scales of values, that leave the largest of them near its upper end.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def halved(tile):
    """Queries in float16, and by what they were divided. What is not a number, or infinite, stays so and changes no
    other row."""
    wide = tile.to(tl.float32)
    size = tl.abs(wide)
    largest = tl.max(tl.max(tl.where(size < float("inf"), size, 0.0), 1), 0)
    power = (largest.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
    unit = tl.maximum(power * 2.0**-14, 2.0**-114)  # so its inverse is a normal number, too
    over = (0x7F000000 - unit.to(tl.int32, bitcast=True)).to(tl.float32, bitcast=True)  # that inverse
    return (wide * over).to(tl.float16), unit


@triton.jit
def weighed_values(score, scales, best, total):
    """`attention_parts.weighed`, and the weights times the scales of values, none above 2^15. What scores are compared
    with is not the largest alone but what the largest scale adds to it, so neither sums nor totals are rescaled."""
    largest = tl.max(tl.broadcast_to(scales[None, :], score.shape), 1)  # in each row: no warp waits for another
    power = tl.maximum(largest, 2.0**-80).to(tl.int32, bitcast=True) >> 23  # its exponent, and a bias of 127
    better = tl.maximum(best, tl.max(score, 1) + (power - (127 + 14)).to(tl.float32))
    level = tl.where(better == float("-inf"), 0.0, better)  # a row that has seen nothing yet
    weight = tl.exp2(score - level[:, None])
    decay = tl.exp2(best - level)
    return better, total * decay + tl.sum(weight, 1), weight * scales[None, :], decay
