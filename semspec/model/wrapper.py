"""Runners around a runner."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from semspec.types import Decode, DecodeOutput, Grow, Handover, Runner, Score, ScoreOutput


class RunnerWrapper:
    """See types.Runner. Passes everything on to the runner inside; subclasses change what they are for."""

    def __init__(self, runner: Runner) -> None:
        self.inner = runner
        self.vocab_size, self.max_seq_len, self.num_layers = runner.vocab_size, runner.max_seq_len, runner.num_layers

    @property
    def trees(self) -> bool:
        return self.inner.trees

    @property
    def hands_over(self) -> bool:
        return self.inner.hands_over

    @property
    def windowed(self) -> bool:
        return self.inner.windowed

    @property
    def device(self) -> torch.device:
        return self.inner.device

    @property
    def free(self) -> int:
        return self.inner.free

    def acquire(self, prompt: Sequence[int] = (), salt: str = "") -> int:
        return self.inner.acquire(prompt, salt)

    def release(self, slot: int) -> None:
        self.inner.release(slot)

    def park(self, slot: int) -> int | None:
        return self.inner.park(slot)

    def length(self, slot: int) -> int:
        return self.inner.length(slot)

    def min_length(self, slot: int) -> int:
        return self.inner.min_length(slot)

    def truncate(self, slot: int, length: int) -> None:
        self.inner.truncate(slot, length)

    def copy(self, source: int, target: int, length: int) -> None:
        self.inner.copy(source, target, length)

    def compact(self, slot: int, start: int, rows: Sequence[int]) -> None:
        self.inner.compact(slot, start, rows)

    def can_admit(self, prompt: Sequence[int], salt: str = "") -> bool:
        return self.inner.can_admit(prompt, salt)

    def lacks_room(self, tokens: Sequence[tuple[int | None, int]], without: Sequence[int] = ()) -> bool:
        return self.inner.lacks_room(tokens, without)

    def preempt(self, slot: int) -> bool:
        return self.inner.preempt(slot)

    def tokens_to_recompute(self, slot: int) -> list[int]:
        return self.inner.tokens_to_recompute(slot)

    def expect(self, request: Score) -> None:
        self.inner.expect(request)

    def score(self, requests: Sequence[Score]) -> list[ScoreOutput]:
        return self.inner.score(requests)

    def decode(self, requests: Sequence[Decode]) -> list[DecodeOutput]:
        return self.inner.decode(requests)

    def begin(self, handovers: Sequence[Handover], drafts: Tensor) -> None:
        self.inner.begin(handovers, drafts)

    def grow(self, requests: Sequence[Grow]) -> list[np.ndarray[Any, Any]] | None:
        return None  # their slots may have to be recomputed first


def unwrap(runner: Any) -> Any:
    """The runner inside all wrappers."""
    return unwrap(runner.inner) if hasattr(runner, "inner") else runner
