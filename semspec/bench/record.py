"""A runner that writes down every pass it makes, so that the same passes can be made again on other models."""

from __future__ import annotations

from collections.abc import Sequence

from semspec.model.wrapper import RunnerWrapper
from semspec.types import Decode, DecodeOutput, Runner, Score, ScoreOutput

Pass = tuple[str, str, Sequence[tuple[int, ...]]]
"""Model, "score" or "roll", and for each sequence: tokens fed, tokens in its slot before, rows kept or written; for a
roll also how many it was allowed to write, whether it kept what each was drawn from, and whether it was greedy."""


class Recorder(RunnerWrapper):
    def __init__(self, runner: Runner, name: str, passes: list[Pass]) -> None:
        super().__init__(runner)
        self.name, self.passes = name, passes

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
