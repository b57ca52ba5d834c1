"""A draw by its definition, on Python's whole numbers: every token has exponential noise, the smallest ratio wins."""

from __future__ import annotations

import math
from collections.abc import Sequence

WORD, GOLDEN = 1 << 64, 0x9E3779B97F4A7C15


def mix(x: int) -> int:
    """The finaliser of splitmix64."""
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 % WORD
    x = (x ^ x >> 27) * 0x94D049BB133111EB % WORD
    return x ^ x >> 31


def key(seed: int, position: int, stream: int) -> int:
    x = mix((seed + GOLDEN) % WORD)
    x = mix((x + position * GOLDEN + GOLDEN) % WORD)
    return mix((x + stream * GOLDEN + GOLDEN) % WORD)


def noise(key: int, token: int) -> float:
    return -math.log1p(-((mix((key + (token + 1) * GOLDEN) % WORD) >> 32) + 0.5) / 2**32)


def race(weights: Sequence[float], key: int) -> int:
    """Which index is drawn in proportion to these weights."""
    ratios = {i: noise(key, i) / weight for i, weight in enumerate(weights) if weight > 0}
    return min(ratios, key=lambda i: ratios[i])
