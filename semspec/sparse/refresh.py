"""Recomputing the keys and values that sparse passes wrote, and measuring how far off they were.

Layers above the first get different inputs in a sparse pass, so the keys and values that it writes are not the dense
ones, and later passes build on them. After `every` sparse passes of a sequence, its next verification is dense and
starts where they started: their tokens are fed again before the draft, in the same pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from semspec.model.cache import Cache
from semspec.model.layer_ops import checks
from semspec.types import Score


@dataclass(slots=True)
class StaleRange:
    start: int  # position of the first token that a sparse pass wrote
    tokens: list[int]  # all from there on
    passes: int = 0  # sparse ones


@dataclass(frozen=True, slots=True)
class CacheError:
    """|written by sparse passes - recomputed densely| / |recomputed|, over all layers."""

    tokens: int
    keys: float
    values: float


class CacheRefresh:
    def __init__(self, cache: Cache, every: int) -> None:
        self.cache, self.every = cache, every
        self.errors: list[CacheError] = []  # one for each refresh
        self._stale: dict[int, StaleRange] = {}  # by slot
        self._replaced: dict[int, tuple[int, Tensor, Tensor]] = {}  # by slot: start, keys and values to be recomputed

    def restart(self) -> None:
        self._stale.clear()
        self._replaced.clear()

    def prepare(self, requests: Sequence[Score]) -> list[Score]:
        return [self._extend(r) if checks(r) else r for r in requests]

    def _extend(self, request: Score) -> Score:
        slot, stale = request.slot, self._stale.get(request.slot)
        length = self.cache.lengths[slot]
        if not self.every or stale is None or stale.passes < self.every or length <= stale.start:
            return request
        if stale.start < self.cache.min_length(slot):  # windows before it are gone: what is stale stays
            del self._stale[slot]
            return request
        keys, values = self.cache.between(slot, stale.start, length)
        self._replaced[slot] = (stale.start, keys.clone(), values.clone())
        self.cache.truncate(slot, stale.start)
        return replace(request, tokens=stale.tokens[: length - stale.start] + request.tokens)

    def record(self, slot: int, start: int, tokens: Sequence[int], sparse: bool) -> None:
        """Record what a pass wrote, and whether it was sparse."""
        stale = self._stale.get(slot)
        if stale is not None and start <= stale.start:  # all of it was truncated or has just been recomputed
            del self._stale[slot]
            stale = None
        replaced = self._replaced.pop(slot, None)
        if replaced is not None and replaced[0] == start:  # else that pass failed, and the slot has been reused
            self._measure(*replaced, slot)
        if stale is None and sparse:
            stale = self._stale[slot] = StaleRange(start, [])
        if stale is not None:
            del stale.tokens[start - stale.start :]
            stale.tokens += tokens
            stale.passes += sparse

    def kept(self, slot: int, start: int, rows: Sequence[int]) -> None:
        """Of the tokens from `start` on only these are left: one path of a tree."""
        stale = self._stale.get(slot)
        if stale is not None:
            at = start - stale.start
            stale.tokens[at:] = [stale.tokens[at + row] for row in rows]

    def copied(self, source: int, target: int) -> None:
        """The target slot holds a prefix of the source now, its sparse part too."""
        stale, length = self._stale.get(source), self.cache.lengths[target]
        self._stale.pop(target, None)
        if stale is not None and stale.start < length:
            self._stale[target] = replace(stale, tokens=stale.tokens[: length - stale.start])

    def _measure(self, start: int, keys: Tensor, values: Tensor, slot: int) -> None:
        halves = zip(self.cache.between(slot, start, start + keys.shape[2]), (keys, values), strict=True)
        errors = [float((new.float() - old.float()).norm() / new.float().norm()) for new, old in halves]
        self.errors.append(CacheError(keys.shape[2], *errors))
