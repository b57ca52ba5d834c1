"""Matrices of a GGUF file that a CPU multiplies with as they are stored: four bits, a scale and an offset for each 32.

Other types are dequantised. These three are most of the files that people download (Q4_0, Q4_1; Q4_K_S and Q4_K_M are
mostly Q4_K). Layouts are those of ggml.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from math import prod

import numpy as np
import torch
from gguf import GGML_QUANT_SIZES
from gguf import GGMLQuantizationType as Kind
from numpy.typing import NDArray

from semspec.model.gguf_header import Header
from semspec.model.int4 import Int4Blocks

Bytes = NDArray[np.uint8]
Found = tuple[Bytes, NDArray[np.float32], NDArray[np.float32] | None]  # codes, a byte each; scales; offsets
GROUP = 32
EMBEDDING, HEAD = "token_embd.weight", "output.weight"


def read_blocks(raw: Bytes, kind: Kind) -> Int4Blocks:
    """raw: [outputs, bytes of a row]"""
    rows = len(raw)
    codes, scales, offsets = KEPT[kind](raw.reshape(-1, GGML_QUANT_SIZES[kind][1]))
    return Int4Blocks(
        torch.from_numpy(codes.reshape(rows, -1)),
        torch.from_numpy(scales.reshape(rows, -1)),
        None if offsets is None else torch.from_numpy(offsets.reshape(rows, -1)),
    )


def kinds(header: Header) -> Counter[Kind]:
    """How many weights of the layers' matrices are stored in each type."""
    found = Counter[Kind]()
    for name, entry in header.tensors.items():
        if len(entry.shape) > 1 and name not in (EMBEDDING, HEAD):
            found[entry.kind] += prod(entry.shape)
    return found


def main_kind(header: Header) -> str | None:
    found = kinds(header).most_common(1)
    return found[0][0].name if found else None


def keeps_blocks(header: Header) -> bool:
    """Whether most weights of the layers lie in such blocks."""
    found = kinds(header)
    return sum(count for kind, count in found.items() if kind in KEPT) > found.total() / 2


def kept_bytes(header: Header, tied: bool) -> int:
    """What all tensors take if blocks are kept and other matrices have a byte for each weight. The embedding is floats,
    and a head that is `tied` to it another matrix. What is joined is kept as a whole or not at all: in files with
    matrices of several types, such as Q4_K_M, some values are Q6_K, and queries and keys beside them are not kept."""
    total, wide = 0, {_joined(name) for name, entry in header.tensors.items() if entry.kind not in KEPT}
    for name, entry in header.tensors.items():
        count, outputs = prod(entry.shape), prod(entry.shape[:-1])
        if name == EMBEDDING or len(entry.shape) == 1:
            total += 4 * count + (count + 8 * outputs) * (name == EMBEDDING and tied)
        elif _joined(name) not in wide and name != HEAD:
            total += count // 2 + 4 * count // GROUP  # two bytes for each group's scale and offset
        else:
            total += count + 8 * outputs
    return total


def _joined(name: str) -> str:
    """A name that matrices share if one product has them all."""
    return re.sub(r"attn_[qkv]\.weight$|ffn_(?:gate|up)(?=(?:_exps)?\.weight$)", "joined", name)


def _halves(raw: Bytes) -> Bytes:
    """[..., n] -> [..., 2n]: the low four bits of all bytes, then the high ones."""
    return np.concatenate([raw & 15, raw >> 4], -1)


def _floats(raw: Bytes) -> NDArray[np.float32]:
    return raw.copy().view(np.float16).astype(np.float32)


def _q4_0(raw: Bytes) -> Found:
    """A scale, 32 codes of which 8 is zero."""
    return _halves(raw[:, 2:]), _floats(raw[:, :2]), None


def _q4_1(raw: Bytes) -> Found:
    """A scale, a minimum, 32 codes."""
    scales = _floats(raw[:, :4])
    return _halves(raw[:, 4:]), scales[:, :1], scales[:, 1:]


def _q4_k(raw: Bytes) -> Found:
    """A scale of scales, a scale of minima, eight of each in six bits, 256 codes: the low halves of 32 bytes are a
    group, the high ones the next."""
    factors, packed = _floats(raw[:, :4]), raw[:, 4:16]
    low, high, rest = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    scales = np.concatenate([low & 63, (rest & 15) | (low >> 6 << 4)], 1)
    minima = np.concatenate([high & 63, (rest >> 4) | (high >> 6 << 4)], 1)
    codes = _halves(raw[:, 16:].reshape(-1, 4, GROUP))
    return codes, factors[:, :1] * scales.astype(np.float32), -(factors[:, 1:] * minima.astype(np.float32))


KEPT: dict[Kind, Callable[[Bytes], Found]] = {Kind.Q4_0: _q4_0, Kind.Q4_1: _q4_1, Kind.Q4_K: _q4_k}
