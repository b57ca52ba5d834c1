"""Keys and values in fp8 (e4m3): a byte for each number, and a scale for each head of each token.

So half the bytes of bfloat16 are read, and nothing has to be known of a model beforehand: the largest number of a head
becomes the largest code, however large it is.
"""

from __future__ import annotations

import torch
from torch import Tensor

LARGEST = 448.0
FP8 = torch.float8_e4m3fn
SCALE_BYTES = 4


def encode(x: Tensor) -> tuple[Tensor, Tensor]:
    """[..., d] -> codes, and scales [...]"""
    wide = x.float()
    scales = wide.abs().amax(-1) / LARGEST
    return (wide / torch.where(scales > 0, scales, 1.0)[..., None]).to(FP8), scales


def decode(codes: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    return (codes.float() * scales[..., None]).to(dtype)
