"""Which slots hold which tokens: found by chained hashes of blocks, confirmed token by token.

The hash of a block covers all blocks before it, so that one look per block finds the slots with the longest common
beginning, however many slots there are. Hashes only point at candidates: what is shared is compared, so two texts with
the same hash cost a comparison, and perhaps a prefix that is not found. Tokens are compared as bytes, since many slots
may share a long beginning. Plain Python: it knows tokens, not tensors.
"""

from __future__ import annotations

import secrets
from array import array
from collections.abc import Callable, Sequence

BLOCK = 16  # tokens; a shorter common beginning is chance
BYTES = array("i").itemsize


class PrefixIndex:
    def __init__(self, block: int = BLOCK) -> None:
        self.block = block
        self._start = secrets.randbits(61)  # so that nobody can choose texts with one hash
        self.salts: dict[int, str] = {}  # of each slot: texts are only found by who has the same
        self.tokens: dict[int, list[int]] = {}  # of each slot,
        self._packed: dict[int, bytearray] = {}  # and the same as bytes
        self._hashes: dict[int, list[int]] = {}  # of each slot's whole blocks
        self._holders: dict[int, dict[int, None]] = {}  # hash -> slots, in order
        self._hidden: set[int] = set()  # slots that are not to be found

    def add(self, slot: int) -> None:
        self.tokens[slot], self._packed[slot], self._hashes[slot], self.salts[slot] = [], bytearray(), [], ""

    def salt(self, slot: int, salt: str) -> None:
        """Of a slot that holds nothing."""
        assert not self.tokens[slot], "a slot with tokens keeps its salt"
        self.salts[slot] = salt

    def drop(self, slot: int) -> None:
        self.cut(slot, 0)
        del self.tokens[slot], self._packed[slot], self._hashes[slot], self.salts[slot]

    def move(self, slot: int, place: int) -> None:
        """Another name for all that a slot holds."""
        assert slot not in self._hidden and place not in self.tokens
        self.tokens[place], self._packed[place] = self.tokens.pop(slot), self._packed.pop(slot)
        self._hashes[place], self.salts[place] = self._hashes.pop(slot), self.salts.pop(slot)
        for old in self._hashes[place]:
            holders = self._holders[old]
            holders.pop(slot, None)
            holders[place] = None

    def append(self, slot: int, tokens: Sequence[int]) -> None:
        held, hashes = self.tokens[slot], self._hashes[slot]
        held += tokens
        self._packed[slot] += _packed(tokens)
        if slot in self._hidden:
            return
        for end in range((len(hashes) + 1) * self.block, len(held) + 1, self.block):
            before = hashes[-1] if hashes else hash((self._start, self.salts[slot]))
            hashes.append(self._hash(before, held[end - self.block : end]))
            self._holders.setdefault(hashes[-1], {})[slot] = None

    def cut(self, slot: int, length: int) -> None:
        """Forget what comes after the first `length` tokens."""
        del self.tokens[slot][length:], self._packed[slot][length * BYTES :]
        self._forget(slot, length // self.block)
        if not length:
            self._hidden.discard(slot)

    def hide(self, slot: int) -> None:
        """Never find this slot again, until it is cut to nothing."""
        self._forget(slot, 0)
        self._hidden.add(slot)

    def is_hidden(self, slot: int) -> bool:
        return slot in self._hidden

    def common(
        self, text: Sequence[int], salt: str = "", shortest: Callable[[int], int] = lambda slot: 0
    ) -> dict[int, int]:
        """The slots with the longest common beginning, of at least a block and the `min_length` that a slot can be cut
        to, each with the tokens it shares."""
        last, found = hash((self._start, salt)), list[dict[int, None]]()
        for end in range(self.block, len(text) + 1, self.block):
            last = self._hash(last, text[end - self.block : end])
            if last not in self._holders:
                break
            found.append(self._holders[last])
        shared: dict[int, int] = {}  # counted once for each slot, however many of its blocks agree
        packed = _packed(text) if found else b""
        for holders in reversed(found):
            for s in holders:
                if s not in shared and self.salts[s] == salt:
                    shared[s] = _common_bytes(self._packed[s], packed) // BYTES
            if usable := {s: shared[s] for s in holders if shared.get(s, -1) >= max(self.block, shortest(s))}:
                return usable
        return {}

    def goes_on(self, slot: int, text: Sequence[int]) -> bool:
        """Whether anybody may hold more of a text that begins with all that this slot holds: a further block of it."""
        at = len(self._hashes[slot]) * self.block
        before = self._hashes[slot][-1] if at else hash((self._start, self.salts[slot]))
        return self._hash(before, text[at : at + self.block]) in self._holders

    def _forget(self, slot: int, blocks: int) -> None:
        for old in self._hashes[slot][blocks:]:
            holders = self._holders.get(old, {})
            holders.pop(slot, None)  # gone already, if two of its blocks have one hash
            if not holders:
                self._holders.pop(old, None)
        del self._hashes[slot][blocks:]

    @staticmethod
    def _hash(before: int, tokens: Sequence[int]) -> int:
        return hash((before, *tokens))


def common_prefix(one: Sequence[int], other: Sequence[int]) -> int:
    """How many tokens both begin with."""
    if one[: len(other)] == other:
        return len(other)
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def _packed(tokens: Sequence[int]) -> bytes:
    return array("i", tokens).tobytes()


def _common_bytes(one: bytearray, other: bytes) -> int:
    """How many bytes both begin with."""
    low, high = 0, min(len(one), len(other))
    if one[:high] == other[:high]:
        return high
    while high - low > 1:  # the first `low` agree, the first `high` do not
        middle = (low + high) // 2
        low, high = (middle, high) if one[low:middle] == other[low:middle] else (low, middle)
    return low
