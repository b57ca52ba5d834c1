"""Codes of four bits in the order in which a GPU's threads hold them as the left factor of `mma.m16n8k16`.

So a thread's 16 bytes are its own part of the product of 16 outputs and 64 inputs, and nothing has to be exchanged
(kernels/int4.py). 32 outputs by 64 inputs are 1 KB: two fragments, of each 32 threads, of each four words of eight
codes. Thread 4r + q has outputs 4r to 4r + 3 of the 32, two in each fragment, so that their scales lie beside each
other, and of every 32 inputs 8q to 8q + 7, so that those of x do. In a word, from the lowest bits on: two inputs beside
each other, of each the two pairs that an instruction takes, of each the two outputs.
"""

from __future__ import annotations

import torch
from torch import Tensor

OUTPUTS, INPUTS = 32, 64  # of a block of 1 KB
# Inputs are (chunk, half, thread's q, step, pair, one of two), outputs (block, thread's r, fragment, one of two).
_ROWS = (-1, 8, 2, 2)
_COLUMNS = (-1, 2, 4, 2, 2, 2)
_ORDER = (0, 4, 2, 1, 6, 5, 7, 9, 8, 3)  # block, chunk, fragment, r, q, half, step, one, pair, output


def to_fragments(codes: Tensor) -> Tensor:
    """Codes with two inputs in a byte, the even one low, [out, in / 2] -> in this order, in the same shape."""
    single = torch.stack([codes & 15, codes >> 4], -1).flatten(-2)
    ordered = single.unflatten(1, _COLUMNS).unflatten(0, _ROWS).permute(_ORDER)
    return (ordered[..., 0] | ordered[..., 1] << 4).reshape(codes.shape)


def from_fragments(codes: Tensor) -> Tensor:
    """The other way round, one code in a byte: [out, in / 2] -> [out, in]."""
    outputs, columns = codes.shape
    sizes = [outputs // OUTPUTS, *_ROWS[1:], 2 * columns // INPUTS, *_COLUMNS[1:]]
    ordered = torch.stack([codes & 15, codes >> 4], -1).view([sizes[i] for i in _ORDER])
    back = sorted(range(len(_ORDER)), key=_ORDER.__getitem__)
    return ordered.permute(back).reshape(outputs, 2 * columns)
