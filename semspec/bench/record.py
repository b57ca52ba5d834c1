"""A runner that writes down every pass it makes, so that the same passes can be made again on other models."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from semspec.types import Decode, DecodeOutput, Runner, Score, ScoreOutput

Pass = tuple[str, str, Sequence[tuple[int, ...]]]
"""Model, "score" or "roll", and for each sequence: tokens fed, tokens in its slot before, rows kept or written; for a
roll also how many it was allowed to write, whether it kept what each was drawn from, and whether it was greedy."""


class Recorder:
    """See types.Runner. Everything is done by the runner inside."""

    def __init__(self, runner: Runner, name: str, passes: list[Pass]) -> None:
        self.inner, self.name, self.passes = runner, name, passes
        self.vocab, self.capacity, self.depth = runner.vocab, runner.capacity, runner.depth

    @property
    def device(self) -> torch.device:
        return self.inner.device

    @property
    def free(self) -> int:
        return self.inner.free

    def acquire(self) -> int:
        return self.inner.acquire()

    def release(self, slot: int) -> None:
        self.inner.release(slot)

    def length(self, slot: int) -> int:
        return self.inner.length(slot)

    def truncate(self, slot: int, length: int) -> None:
        self.inner.truncate(slot, length)

    def score(self, requests: Sequence[Score]) -> list[ScoreOutput]:
        self.passes.append((self.name, "score", [(len(r.tokens), self.length(r.slot), r.keep) for r in requests]))
        return self.inner.score(requests)

    def decode(self, requests: Sequence[Decode]) -> list[DecodeOutput]:
        before = [self.length(r.slot) for r in requests]
        rolled = self.inner.decode(requests)
        rows = [
            (len(r.tokens), b, len(o.tokens), r.n, int(r.keep_logits), int(r.sampling.greedy))
            for r, b, o in zip(requests, before, rolled, strict=True)
        ]
        self.passes.append((self.name, "roll", rows))
        return rolled
