"""Noise as a function of (seed, position, stream): no generator state, so nothing depends on batch or schedule.

A stream says what the number is for. `exact` and plain decoding draw the target's token at a position from the
TARGET stream, which is why they write the same text at any temperature. Rules that look at several draft tokens
before they decide (block verification, windows) would be biased if a position that is drafted again met the same
number again, so every other purpose has a stream of its own in every round.
"""

from __future__ import annotations

from typing import TypeVar

import torch
from torch import Tensor

TARGET = 0  # the target's own choice at a position; the same in every round
DRAFT = 1  # the drafter's choice
ACCEPT = 2  # acceptance tests
RESIDUAL = 3  # what replaces a rejected token
SECOND = 4  # a further draw of the target's
_PURPOSES = 8

MULTIPLIERS = (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
_ALL = (1 << 64) - 1
BITS = 23  # so that (x + 1/2) / 2^23 is exact in float32 and strictly inside (0, 1)


Round = TypeVar("Round", int, Tensor)


def stream(purpose: int, round: Round) -> Round:
    """The stream of a purpose in a round of propose-and-judge."""
    return purpose + _PURPOSES * round


def signed(x: int) -> int:
    """The same 64 bits as a number that may be negative."""
    return x - (1 << 64) if x >= 1 << 63 else x


def _shift(x: Tensor, bits: int) -> Tensor:
    """Logical shift to the right (torch's own keeps the sign)."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _mix(x: Tensor) -> Tensor:
    """A bijection of 64-bit integers that spreads every input bit (the finaliser of splitmix64)."""
    x = (x ^ _shift(x, 30)) * signed(MULTIPLIERS[1])
    x = (x ^ _shift(x, 27)) * signed(MULTIPLIERS[2])
    return x ^ _shift(x, 31)


def uniform_of(seed: int, position: int, stream: int) -> float:
    """The same number from numbers that the host knows, without the twenty operations on tensors of one element."""
    golden, x = MULTIPLIERS[0], 0
    for part in (seed, position * golden, stream * golden):
        x = (x + part + golden) & _ALL
        x = ((x ^ (x >> 30)) * MULTIPLIERS[1]) & _ALL
        x = ((x ^ (x >> 27)) * MULTIPLIERS[2]) & _ALL
        x ^= x >> 31
    return ((x >> (64 - BITS)) + 0.5) / (1 << BITS)


def uniform(seed: Tensor, position: Tensor, stream: Tensor) -> Tensor:
    """Numbers in (0, 1), float32. int64 tensors that broadcast against each other."""
    golden = signed(MULTIPLIERS[0])
    x = _mix(seed + golden)
    x = _mix(x + position * golden + golden)
    x = _mix(x + stream * golden + golden)
    return (_shift(x, 64 - BITS).to(torch.float32) + 0.5) / float(1 << BITS)
