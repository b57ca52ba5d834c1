"""A runner whose free slots remember what they held, so that a prompt which begins the same is not read again.

Chats send their earlier turns with every question, and applications the same instructions. A slot that is given back
keeps its tokens and their KV entries until somebody needs the room. Who comes with a prompt gets, of the free slots,
the one that has the longest beginning of it, and only the rest is fed. Nobody else notices: to a decoder, a slot
begins empty and its whole prompt is fed; the part that is there already is left out of the pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from semspec.types import Decode, DecodeOutput, Runner, Score, ScoreOutput

WORTHWHILE = 8  # a shorter common beginning is chance


class PrefixCache:
    """See types.Runner. All passes are made by the runner inside, all of whose slots this one holds."""

    def __init__(self, runner: Runner) -> None:
        self.inner = runner
        self.vocab, self.capacity, self.depth = runner.vocab, runner.capacity, runner.depth
        self._idle = [runner.acquire() for _ in range(runner.free)]  # slots inside, longest unused first
        self._known: dict[int, list[int]] = {slot: [] for slot in self._idle}  # what their KV entries stand for
        self._free = list(range(len(self._idle)))[::-1]  # slots as others see them
        self._slots: dict[int, int] = {}  # as others see them -> inside, from the first feed on
        self._lengths: dict[int, int] = {}
        self.queries = self.hits = 0  # tokens to be read without a row in return, and those that were there already

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
        feeds: list[tuple[Score, Score]] = []  # what was asked, and what is left to do
        for request in requests:
            there = self._there(request.slot, request.tokens, most=len(request.tokens) - request.keep)
            self._lengths[request.slot] += there
            if there == len(request.tokens):
                answers.append(ScoreOutput(torch.empty(0, self.vocab, device=self.device)))
            else:
                answers.append(None)
                inside = self._aim(request.slot)
                feeds.append((request, replace(request, runner=self.inner, slot=inside, tokens=request.tokens[there:])))
        rows = iter(self.inner.score([feed for _, feed in feeds]) if feeds else ())
        for request, feed in feeds:  # only a pass that went well leaves entries to rely on
            self._learn(request.slot, feed.tokens)
        return [next(rows) if answer is None else answer for answer in answers]

    def decode(self, requests: Sequence[Decode]) -> list[DecodeOutput]:
        feeds = []
        for request in requests:
            self._bind(request.slot, [])  # too short to be worth a slot that remembers something
            feeds.append(replace(request, runner=self.inner, slot=self._aim(request.slot)))
        rolled = self.inner.decode(feeds)
        for request, wrote in zip(requests, rolled, strict=True):
            self._learn(request.slot, [*request.tokens, *wrote.tokens[:-1]])
        return rolled

    def _there(self, slot: int, tokens: list[int], most: int) -> int:
        """How many of these tokens need not be fed, being what the slot holds at this place already."""
        self._bind(slot, tokens)
        known, at = self._known[self._slots[slot]], self._lengths[slot]
        there = min(common(known[at : at + most], tokens), most)
        self.queries += most
        self.hits += there
        return there

    def _bind(self, slot: int, tokens: list[int]) -> None:
        """Choose a slot inside: the one that remembers most of this beginning, or else the one longest unused."""
        if slot in self._slots:
            return
        shared = [common(self._known[idle], tokens) for idle in self._idle]
        best = max(range(len(shared)), key=lambda i: shared[i])
        inside = self._idle.pop(best if shared[best] >= WORTHWHILE else 0)
        if shared[best] < WORTHWHILE:
            self._known[inside] = []
        self._slots[slot] = inside

    def _aim(self, slot: int) -> int:
        """Cut the slot inside to what its user has, ready to be fed; beyond that nothing is known any more."""
        inside, length = self._slots[slot], self._lengths[slot]
        self.inner.truncate(inside, length)
        del self._known[inside][length:]
        return inside

    def _learn(self, slot: int, tokens: list[int]) -> None:
        self._known[self._slots[slot]] += tokens
        self._lengths[slot] += len(tokens)


def common(one: list[int], other: list[int]) -> int:
    """How many tokens two texts have in common at their beginning."""
    if one[: len(other)] == other:
        return len(other)
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
