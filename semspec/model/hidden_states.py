"""Hidden states of the tokens that a slot of a prefix cache holds, for drafters that read the target."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor


class CachedHiddenStates:
    """Of a slot's leading tokens, in the parts in which passes returned them. As a text grows, nothing is copied, and
    a round looks at the last parts only: there is one for each round before it."""

    def __init__(self) -> None:
        self._parts: list[dict[int, Tensor]] = []
        self._ends: list[int] = []  # tokens up to the end of each part
        self._layers: list[frozenset[int]] = []  # that it and all before it have: fewer and fewer
        self._bytes: list[int] = []  # of it and all before it

    @property
    def _count(self) -> int:
        return self._ends[-1] if self._ends else 0

    @property
    def nbytes(self) -> int:
        """All the memory it takes; where another one shares some of it, that counts for both."""
        return self._bytes[-1] if self._bytes else 0

    def covers(self, layers: Iterable[int]) -> int:
        """How many leading tokens it has the states of, in all these layers."""
        want = frozenset(layers)
        parts = bisect_left(self._layers, True, key=lambda common: not want <= common)
        return self._ends[parts - 1] if parts else 0

    def between(self, start: int, end: int, layers: Iterable[int]) -> dict[int, Tensor]:
        at = bisect_right(self._ends, start)
        begin, parts = self._ends[at - 1] if at else 0, list[dict[int, Tensor]]()
        while begin < end and at < len(self._parts):
            rows = slice(max(0, start - begin), end - begin)
            parts.append({layer: states[rows] for layer, states in self._parts[at].items()})
            begin, at = self._ends[at], at + 1
        return {layer: torch.cat([part[layer] for part in parts]) for layer in layers}

    def first(self, length: int) -> CachedHiddenStates:
        made, whole = CachedHiddenStates(), bisect_right(self._ends, length)
        made._parts, made._ends, made._layers = self._parts[:whole], self._ends[:whole], self._layers[:whole]
        made._bytes = self._bytes[:whole]
        if whole < len(self._parts) and made._count < length:
            made._add({layer: states[: length - made._count] for layer, states in self._parts[whole].items()})
        return made

    def kept(self, start: int, rows: Sequence[int]) -> CachedHiddenStates:
        """Of the tokens from `start` on only these."""
        made, end = self.first(start), start + max(rows, default=-1) + 1
        if rows and self._count >= end:
            tail = self.between(start, end, self._layers[-1])
            made.append(start, {layer: states[list(rows)] for layer, states in tail.items()})
        return made

    def append(self, start: int, hidden: dict[int, Tensor]) -> None:
        """States of the tokens from `start` on; after a gap they are no use."""
        if hidden and self.covers(hidden) == start:
            self._add(hidden)

    def _add(self, part: dict[int, Tensor]) -> None:
        count = len(next(iter(part.values())))
        if not count:
            return
        # A view would keep the states of a whole batch, or of a whole tree.
        self._parts.append({i: h.clone() if h.untyped_storage().nbytes() > h.nbytes else h for i, h in part.items()})
        self._ends.append(self._count + count)
        self._bytes.append(self.nbytes + sum(states.untyped_storage().nbytes() for states in self._parts[-1].values()))
        own = frozenset(part)
        self._layers.append(own & self._layers[-1] if self._layers else own)
