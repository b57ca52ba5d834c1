"""How the work of attention is cut for the GPU at hand."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton

OWN = 1024  # bytes of shared memory that each program takes besides what it asks for
LONG = 131_072  # keys from which on tiles for long caches were measured to be faster; what lies below was not looked at


@dataclass(frozen=True, slots=True)
class Card:
    """What a GPU has: multiprocessors to keep busy, and bytes of memory that a program can share among its threads."""

    processors: int
    shared: int


@dataclass(frozen=True, slots=True)
class Tiles:
    """How the work is cut. The figures behind `Tiles.of` are in docs/lab-notes.md; `bench/gpu.py --only tune` finds
    them."""

    rows: int  # queries x heads of one key head, in one program
    keys: int  # at a time
    splits: int  # of the cache; a power of two
    warps: int
    stages: int

    @staticmethod
    def of(
        queries: int, group: int, kv_heads: int, batch: int, head_dim: int, itemsize: int, card: Card, reach: int = 0
    ) -> Tiles:
        """`reach` is how many keys a query may come to see: lengths are known on the device only."""
        # Products of float32 have no matrix units, and a large tile of them does not fit into registers.
        rows = min(max(triton.next_power_of_2(queries * group), 16), 128 if itemsize < 4 else 16)
        across = triton.cdiv(queries * group, rows) * kv_heads * batch
        two = rows <= 32  # programs a processor
        wanted = max(1, (2 if two else 1) * card.processors // across)
        splits = min(1 << (wanted.bit_length() - 1), 64)
        wide = triton.next_power_of_2(head_dim) * itemsize  # bytes of one key
        keys = 64 if wide < 512 or (rows < 128 and itemsize < 4) else 32
        stages = 3 if wide <= 256 else 2
        if (rows, wide) == (64, 256) and reach >= LONG and (rows + 2 * 3 * 128) * wide <= card.shared:
            keys, stages = 128, 3  # fewer turns of a long loop: 8.62 ms where 64 keys took 8.96 (8B, 16 queries)
        room = (card.shared + OWN) // 2 - OWN if two else card.shared
        while (rows + 2 * stages * keys) * wide > room and (stages, keys) != (1, 16):
            stages, keys = (stages - 1, keys) if stages > 2 or keys == 16 else (stages, keys // 2)
        return Tiles(rows, keys, splits, warps=8 if rows >= 128 else 4, stages=stages)


_cards: dict[torch.device, Card] = {}


def card_of(device: torch.device) -> Card:
    if device not in _cards:
        card = Card(4, 2**20)  # for the interpreter, where many programs take long
        if device.type == "cuda":
            index = torch.cuda.current_device() if device.index is None else device.index
            known = triton.runtime.driver.active.utils.get_device_properties(index)
            card = Card(known["multiprocessor_count"], known["max_shared_mem"])
        _cards[device] = card
    return _cards[device]
