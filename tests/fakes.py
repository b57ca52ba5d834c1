"""Models for tests: runners whose next-token logits are a plain function of the tokens in the slot.

Since a FakeRunner answers from what its slots hold, any slip in cache handling (a token fed twice, a truncation
forgotten) changes what it says. It also keeps the books: passes made, and the time they take on a fake clock.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch

from semspec.model.base_runner import BaseRunner
from semspec.model.config import AttentionSpec
from semspec.model.decode import decode_by_score
from semspec.model.paged_cache import PagedCache
from semspec.tree import path
from semspec.types import Decode, DecodeOutput, Score, ScoreOutput

Logits = Callable[[list[int]], list[float]]
PAGE = 8  # tokens


@dataclass
class Clock:
    """A clock that moves when told to."""

    now: float = 0.0

    def __call__(self) -> float:
        return self.now


@dataclass
class Pass:
    """One entry of a FakeRunner's diary."""

    kind: str  # "score" or "roll"
    rows: dict[int, int]  # slot -> tokens fed or written
    began: float


@dataclass
class FakeRunner(BaseRunner):
    logits: Logits
    vocab_size: int
    slots: int = 8
    max_seq_len: int = 4096
    clock: Clock = field(default_factory=Clock)
    seconds: float = 1.0  # per pass, or per token of a roll
    num_layers: int = 2
    room: int | None = None  # tokens that all slots hold together, in pages of a real pool
    window: int | None = None  # of one of its layers, in such a pool
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    trees: bool = True

    def __post_init__(self) -> None:
        self.held: dict[int, list[int]] = {}
        self.diary: list[Pass] = []
        specs = [AttentionSpec(None, None), *([AttentionSpec(self.window, None)] if self.window else [])]
        shape: Any = SimpleNamespace(num_layers=len(specs), kv_heads=1, head_dim=1, attention_specs=specs)
        where = torch.device("cpu"), torch.float32
        self.pages = self.room and PagedCache(shape, self.slots, self.max_seq_len, *where, tokens=self.room, page=PAGE)

    @property
    def free(self) -> int:
        return self.slots - sum(slot < self.slots for slot in self.held)  # others are places

    def acquire(self, prompt: Sequence[int] = (), salt: str = "") -> int:
        slot = self.pages.acquire() if self.pages else min(set(range(self.slots)) - self.held.keys())
        self.held[slot] = []
        return slot

    def lacks_room(self, tokens: Sequence[tuple[int | None, int]], without: Sequence[int] = ()) -> bool:
        return bool(self.pages and self.pages.lacks_room(tokens, without))

    @property
    def windowed(self) -> bool:
        return bool(self.pages and self.pages.longest is not None)

    def min_length(self, slot: int) -> int:
        return self.pages.min_length(slot) if self.pages else 0

    def release(self, slot: int) -> None:
        del self.held[slot]
        if self.pages:
            self.pages.release(slot)

    def park(self, slot: int) -> int | None:
        if not self.pages:
            return None
        place = self.pages.park(slot)
        assert place is not None and place not in self.held
        self.held[place] = self.held.pop(slot)
        return place

    def length(self, slot: int) -> int:
        return len(self.held[slot])

    def truncate(self, slot: int, length: int) -> None:
        assert 0 <= length <= len(self.held[slot]), "truncation beyond what the slot holds"
        del self.held[slot][length:]
        if self.pages:
            self.pages.truncate(slot, length)

    def compact(self, slot: int, start: int, rows: Sequence[int]) -> None:
        assert list(rows) == sorted(set(rows)) and all(row < len(self.held[slot]) - start for row in rows)
        self.held[slot][start:] = [self.held[slot][start + row] for row in rows]
        if self.pages:
            self.pages.compact(slot, start, rows)

    def copy(self, source: int, target: int, length: int) -> None:
        self.held[target] = self.held[source][:length]
        if self.pages:
            self.pages.copy(source, target, length)

    def score(self, requests: Sequence[Score]) -> list[ScoreOutput]:
        self.diary.append(Pass("score", {r.slot: len(r.tokens) for r in requests}, self.clock.now))
        self.clock.now += self.seconds
        if self.pages:
            self.pages.extend([(r.slot, len(r.tokens)) for r in requests])
        return [self._feed(r) for r in requests]

    def _feed(self, request: Score) -> ScoreOutput:
        assert request.tokens, "a pass over no tokens"
        rows = []
        held, end = self.held[request.slot], len(self.held[request.slot]) + len(request.tokens)
        for i, token in enumerate(request.tokens):
            assert 0 <= token < self.vocab_size
            held.append(token)
            node = len(held) - 1 - (end - len(request.parents))  # in the tree that the slot ends with
            base = len(held) - 1 - node
            line = [*held[:base], *(held[base + j] for j in path(request.parents, node))] if node >= 0 else held
            if i >= len(request.tokens) - request.kept_states:
                rows.append(self.logits(line))
        assert len(self.held[request.slot]) <= self.max_seq_len, "slot overflow"
        logits = torch.tensor(rows).view(len(rows), self.vocab_size)
        kept = logits[len(logits) - request.logits_to_keep :]
        return ScoreOutput(kept, {layer: logits + layer for layer in request.layers})

    def decode(self, requests: Sequence[Decode]) -> list[DecodeOutput]:
        before = len(self.diary)
        began = self.clock.now
        rolled = decode_by_score(self, requests)
        del self.diary[before:]  # one fused pass, not its parts
        self.diary.append(Pass("roll", {r.slot: len(o.tokens) for r, o in zip(requests, rolled, strict=True)}, began))
        return rolled


def chain(vocab: int, seed: int = 0, memory: int = 3, sharpness: float = 2.0) -> Logits:
    """A random language: logits drawn once and for all for every context of the last `memory` tokens."""

    def logits(context: list[int]) -> list[float]:
        rng = random.Random(repr((seed, context[-memory:], min(len(context), memory))))
        return [rng.gauss(0.0, sharpness) for _ in range(vocab)]

    return logits


def blend(one: Logits, other: Logits, share: Callable[[list[int]], bool]) -> Logits:
    """The logits of `other` where `share` says so of the context, else those of `one`: a draft that errs at will."""
    return lambda context: other(context) if share(context) else one(context)


def script(tokens: Sequence[int], vocab: int, prompt: int) -> Logits:
    """A model that writes the given tokens after a prompt of the given length, whatever it is fed."""

    def logits(context: list[int]) -> list[float]:
        i = len(context) - prompt
        row = [0.0] * vocab
        row[tokens[i % len(tokens)]] = 10.0
        return row

    return logits


def greedy(logits: Logits, prompt: list[int], n: int) -> list[int]:
    """What a model writes greedily, by the definition."""
    context = list(prompt)
    for _ in range(n):
        row = logits(context)
        context.append(row.index(max(row)))
    return context[len(prompt) :]
