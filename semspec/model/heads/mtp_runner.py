"""The runner of an MTP layer: pairs and states are those of an EAGLE head, keys and values lie in transformers' caches,
and each sequence has a pass of its own, a layer long."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from semspec.model.attention_metadata import SequenceChunk
from semspec.model.heads.graphs import States
from semspec.model.heads.mtp import MtpHead
from semspec.model.heads.runner import HeadRunner
from semspec.model.past import Past


class MtpRunner(HeadRunner):
    head: MtpHead
    trees = False

    def __init__(self, head: MtpHead, vocab: int, capacity: int, layers: tuple[int, ...] | None = None) -> None:
        super().__init__(head, vocab, capacity, layers)
        self._pasts: dict[int, Past] = {}

    def acquire(self, prompt: Sequence[int] = (), salt: str = "") -> int:
        slot = super().acquire(prompt)
        self._pasts[slot] = Past(self.head.cache_config)
        return slot

    def release(self, slot: int) -> None:
        super().release(slot)
        del self._pasts[slot]

    def _make_room(self, s: object, pairs: int, more: int) -> None:
        pass

    def _forward(
        self, tokens: list[list[int]], states: list[States], chunks: list[SequenceChunk], keeps: list[int]
    ) -> Iterator[tuple[Tensor, Tensor]]:
        for own, state, chunk, keep in zip(tokens, states, chunks, keeps, strict=True):
            past = self._pasts[chunk.slot]
            past.keep(slice(chunk.start))
            ids = torch.tensor(own, device=self.device)
            logits, output = self.head.forward(ids, state.picked(), chunk.start, past.cache, keep)
            yield logits[:, : self.vocab_size], output
