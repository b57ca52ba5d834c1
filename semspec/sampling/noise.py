"""Noise as a function of (seed, position, stream): no generator state, so nothing depends on batch or schedule.

A stream says what the noise is for. `exact` and plain decoding draw the target's token at a position from the TARGET
stream, which is why they write the same text at any temperature. Rules that look at several draft tokens before they
decide (block verification, windows) would be biased if a position that is drafted again met the same noise again, so
every other purpose has a stream of its own in every round.

A token is drawn by the exponential race (Gumbel-max): every token has noise of its own, and the largest
log(weight) - log(noise) wins. Rounding changes such a draw only where two tokens all but tie, and two models that draw
with the same noise mostly draw the same token.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from types import ModuleType
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

TARGET = 0  # the target's own choice at a position; the same in every round
DRAFT = 1  # the drafter's choice
ACCEPT = 2  # acceptance tests
RESIDUAL = 3  # what replaces a rejected token
SECOND = 4  # a further draw of the target's
_PURPOSES = 8
_ROUNDS = 1 << 22  # of a sequence, at most

MULTIPLIERS = (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
_ALL = (1 << 64) - 1
BELOW_ONE = 1 - 2.0**-24  # rounded up to 1, noise would be infinite, and a token with all the mass could lose
BITS = 23  # so that (x + 1/2) / 2^23 is exact in float32 and strictly inside (0, 1)


Round = TypeVar("Round", int, Tensor)


def stream(purpose: int, round: Round) -> Round:
    """The stream of a purpose in a round of propose-and-verify."""
    return purpose + _PURPOSES * round


def round_of(round: int, candidate: int) -> int:
    """The round of a further candidate for the same draft: noise of its own, which no later round meets again."""
    return round + candidate * _ROUNDS


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


def kernels_for(tensor: Tensor) -> ModuleType | None:
    """`semspec.sampling.kernels`, for tensors on a GPU, if there is Triton, which launches on the current one only."""
    return _kernels() if tensor.is_cuda and tensor.get_device() == torch.cuda.current_device() else None


@cache
def _kernels() -> ModuleType | None:
    try:
        return import_module("semspec.sampling.kernels")
    except ImportError:  # there is none for this platform
        return None


def key(seed: Tensor, position: Tensor, stream: Tensor) -> Tensor:
    """64 bits that differ for every (seed, position, stream). int64 tensors that broadcast against each other."""
    if kernels := kernels_for(position):
        return kernels.keys(seed, position, stream)
    golden = signed(MULTIPLIERS[0])
    x = _mix(seed + golden)
    x = _mix(x + position * golden + golden)
    return _mix(x + stream * golden + golden)


def key_of(seed: int, position: int, stream: int) -> int:
    """The same bits from numbers on the host, without twenty operations on tensors of one element."""
    golden, x = MULTIPLIERS[0], 0
    for part in (seed, position * golden, stream * golden):
        x = (x + part + golden) & _ALL
        x = ((x ^ (x >> 30)) * MULTIPLIERS[1]) & _ALL
        x = ((x ^ (x >> 27)) * MULTIPLIERS[2]) & _ALL
        x ^= x >> 31
    return x


def uniform(seed: Tensor, position: Tensor, stream: Tensor) -> Tensor:
    """Numbers in (0, 1), float32, for acceptance tests."""
    if kernels := kernels_for(position):
        return kernels.keys(seed, position, stream, uniform=True)
    return (_shift(key(seed, position, stream), 64 - BITS).to(torch.float32) + 0.5) / float(1 << BITS)


def exponential(key: Tensor, size: int) -> Tensor:
    """[..., size] a draw from the standard exponential distribution for every token of a vocabulary, float32.

    32 bits make v, uniform in (0, 1), whose smallest values are exact: -log(1 - v) then resolves the tokens of a long
    tail, whose probabilities are far below what a uniform number in float32 tells apart.
    """
    counters = torch.arange(1, size + 1, device=key.device) * signed(MULTIPLIERS[0])
    v = (_shift(_mix(key[..., None] + counters), 32).to(torch.float32) + 0.5) * 2.0**-32
    return -torch.log1p(-v.clamp_max(BELOW_ONE))


def exponential_of(
    key: int | np.ndarray[Any, np.dtype[np.uint64]], tokens: np.ndarray[Any, np.dtype[np.intp]]
) -> np.ndarray[Any, np.dtype[np.float32]]:
    """The same for some tokens, in NumPy. Keys broadcast against them."""
    bits = np.uint64(key & _ALL) if isinstance(key, int) else key
    with np.errstate(over="ignore", divide="ignore"):
        x = (tokens.astype(np.uint64) + np.uint64(1)) * np.uint64(MULTIPLIERS[0]) + bits
        x = (x ^ (x >> np.uint64(30))) * np.uint64(MULTIPLIERS[1])
        x = (x ^ (x >> np.uint64(27))) * np.uint64(MULTIPLIERS[2])
        x ^= x >> np.uint64(31)
        v = ((x >> np.uint64(32)).astype(np.float32) + np.float32(0.5)) * np.float32(2.0**-32)
        return -np.log1p(-np.minimum(v, np.float32(BELOW_ONE)))
