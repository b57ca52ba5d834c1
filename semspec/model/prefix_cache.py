"""A prefix cache: a runner whose free slots keep their KV entries, so that a common prefix is not computed again.

A released slot keeps its tokens until it is needed for others. A new sequence gets the free slot with the longest
prefix of its prompt, and only the rest is fed. Callers do not notice: to them a slot starts empty and the whole prompt
is fed; what is cached is left out of the pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from semspec.types import Decode, DecodeOutput, Runner, Score, ScoreOutput

MIN_PREFIX = 8  # tokens; a shorter common prefix is chance


class PrefixCache:
    """See types.Runner. Wraps a runner and holds all of its slots."""

    def __init__(self, runner: Runner) -> None:
        self.inner = runner
        self.vocab, self.capacity, self.depth = runner.vocab, runner.capacity, runner.depth
        self._idle = [runner.acquire() for _ in range(runner.free)]  # inner slots, least recently used first
        self._known: dict[int, list[int]] = {slot: [] for slot in self._idle}  # the tokens of their KV entries
        self._free = list(range(len(self._idle)))[::-1]  # outer slots
        self._slots: dict[int, int] = {}  # outer -> inner, from the first feed on
        self._lengths: dict[int, int] = {}
        self.queries = self.hits = 0  # prompt tokens without a row in return, and those of them found here

    @property
    def device(self) -> torch.device:
        return self.inner.device

    @property
    def free(self) -> int:
        return len(self._free)

    def acquire(self) -> int:
        slot = self._free.pop()
        self._lengths[slot] = 0
        return slot

    def release(self, slot: int) -> None:
        del self._lengths[slot]
        self._free.append(slot)
        if slot in self._slots:
            self._idle.append(self._slots.pop(slot))

    def length(self, slot: int) -> int:
        return self._lengths[slot]

    def truncate(self, slot: int, length: int) -> None:
        assert 0 <= length <= self._lengths[slot], "truncation beyond what the slot holds"
        self._lengths[slot] = length

    def score(self, requests: Sequence[Score]) -> list[ScoreOutput]:
        answers: list[ScoreOutput | None] = []
        feeds: list[tuple[Score, Score]] = []  # as requested, and what is left to compute
        for request in requests:
            cached = self._cached(request.slot, request.tokens, most=len(request.tokens) - request.keep)
            self._lengths[request.slot] += cached
            if cached == len(request.tokens):
                answers.append(ScoreOutput(torch.empty(0, self.vocab, device=self.device)))
            else:
                answers.append(None)
                inner = self._aim(request.slot)
                feeds.append((request, replace(request, runner=self.inner, slot=inner, tokens=request.tokens[cached:])))
        rows = iter(self.inner.score([feed for _, feed in feeds]) if feeds else ())
        for request, feed in feeds:  # only after a pass that did not raise
            self._learn(request.slot, feed.tokens)
        return [next(rows) if answer is None else answer for answer in answers]

    def decode(self, requests: Sequence[Decode]) -> list[DecodeOutput]:
        feeds = []
        for request in requests:
            self._bind(request.slot, [])  # too short to take a slot with a prefix
            feeds.append(replace(request, runner=self.inner, slot=self._aim(request.slot)))
        outputs = self.inner.decode(feeds)
        for request, output in zip(requests, outputs, strict=True):
            self._learn(request.slot, [*request.tokens, *output.tokens[:-1]])
        return outputs

    def _cached(self, slot: int, tokens: list[int], most: int) -> int:
        """How many of these tokens the slot holds at this position already."""
        self._bind(slot, tokens)
        known, at = self._known[self._slots[slot]], self._lengths[slot]
        cached = min(common(known[at : at + most], tokens), most)
        self.queries += most
        self.hits += cached
        return cached

    def _bind(self, slot: int, tokens: list[int]) -> None:
        """Choose an inner slot: the one with the longest common prefix, or else the least recently used."""
        if slot in self._slots:
            return
        shared = [common(self._known[idle], tokens) for idle in self._idle]
        best = max(range(len(shared)), key=lambda i: shared[i])
        inner = self._idle.pop(best if shared[best] >= MIN_PREFIX else 0)
        if shared[best] < MIN_PREFIX:
            self._known[inner] = []
        self._slots[slot] = inner

    def _aim(self, slot: int) -> int:
        """Truncate the inner slot to the outer one's length, ready to be fed."""
        inner, length = self._slots[slot], self._lengths[slot]
        self.inner.truncate(inner, length)
        del self._known[inner][length:]
        return inner

    def _learn(self, slot: int, tokens: list[int]) -> None:
        self._known[self._slots[slot]] += tokens
        self._lengths[slot] += len(tokens)


def common(one: list[int], other: list[int]) -> int:
    """Length of the common prefix."""
    if one[: len(other)] == other:
        return len(other)
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
