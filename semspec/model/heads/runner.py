"""The runner of a draft head: the contract of types.Runner, with the target's states beside the tokens.

A token at position p is read with the target's state at p - 1, which `observe` has brought; beyond the target's states,
with the head's own output at p - 1. What rests on such outputs is dropped by the next `truncate`: the states that the
target computed for accepted tokens take their place. The first token of a text has no state before it and is only
counted. Passes are batched as a model's are.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch import Tensor

from semspec.errors import SemspecError
from semspec.model.attention_metadata import SequenceChunk
from semspec.model.base_runner import BaseRunner
from semspec.model.cache import write
from semspec.model.decode import decode_by_score
from semspec.model.heads.block import BlockHead
from semspec.model.heads.eagle import EagleHead
from semspec.model.heads.graphs import HeadGraphs, States
from semspec.model.heads.levels import Levels, Start, on_host
from semspec.model.heads.mtp import MtpHead
from semspec.model.placement import on_its_device
from semspec.model.rows import copied_rows
from semspec.types import Beam, Decode, DecodeOutput, Grow, Score, ScoreOutput

FIRST_CAPACITY = 256  # pairs that a new slot has room for; it grows as its text does
ENOUGH = 1 << 20  # slots: there are as many as the target has


@dataclass(slots=True)
class _Slot:
    states: Tensor  # [capacity, width] combined states of the target
    keys: Tensor  # [layers, kv heads, capacity, head_dim]
    values: Tensor
    length: int = 0  # tokens read, the first included
    known: int = 0  # tokens whose states are combined
    waiting: list[list[Tensor]] = field(default_factory=list)  # and those that are not yet, by part and layer
    own: Tensor | None = None  # what the head made beyond: states of the last token and a tree, or the rows of a block
    read: int = 0  # leading states whose keys and values a block head has stored
    row: int = -1  # of the pool, where keys and values lie in one

    @property
    def observed(self) -> int:
        return self.known + sum(len(part[0]) for part in self.waiting)


class StateRunner(BaseRunner, ABC):
    """What all heads share: slots, and the states that they have been given."""

    trees = False

    def __init__(
        self, head: EagleHead | BlockHead | MtpHead, vocab: int, capacity: int, layers: tuple[int, ...] | None = None
    ) -> None:
        """`layers`: of the target, whose states it reads, in the order of the head's inputs."""
        self.head, self.vocab_size, self.max_seq_len = head, vocab, capacity
        self.layers = head.config.layers if layers is None else layers
        self.num_layers, self.device, self.shape = head.shape.num_layers, head.device, head.shape
        self._slots: dict[int, _Slot] = {}

    @property
    def longest(self) -> int:
        """Tokens of a draft."""
        return self.max_seq_len

    @property
    def free(self) -> int:
        return ENOUGH - len(self._slots)

    @torch.inference_mode()
    def acquire(self, prompt: Sequence[int] = (), salt: str = "") -> int:
        slot = next(i for i in range(ENOUGH) if i not in self._slots)
        s, none = self.head.shape, torch.empty(0, device=self.device, dtype=self.head.dtype)
        cache = (s.num_layers, s.kv_heads, 0, s.head_dim)
        self._slots[slot] = _Slot(none.view(0, s.width), none.view(cache), none.view(cache))
        return slot

    def release(self, slot: int) -> None:
        del self._slots[slot]

    def length(self, slot: int) -> int:
        return self._slots[slot].length

    def observed(self, slot: int) -> int:
        """Tokens whose states the target has given."""
        return self._slots[slot].observed

    def held(self, slot: int) -> tuple[int, int, int]:
        """States of the target that are combined, those that wait for the next pass, and the head's own beyond them."""
        s = self._slots[slot]
        return s.known, s.observed - s.known, 0 if s.own is None else len(s.own)

    def observe(self, slot: int, hidden: dict[int, Tensor]) -> None:
        """States of further tokens, by layer; they are read with the next pass."""
        self._slots[slot].waiting.append([hidden[layer] for layer in self.layers])

    def truncate(self, slot: int, length: int) -> None:
        """Keep at most so many tokens, and none that was read without a state of the target."""
        s = self._slots[slot]
        if not length:
            s.known, s.waiting, s.read = 0, [], 0
        s.length, s.own = min(length, s.observed + 1 if s.observed else 0, s.length), None

    def compact(self, slot: int, start: int, rows: Sequence[int]) -> None:
        self.truncate(slot, start)  # what it read without the target's states is dropped, wherever it lies

    def copy(self, source: int, target: int, length: int) -> None:
        raise SemspecError("a draft head's slots are not copied")

    def write(self, layer: int, chunk: SequenceChunk, k: Tensor, v: Tensor, begin: int) -> tuple[Tensor, Tensor]:
        s = self._slots[chunk.slot]
        return write(s.keys[layer], s.values[layer], chunk, k, v, begin)

    @abstractmethod
    def score(self, requests: Sequence[Score]) -> list[ScoreOutput]: ...

    @abstractmethod
    def first_guesses(self, text: list[int], hidden: dict[int, Tensor], count: int) -> dict[int, int]:
        """For some of the last `count` tokens of a text, by their index: what the head takes for them, given the
        target's states of what comes before."""

    @on_its_device
    def decode(self, requests: Sequence[Decode]) -> list[DecodeOutput]:
        return decode_by_score(self, requests)

    def _combine(self, slots: list[_Slot]) -> None:
        """Take in all states that are waiting, with one product for all sequences."""
        parts = [(s, part) for s in slots for part in s.waiting]
        if not parts:
            return
        states = [torch.cat([part[i] for _, part in parts]) for i in range(len(self.layers))]
        combined, row = self.head.combine(states), 0
        for s, part in parts:
            end = s.known + len(part[0])
            self._grow(s, end)
            s.states[s.known : end] = combined[row : (row := row + len(part[0]))]
            s.known = end
        for s in slots:
            s.waiting = []

    def _grow(self, s: _Slot, pairs: int) -> None:
        have = len(s.states)
        if pairs <= have:
            return
        more = max(FIRST_CAPACITY, 2 * have, pairs) - have
        s.states = torch.cat([s.states, s.states.new_zeros(more, s.states.shape[1])])
        self._make_room(s, len(s.states), more)

    def _make_room(self, s: _Slot, pairs: int, more: int) -> None:
        room = s.keys.new_zeros(*s.keys.shape[:2], more, s.keys.shape[3])
        s.keys, s.values = torch.cat([s.keys, room], 2), torch.cat([s.values, room], 2)


