"""Hidden states of the tokens that a slot of a prefix cache holds, for drafters that read the target."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor


class RememberedStates:
    """Of a slot's leading tokens, in the parts in which passes returned them: nothing is copied as a text grows."""

    def __init__(self, parts: Iterable[dict[int, Tensor]] = ()) -> None:
        self._parts = list(parts)

    def covers(self, layers: Iterable[int]) -> int:
        """How many leading tokens it has the states of, in all these layers."""
        want, count = set(layers), 0
        for part in self._parts:
            if not want <= part.keys():
                break
            count += _rows(part)
        return count

    def between(self, start: int, end: int, layers: Iterable[int]) -> dict[int, Tensor]:
        parts, at = list[dict[int, Tensor]](), 0
        for part in self._parts:
            rows = slice(max(0, start - at), max(0, end - at))
            parts.append({layer: states[rows] for layer, states in part.items()})
            at += _rows(part)
        return {layer: torch.cat([part[layer] for part in parts if _rows(part)]) for layer in layers}

    def first(self, length: int) -> RememberedStates:
        kept, at = list[dict[int, Tensor]](), 0
        for part in self._parts:
            if at < length:
                kept.append({layer: states[: length - at] for layer, states in part.items()})
            at += _rows(part)
        return RememberedStates(kept)

    def kept(self, start: int, rows: Sequence[int]) -> RememberedStates:
        """Of the tokens from `start` on only these."""
        made, end = self.first(start), start + max(rows, default=-1) + 1
        if rows and sum(map(_rows, self._parts)) >= end and self._parts:
            layers = set.intersection(*(set(part) for part in self._parts))
            tail = self.between(start, end, layers)
            made.append(start, {layer: states[list(rows)] for layer, states in tail.items()})
        return made

    def append(self, start: int, hidden: dict[int, Tensor]) -> None:
        """States of the tokens from `start` on; after a gap they are no use."""
        if hidden and self.covers(hidden) == start:
            # A view would keep the states of a whole batch.
            own = {i: h.clone() if h.untyped_storage().nbytes() > h.nbytes else h for i, h in hidden.items()}
            self._parts.append(own)


def _rows(part: dict[int, Tensor]) -> int:
    return len(next(iter(part.values())))
