"""Which blocks of a cache each slot's tokens lie in: tables, a pool of free blocks, and shared ones.

A slot's table lists its blocks in order; block i holds the tokens from i * size on. Slots that begin alike may share
blocks: a shared block is never written, its writer gets a copy first. The blocks that a table begins with may be given
back, where only the last tokens of a text are ever read: `GONE` is left of them. Plain Python: what has to be copied or
told to a device is returned as `Change`s. Tables may be added to those of the slots, for texts that nobody writes to: a
device need not know them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

NONE: Mapping[int, int] = {}
GONE = -1


class Change(NamedTuple):
    """An entry of a slot's table is this block now, with the contents of another one where one is named."""

    slot: int
    entry: int
    block: int
    copied: int | None = None


class PageTables:
    def __init__(self, slots: int, blocks: int, size: int) -> None:
        self.size, self.blocks = size, blocks
        self.tables: list[list[int]] = [[] for _ in range(slots)]
        self.first = [0] * slots  # blocks that each table begins with and has given back
        self._users = [0] * blocks  # tables that each block is in
        self._free = list(range(blocks))[::-1]

    @property
    def free(self) -> int:
        return len(self._free)

    def add(self) -> None:
        """A further table."""
        self.tables.append([])
        self.first.append(0)

    def uses(self, slots: Sequence[int]) -> Counter[int]:
        """How many of these slots each block is in."""
        return Counter(block for slot in slots for block in self.tables[slot][self.first[slot] :])

    def freed(self, dropped: Mapping[int, int]) -> int:
        """Blocks that are free once so many uses of each are gone."""
        return sum(self._users[block] == count for block, count in dropped.items())

    def freed_before(self, firsts: Mapping[int, int], dropped: Mapping[int, int] = NONE) -> int:
        """Blocks that are free once slots have given back those before their `firsts`, and so many uses of each are
        gone."""
        given = Counter(
            block for slot, first in firsts.items() for block in self.tables[slot][self.first[slot] : first]
        )
        return sum(self._users[block] - dropped.get(block, 0) == count for block, count in given.items())

    def ready(self, slot: int, length: int, count: int) -> bool:
        """Whether so many tokens can be written with the blocks that the slot has, as in most rounds."""
        table, first, end = self.tables[slot], length // self.size, -(-(length + count) // self.size)
        return end <= len(table) and all(self._users[block] == 1 for block in table[first:end])

    def needed(
        self, slot: int | None, length: int, count: int, dropped: Mapping[int, int] = NONE, first: int = 0
    ) -> int:
        """Free blocks that it takes to write `count` tokens after the first `length` of a slot (None: of a new one),
        or those from block `first` on, once so many uses of each block are gone."""
        if not count:
            return 0
        table, end = [] if slot is None else self.tables[slot], self._blocks(length + count)
        written = table[max(first, length // self.size) : end]
        shared = sum(self._users[b] - dropped.get(b, 0) > 1 for b in written)
        return max(0, end - max(first, len(table))) + shared

    def extend(self, slot: int, length: int, count: int, first: int = 0) -> list[Change]:
        """Make room for it; the caller has asked whether there is enough."""
        table, end, changes = self.tables[slot], self._blocks(length + count), list[Change]()
        self.give_back(slot, first)
        for i in range(max(first, length // self.size), min(end, len(table)) if count else 0):
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
        first = self.first[target] = min(self.first[source], len(shared))
        for block in shared[first:]:
            self._users[block] += 1
        self.tables[target] = list(shared)
        return [Change(target, i, block) for i, block in enumerate(shared) if i >= first]

    def shrink(self, slot: int, length: int) -> None:
        """Give back the blocks after those of the first `length` tokens."""
        table, end = self.tables[slot], self._blocks(length)
        self._release(table[max(end, self.first[slot]) :])
        del table[end:]
        self.first[slot] = min(self.first[slot], end)

    def give_back(self, slot: int, first: int) -> None:
        """Give back the blocks before this one: none of their tokens is read again."""
        table, gone = self.tables[slot], self.first[slot]
        if first <= gone:
            return
        self._release(table[gone:first])
        table[gone:first] = [GONE] * (first - gone)
        self.first[slot] = first

    def _release(self, blocks: Sequence[int]) -> None:
        for block in blocks:
            self._users[block] -= 1
            if not self._users[block]:
                self._free.append(block)

    def _take(self) -> int:
        block = self._free.pop()
        self._users[block] = 1
        return block

    def _blocks(self, length: int) -> int:
        return -(-length // self.size)
