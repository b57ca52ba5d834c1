"""A runner whose released slots keep their tokens, so that a prompt with the same prefix is not read again.

Chats send their earlier turns with every question, and applications the same instructions. A released slot keeps its
KV entries until somebody needs it. A new sequence gets the longest prefix of its prompt that any idle slot holds: that
slot itself if the prompt goes on from it, else a copy, so that two conversations with the same instructions do not take
turns in evicting each other. Only the rest is fed. Decoders do not notice: a slot begins empty and its whole prompt is
fed to it; what is there already is left out of the pass. States that a drafter reads are remembered with the tokens; a
prefix without them is read again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from semspec.model.remembered_states import RememberedStates
from semspec.model.rows import after, rest
from semspec.model.wrapper import RunnerWrapper
from semspec.types import Decode, DecodeOutput, Runner, Score, ScoreOutput

MIN_PREFIX = 8  # tokens; a shorter common prefix is chance
MAX_LOST = 4  # tokens at the end of a slot that a prompt may differ in and still take it over instead of copying it


class PrefixCache(RunnerWrapper):
    """Holds at most `slots` slots of the runner inside: all of them by default, from the start."""

    def __init__(self, runner: Runner, slots: int | None = None) -> None:
        super().__init__(runner)
        self._limit = runner.free if slots is None else slots
        self._idle = [runner.acquire() for _ in range(runner.free if slots is None else 0)]  # least recently used first
        self._cached: dict[int, list[int]] = {slot: [] for slot in self._idle}  # tokens whose KV entries a slot has
        self._states: dict[int, RememberedStates] = {}  # by slot, where a drafter wanted them
        self._lengths: dict[int, int] = {}  # of slots in use, as their users see them
        self.queries = self.hits = 0  # prompt tokens looked up, and found
        self.reused = 0  # tokens that the last acquired slot had

    @property
    def free(self) -> int:
        return len(self._idle) + min(self._limit - len(self._cached), self.inner.free)

    def acquire(self, prompt: Sequence[int] = ()) -> int:
        shared = {slot: common_prefix(self._cached[slot], prompt) for slot in self._idle}
        best = max(shared, key=lambda slot: shared[slot], default=None)
        if best is None or shared[best] < MIN_PREFIX:
            slot = self._spare_slot()
        elif len(self._cached[best]) - shared[best] <= MAX_LOST:
            slot = best
        else:
            slot = self._spare_slot()
            if slot != best:
                self._cached[slot] = []  # until the copy is complete
                self.inner.copy(best, slot, shared[best])
                self._cached[slot] = self._cached[best][: shared[best]]
                self._states.pop(slot, None)
                if best in self._states:
                    self._states[slot] = self._states[best].first(shared[best])
        if slot in self._idle:
            self._idle.remove(slot)
        self._lengths[slot] = 0
        self.reused = min(common_prefix(self._cached[slot], prompt), max(len(prompt) - 1, 0))
        return slot

    def _spare_slot(self) -> int:
        """One that holds nothing, or else the least recently used."""
        empty = next((slot for slot in self._idle if not self._cached[slot]), None)
        if empty is None and len(self._cached) < self._limit and self.inner.free:
            empty = self.inner.acquire()
            self._cached[empty] = []
        return self._idle[0] if empty is None else empty

    def release(self, slot: int) -> None:
        del self._lengths[slot]
        self._idle.append(slot)

    def close(self) -> None:
        """Give idle slots back to the runner inside."""
        while self._idle:
            slot = self._idle.pop()
            del self._cached[slot]
            self._states.pop(slot, None)
            self.inner.release(slot)

    def __del__(self) -> None:
        self.close()

    def length(self, slot: int) -> int:
        return self._lengths[slot]

    def truncate(self, slot: int, length: int) -> None:
        assert 0 <= length <= self._lengths[slot], "truncation beyond what the slot holds"
        if length == 0 < self._lengths[slot]:  # nothing of it is wanted again, nor what others have of its beginning
            begins = self._cached[slot]
            for other in (slot, *self._idle):
                if common_prefix(self._cached[other], begins) >= min(MIN_PREFIX, len(begins)):
                    self._cached[other] = []
        self._lengths[slot] = length

    def score(self, requests: Sequence[Score]) -> list[ScoreOutput]:
        remembered: list[dict[int, Tensor]] = []
        feeds: list[Score] = []
        for request in requests:
            found = self._lookup(request)
            remembered.append(self._remembered(request, found))
            self._lengths[request.slot] += found
            if found < len(request.tokens):
                self._cut(request.slot)
                feeds.append(replace(rest(request, found), runner=self.inner))
        rows = self.inner.score(feeds) if feeds else []
        for feed, row in zip(feeds, rows, strict=True):  # only a pass that succeeded leaves entries to rely on
            self._append(feed.slot, feed.tokens)
            if feed.states:
                first = self._lengths[feed.slot] - feed.kept_states
                self._states.setdefault(feed.slot, RememberedStates()).append(first, row.hidden)
        fed = dict(zip((feed.slot for feed in feeds), rows, strict=True))
        nothing = ScoreOutput(torch.empty(0, self.vocab, device=self.device))
        return [after(states, fed.get(r.slot, nothing)) for r, states in zip(requests, remembered, strict=True)]

    def decode(self, requests: Sequence[Decode]) -> list[DecodeOutput]:
        for request in requests:
            self._cut(request.slot)
        outputs = self.inner.decode([replace(request, runner=self.inner) for request in requests])
        for request, out in zip(requests, outputs, strict=True):
            if request.slot in self._states and len(request.tokens) == 1:  # rows are those of the tokens fed
                self._states[request.slot].append(self._lengths[request.slot], out.hidden)
            self._append(request.slot, [*request.tokens, *out.tokens[:-1]])
        return outputs

    def _lookup(self, request: Score) -> int:
        """How many of these tokens the slot holds already; tokens whose rows are wanted are fed in any case."""
        most, at = len(request.tokens) - request.keep, self._lengths[request.slot]
        found = common_prefix(self._cached[request.slot][at : at + most], request.tokens)
        if request.states:
            known = self._states[request.slot].covers(request.layers) if request.slot in self._states else 0
            found = min(found, max(len(request.tokens) - request.states, known - at, 0))
        self.queries += most
        self.hits += found
        return found

    def _remembered(self, request: Score, found: int) -> dict[int, Tensor]:
        """The states of those of the first `found` tokens that the request wants them of."""
        first, at = len(request.tokens) - request.states, self._lengths[request.slot]
        if not request.states or found <= first:
            return {}
        return self._states[request.slot].between(at + first, at + found, request.layers)

    def _cut(self, slot: int) -> None:
        """Ready to be fed: the slot inside holds what its user thinks it holds."""
        self.inner.truncate(slot, self._lengths[slot])
        del self._cached[slot][self._lengths[slot] :]
        if slot in self._states:
            self._states[slot] = self._states[slot].first(self._lengths[slot])

    def _append(self, slot: int, tokens: Sequence[int]) -> None:
        self._cached[slot] += tokens
        self._lengths[slot] += len(tokens)


def common_prefix(one: Sequence[int], other: Sequence[int]) -> int:
    """How many tokens both begin with."""
    if one[: len(other)] == other:
        return len(other)
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
