"""The runner of a block head: the first guess after the target's last state fills a block, and the rest are looked up.

The rows of a block do not depend on the tokens drawn from earlier rows, so drawing them one by one costs no pass, nor
does a tree, as in DDTree: what follows a token depends on its place in the block alone.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from semspec.errors import SemspecError
from semspec.model.attention_metadata import SequenceChunk
from semspec.model.heads.block import BlockHead
from semspec.model.heads.runner import StateRunner
from semspec.model.placement import on_its_device
from semspec.tree import depths
from semspec.types import Score, ScoreOutput

PLACES = 24  # of a text at which guesses are compared: each is a pass


class BlockRunner(StateRunner):
    head: BlockHead
    trees = True

    @property
    def longest(self) -> int:
        """Tokens of a draft."""
        return self.head.config.block - 1

    @on_its_device
    @torch.inference_mode()
    def score(self, requests: Sequence[Score]) -> list[ScoreOutput]:
        slots = [self._slots[r.slot] for r in requests]
        self._combine(slots)
        self._read(requests)
        pairs = zip(requests, slots, strict=True)
        begin = [(r, s) for r, s in pairs if r.logits_to_keep and s.length + len(r.tokens) == s.known + 1]
        if begin:
            for _, s in begin:
                self._grow(s, s.known + self.head.config.block)
            chunks = [SequenceChunk(r.slot, s.known, self.head.config.block) for r, s in begin]
            tokens = torch.tensor([r.tokens[-1] for r, _ in begin], device=self.device)
            for (_, s), rows in zip(begin, self.head.fill(tokens, chunks, self), strict=True):
                s.own = rows
        outputs = []
        for r, s in zip(requests, slots, strict=True):
            s.length += len(r.tokens)
            outputs.append(ScoreOutput(self._rows(r, s.own, s.length - s.known - 1)))
        return outputs

    def _rows(self, r: Score, block: Tensor | None, begun: int) -> Tensor:
        """What follows each token of a tree, or the last of a chain, after so many tokens of the block."""
        if not r.logits_to_keep:
            return torch.empty(0, self.vocab_size, device=self.device)
        places = [1 + depth for depth in depths(r.parents)[-len(r.tokens) :]] if r.parents else [begun]
        have = 0 if block is None else len(block)
        if len(places) != r.logits_to_keep or block is None or not 0 <= min(places) <= max(places) < have:
            raise SemspecError(f"a block head was asked for token {max(places) + 1} of a block of {self.longest}")
        return block[places, : self.vocab_size]

    def _read(self, requests: Sequence[Score]) -> None:
        """Keys and values of all states that are new, with one pass for all sequences."""
        new = [(r.slot, s) for r in requests if (s := self._slots[r.slot]).read < s.known]
        if new:
            chunks = [SequenceChunk(slot, s.read, s.known - s.read) for slot, s in new]
            self.head.read(torch.cat([s.states[s.read : s.known] for _, s in new]), chunks, self)
            for _, s in new:
                s.read = s.known

    def first_guesses(self, text: list[int], hidden: dict[int, Tensor], count: int) -> dict[int, int]:
        guesses, slot, seen = dict[int, int](), self.acquire(), 0
        for i in range(len(text) - count, len(text), max(1, count // PLACES)):
            if seen:
                self.truncate(slot, self.length(slot))
            self.observe(slot, {layer: states[seen : i - 1] for layer, states in hidden.items()})
            seen = i - 1
            (rows,) = self.score([Score(self, slot, text[self.length(slot) : i], 1)])
            guesses[i] = int(rows.logits[0].argmax())
        self.release(slot)
        return guesses
