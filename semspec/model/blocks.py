"""Which blocks of a cache each slot's tokens lie in: tables, a pool of free blocks, and shared ones.

A slot's table lists its blocks in order; block i holds the tokens from i * size on. Slots that begin alike may share
blocks: a shared block is never written, its writer gets a copy first. Plain Python: what has to be copied or told to a
device is returned as `Change`s.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

NONE: Mapping[int, int] = {}


class Change(NamedTuple):
    """An entry of a slot's table is this block now, with the contents of another one where one is named."""

    slot: int
    entry: int
    block: int
    copied: int | None = None


class BlockTables:
    def __init__(self, slots: int, blocks: int, size: int) -> None:
        self.size, self.blocks = size, blocks
        self.tables: list[list[int]] = [[] for _ in range(slots)]
        self._users = [0] * blocks  # tables that each block is in
        self._free = list(range(blocks))[::-1]

    @property
    def free(self) -> int:
        return len(self._free)

    def uses(self, slots: Sequence[int]) -> Counter[int]:
        """How many of these slots each block is in."""
        return Counter(block for slot in slots for block in self.tables[slot])

    def freed(self, dropped: Mapping[int, int]) -> int:
        """Blocks that are free once so many uses of each are gone."""
        return sum(self._users[block] == count for block, count in dropped.items())

    def needed(self, slot: int | None, length: int, count: int, dropped: Mapping[int, int] = NONE) -> int:
        """Free blocks that it takes to write `count` tokens after the first `length` of a slot (None: of a new one),
        once so many uses of each block are gone."""
        if not count:
            return 0
        table, first = [] if slot is None else self.tables[slot], length // self.size
        shared = sum(self._users[b] - dropped.get(b, 0) > 1 for b in table[first : self._blocks(length + count)])
        return max(0, self._blocks(length + count) - len(table)) + shared

    def extend(self, slot: int, length: int, count: int) -> list[Change]:
        """Make room for it; the caller has asked whether there is enough."""
        table, end, changes = self.tables[slot], self._blocks(length + count), list[Change]()
        for i in range(length // self.size, min(end, len(table)) if count else 0):
            old = table[i]
            if self._users[old] > 1:
                table[i] = self._take()
                self._users[old] -= 1
                kept = i * self.size < length  # else all of it is about to be written
                changes.append(Change(slot, i, table[i], old if kept else None))
        for i in range(len(table), end):
            table.append(self._take())
            changes.append(Change(slot, i, table[i]))
        return changes

    def fork(self, source: int, target: int, length: int) -> list[Change]:
        """The target holds the first `length` tokens of the source, in the same blocks, and nothing else."""
        self.shrink(target, 0)
        shared = self.tables[source][: self._blocks(length)]
        for block in shared:
            self._users[block] += 1
        self.tables[target] = list(shared)
        return [Change(target, i, block) for i, block in enumerate(shared)]

    def shrink(self, slot: int, length: int) -> None:
        """Give back the blocks after those of the first `length` tokens."""
        table = self.tables[slot]
        for block in table[self._blocks(length) :]:
            self._users[block] -= 1
            if not self._users[block]:
                self._free.append(block)
        del table[self._blocks(length) :]

    def shrink_all(self, lengths: Sequence[int]) -> None:
        """Give back all blocks that truncated slots have kept for what comes next."""
        for slot, length in enumerate(lengths):
            self.shrink(slot, length)

    def _take(self) -> int:
        block = self._free.pop()
        self._users[block] = 1
        return block

    def _blocks(self, length: int) -> int:
        return -(-length // self.size)
