"""What sparse passes wrote into the cache, written anew by a dense one now and then, and how far off it was.

Layers above the first get other inputs in a sparse pass, so the keys and values it leaves behind are not the dense
ones, and later passes build on them. After `every` sparse passes of a sequence its next check is dense and begins where
they began: their tokens are fed again in front of the draft, in the same pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from semspec.model.cache import Cache
from semspec.model.layer_ops import checks
from semspec.types import Score


@dataclass(slots=True)
class Stale:
    begin: int  # place of the first token that a sparse pass wrote
    tokens: list[int]  # all from there on
    passes: int = 0  # sparse ones


@dataclass(frozen=True, slots=True)
class Drift:
    """|written by sparse passes - written by a dense one| / |dense|, over all layers."""

    tokens: int
    keys: float
    values: float


class Guard:
    def __init__(self, cache: Cache, every: int) -> None:
        self.cache, self.every = cache, every
        self.drifts: list[Drift] = []  # one for each refresh
        self._stale: dict[int, Stale] = {}  # by slot
        self._before: dict[int, tuple[int, Tensor, Tensor]] = {}  # place, keys and values about to be written anew

    def prepare(self, requests: Sequence[Score]) -> list[Score]:
        return [self._reach_back(r) if checks(r) else r for r in requests]

    def _reach_back(self, request: Score) -> Score:
        slot, stale = request.slot, self._stale.get(request.slot)
        length = self.cache.lengths[slot]
        if not self.every or stale is None or stale.passes < self.every or length <= stale.begin:
            return request
        at = (slice(None), slot, slice(None), slice(stale.begin, length))
        self._before[slot] = (stale.begin, self.cache.keys[at].clone(), self.cache.values[at].clone())
        self.cache.truncate(slot, stale.begin)
        return replace(request, tokens=stale.tokens[: length - stale.begin] + request.tokens)

    def fed(self, slot: int, start: int, tokens: Sequence[int], sparse: bool) -> None:
        """Note what a pass has written, and whether it left things out."""
        stale = self._stale.get(slot)
        if stale is not None and start <= stale.begin:  # all of it was truncated, or has just been written anew
            del self._stale[slot]
            stale = None
        before = self._before.pop(slot, None)
        if before is not None and before[0] == start:  # else that pass failed, and the slot is another's by now
            self._measure(*before, slot)
        if stale is None and sparse:
            stale = self._stale[slot] = Stale(start, [])
        if stale is not None:
            del stale.tokens[start - stale.begin :]
            stale.tokens += tokens
            stale.passes += sparse

    def copied(self, source: int, target: int) -> None:
        stale = self._stale.get(source)
        self._stale.pop(target, None)
        if stale is not None and stale.begin < self.cache.lengths[target]:
            self._stale[target] = replace(stale, tokens=stale.tokens[: self.cache.lengths[target] - stale.begin])

    def _measure(self, begin: int, keys: Tensor, values: Tensor, slot: int) -> None:
        def off(buffer: Tensor, old: Tensor) -> float:
            new = buffer[:, slot, :, begin : begin + old.shape[2]].float()
            return float((new - old.float()).norm() / new.norm())

        self.drifts.append(Drift(keys.shape[2], off(self.cache.keys, keys), off(self.cache.values, values)))
