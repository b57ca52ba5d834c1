"""A runner that generates only some tokens: the others have no probability, and the rest is renormalised."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from semspec.model.decode import decode_by_score
from semspec.model.wrapper import RunnerWrapper
from semspec.types import Decode, DecodeOutput, Runner, Score, ScoreOutput


class RestrictedRunner(RunnerWrapper):
    """Slots are those of the runner inside. Tokens are drawn one pass at a time: the mask comes before any filter."""

    def __init__(self, runner: Runner, allowed: Tensor) -> None:
        super().__init__(runner)
        self._forbidden = torch.ones(runner.vocab_size, dtype=torch.bool)
        self._forbidden[allowed[allowed < runner.vocab_size]] = False
        self._forbidden = self._forbidden.to(runner.device)

    def score(self, requests: Sequence[Score]) -> list[ScoreOutput]:
        rows = self.inner.score([replace(request, runner=self.inner) for request in requests])
        return [ScoreOutput(row.logits.masked_fill(self._forbidden, -torch.inf), row.hidden) for row in rows]

    def decode(self, requests: Sequence[Decode]) -> list[DecodeOutput]:
        return decode_by_score(self, requests)
