"""What the last few measurements say: medians, so that a slow moment of the machine does not count."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TypeVar

T = TypeVar("T", float, tuple[float, ...])
SHORT = 1024  # tokens of text up to which texts are not told apart, and from there by doublings
MAX_SLOWDOWN = 3.0  # measured seconds are clipped to this many times the expected ones


def clipped(seconds: float, expected: float) -> float:
    """A measurement as far as it counts; `expected` is 0 where nothing is expected yet."""
    return min(seconds, MAX_SLOWDOWN * expected) if expected > 0 else seconds


def median(recent: Iterable[T]) -> T:
    """The lower one of two, so that it was measured."""
    ordered = sorted(recent)
    return ordered[(len(ordered) - 1) // 2]


def text_class(tokens: float) -> int:
    """Texts of about the same length."""
    return math.ceil(math.log2(max(tokens / SHORT, 1.0)))
