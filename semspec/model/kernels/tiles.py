"""How work is tiled for the GPU at hand."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from semspec.model.kernels import LONG, WIDE, KvScales

OWN = 1024  # bytes of shared memory that each program takes besides what it asks for


@dataclass(frozen=True, slots=True)
class Card:
    """What a GPU has: multiprocessors to keep busy, and bytes of memory that a program can share among its threads."""

    processors: int
    shared: int
    capability: int = 0  # of CUDA, times ten; 0: not a GPU of NVIDIA


def fit_shared(stages: int, depth: int, row_bytes: int, limit: int) -> tuple[int, int]:
    """Fewer stages, then shorter tiles, until `stages` buffers of `depth` rows fit into shared memory."""
    while stages * depth * row_bytes > limit and (stages, depth) != (1, 16):
        stages, depth = (stages - 1, depth) if stages > 2 or depth == 16 else (stages, depth // 2)
    return stages, depth


@dataclass(frozen=True, slots=True)
class Tiles:
    """Of attention. The figures in `Tiles.of` are in docs/lab-notes.md; `bench/gpu.py --only tune` finds them."""

    rows: int  # queries x heads of one key head, in one program
    keys: int  # at a time
    splits: int  # of the cache; a power of two
    warps: int
    stages: int

    @staticmethod
    def of(
        queries: int, group: int, kv_heads: int, batch: int, head_dim: int, itemsize: int, card: Card, reach: int = 0,
        narrow: bool = False,
    ) -> Tiles:  # fmt: skip
        """`reach` is how many keys a query may attend to at most: lengths are known on the device only. `narrow`: keys
        and values are in fp8."""
        # Products of float32 have no matrix units, and a large tile of them does not fit into registers.
        rows = min(max(triton.next_power_of_2(queries * group), 16), 128 if itemsize < 4 else 16)
        if narrow and rows > 16 and queries * group <= 128:
            rows = 64  # the matrix unit works for one program while another weighs; 32 rows read values byte by byte
        across = triton.cdiv(queries * group, rows) * kv_heads * batch
        two = rows <= 32 or (narrow and rows <= 64)  # programs a processor
        wanted = max(1, (2 if two else 1) * card.processors // across)
        splits = min(1 << (wanted.bit_length() - 1), 64)
        wide = triton.next_power_of_2(head_dim) * itemsize  # bytes of one key
        keys = 64 if wide < 512 or (rows < 128 and itemsize < 4) else 32
        stages = 3 if wide <= 256 else 2
        if (rows, wide) == (64, 256) and not narrow and reach >= LONG and (rows + 2 * 3 * 128) * wide <= card.shared:
            keys, stages = 128, 3  # fewer iterations of a long loop: 8.62 ms where 64 keys took 8.96 (8B, 16 queries)
        limit = (card.shared + OWN) // 2 - OWN if two else card.shared
        if narrow and wide == 256 and rows <= 64 and reach >= WIDE:
            keys, stages = 128, 2  # 139 us a layer of 65,536 where 64 keys took 157 (16 queries), and 55 for 69 (one)
        stored = wide // itemsize if narrow else wide
        limit -= rows * wide + (keys * wide if narrow else 0)  # queries, and a tile that was converted
        stages, keys = fit_shared(stages, keys, 2 * stored, limit)
        return Tiles(rows, keys, splits, warps=8 if rows >= 128 else 4, stages=stages)


_cards: dict[torch.device, Card] = {}


def card_of(device: torch.device) -> Card:
    if device not in _cards:
        card = Card(4, 2**20)  # for the interpreter, where many programs are slow
        if device.type == "cuda":
            index = torch.cuda.current_device() if device.index is None else device.index
            known = triton.runtime.driver.active.utils.get_device_properties(index)
            major, minor = (0, 0) if torch.version.hip else torch.cuda.get_device_capability(index)
            card = Card(known["multiprocessor_count"], known["max_shared_mem"], 10 * major + minor)
        _cards[device] = card
    return _cards[device]


def tiles_over(
    q: Tensor, keys: Tensor, tables: Tensor | None, heads: int, queries: int, batch: int, little: bool,
    scales: KvScales | None,
) -> Tiles:  # fmt: skip
    (kv_heads, page, size), narrow = keys.shape[1:], scales is not None
    little |= narrow and page < 128  # long tiles lie in one page
    reach = 0 if little else page * (1 if tables is None else tables.shape[1])
    return Tiles.of(
        queries, heads // kv_heads, kv_heads, batch, size, q.element_size(), card_of(q.device), reach, narrow
    )