class HeadRunner(StateRunner):
    head: EagleHead | MtpHead
    trees = True

    def __init__(
        self, head: EagleHead | MtpHead, vocab: int, capacity: int, layers: tuple[int, ...] | None = None
    ) -> None:
        super().__init__(head, vocab, capacity, layers)
        self._no_rows = torch.empty(0, vocab, device=self.device)
        self.use(HeadGraphs.of(head, capacity) if isinstance(head, EagleHead) else None)

    def use(self, graphs: HeadGraphs | None) -> None:
        """How short passes are run; None: every operation is launched by itself."""
        self.graphs = graphs
        self.levels = None if graphs is None else Levels(graphs, self.vocab_size)

    def acquire(self, prompt: Sequence[int] = (), salt: str = "") -> int:
        slot = super().acquire(prompt)
        if self.graphs is not None:
            self._slots[slot].row = self.graphs.pool.take()
        return slot

    def release(self, slot: int) -> None:
        if self.graphs is not None:
            self.graphs.pool.give_back(self._slots[slot].row)
        super().release(slot)

    def write(self, layer: int, chunk: SequenceChunk, k: Tensor, v: Tensor, begin: int) -> tuple[Tensor, Tensor]:
        if self.graphs is None:
            return super().write(layer, chunk, k, v, begin)
        pool, row = self.graphs.pool, self._slots[chunk.slot].row
        return write(pool.keys[layer, row], pool.values[layer, row], chunk, k, v, begin)

    def _make_room(self, s: _Slot, pairs: int, more: int) -> None:
        if self.graphs is None:
            return super()._make_room(s, pairs, more)
        self.graphs.pool.reserve(pairs)

    @torch.inference_mode()
    def pretend(self, slot: int, length: int, known: int, waiting: int, own: int) -> None:
        """Hold so many tokens and states, whatever they are: for measuring time, where contents do not matter."""
        s, width = self._slots[slot], self.head.shared_embedding.shape[1]
        self._grow(s, max(length, known + waiting))
        s.length, s.known = length, known
        states = torch.zeros(waiting, width, device=self.device, dtype=self.head.dtype)
        s.waiting = [[states] * len(self.layers)] if waiting else []
        s.own = s.states.new_zeros(own, s.states.shape[1]) if own else None

    @on_its_device
    @torch.inference_mode()
    def score(self, requests: Sequence[Score]) -> list[ScoreOutput]:
        self._combine([self._slots[r.slot] for r in requests])
        chunks, tokens, states, keeps = list[SequenceChunk](), list[list[int]](), list[States](), list[int]()
        for r in requests:
            s = self._slots[r.slot]
            read = r.tokens if s.length else r.tokens[1:]
            start = max(s.length - 1, 0)
            self._grow(s, start + len(read))
            if read:
                chunks.append(SequenceChunk(r.slot, start, len(read), r.parents))
                states.append(self._states(s, start, len(read)) if not r.parents else self._states_of_parents(s, r))
                tokens.append(read)
                keeps.append(r.logits_to_keep)
            assert r.logits_to_keep <= len(read), "a row for the first token of a text, which has no state before it"
        made = iter(self._forward(tokens, states, chunks, keeps) if tokens else ())
        outputs = []
        for r in requests:
            s, nothing = self._slots[r.slot], not r.logits_to_keep
            first = not s.length  # of a text: it is only counted
            logits, own = next(made) if len(r.tokens) > first else (self._no_rows, self._no_rows)
            s.length += len(r.tokens)
            s.own = None if nothing else torch.cat([s.own, own]) if r.parents and s.own is not None else own[-1:]
            outputs.append(ScoreOutput(logits))
        return outputs

    def _forward(
        self, tokens: list[list[int]], states: list[States], chunks: list[SequenceChunk], keeps: list[int]
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Logits and own states of the last tokens of each chunk."""
        if self.graphs is None or not self.graphs.fits(chunks):
            ends = list(accumulate(c.count for c in chunks))
            wanted = [row for end, keep in zip(ends, keeps, strict=True) for row in range(end - keep, end)]
            at = torch.tensor(wanted, dtype=torch.long, device=self.device)
            ids = torch.tensor([token for own in tokens for token in own], device=self.device)
            assert isinstance(self.head, EagleHead)
            both = self.head.forward(ids, torch.cat([own.picked() for own in states]), chunks, self, at)
            return zip(both[0][:, : self.vocab_size].split(keeps), both[1].split(keeps), strict=True)
        rows = [SequenceChunk(self._slots[c.slot].row, c.start, c.count, c.parents) for c in chunks]
        logits, own = self.graphs.forward(tokens, states, rows)
        last = [(c.count - keep, c.count) for c, keep in zip(chunks, keeps, strict=True)]
        return zip(copied_rows(logits[..., : self.vocab_size], last), copied_rows(own, last), strict=True)

    @on_its_device
    @torch.inference_mode()
    def grow(self, requests: Sequence[Grow]) -> list[np.ndarray[Any, Any]] | None:
        beams = [beam for r in requests if (beam := r.growth.beam) is not None]
        if self.levels is None or len(beams) < len(requests) or not self.levels.supports(beams):
            return None
        starts = [self._start(r.slot, r.tokens, beam) for r, beam in zip(requests, beams, strict=True)]
        best = on_host(self.levels.run(starts))
        return [best[: beam.levels, :, i] for i, beam in enumerate(beams)]

    def _start(self, slot: int, tokens: list[int], beam: Beam) -> Start:
        s = self._slots[slot]
        assert s.own is not None, "levels follow a row"
        self._grow(s, s.length - 1 + beam.width * beam.levels)
        return Start(s.row, s.length - 1, s.own, tokens, beam)

    def first_guesses(self, text: list[int], hidden: dict[int, Tensor], count: int) -> dict[int, int]:
        slot = self.acquire()
        self.observe(slot, hidden)
        (rows,) = self.score([Score(self, slot, text[:-1], count)])
        self.release(slot)
        return dict(zip(range(len(text) - count, len(text)), rows.logits.argmax(-1).tolist(), strict=True))

    def _states_of_parents(self, s: _Slot, r: Score) -> States:
        """Of the tokens before those of a tree: all are the head's own, the first that of the last token before it."""
        if s.own is None or len(s.own) + len(r.tokens) != len(r.parents) + 1 or r.logits_to_keep != len(r.tokens):
            raise SemspecError("a draft head reads a tree after the context, level by level, with a row for each token")
        return States(s.own, tuple(parent + 1 for parent in r.parents[-len(r.tokens) :]))

    def _states(self, s: _Slot, start: int, count: int) -> States:
        """Of the tokens from `start` on: the target's, and after its last the head's own."""
        given = s.states[start : min(start + count, s.known)]
        missing = count - len(given)
        if not missing:
            return States(given)
        if missing > 1 or s.own is None:
            raise SemspecError(f"a draft head was asked to read {missing} tokens without the target's states")
        return States(torch.cat([given, s.own]) if len(given) else s.own)
