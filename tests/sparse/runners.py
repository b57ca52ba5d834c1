"""Small runners with plans, and ways of asking them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from semspec.model import ModelRunner
from semspec.sparse import SparsePlan, apply
from semspec.types import Score
from tests.checkpoints import VOCAB


def text(seed: int, length: int) -> list[int]:
    return torch.randint(VOCAB, [length], generator=torch.Generator().manual_seed(seed)).tolist()


def with_plan(runner: ModelRunner, slots: int = 4, **parts: Any) -> ModelRunner:
    """The same weights in a runner of its own."""
    twin = ModelRunner(runner.transformer, slots, runner.max_seq_len)
    apply(SparsePlan(**parts), twin)
    return twin


def check(runner: ModelRunner, slot: int, tokens: list[int]) -> Tensor:
    return runner.score([Score(runner, slot, tokens, len(tokens))])[0].logits


def read(runner: ModelRunner, slot: int, tokens: list[int]) -> None:
    runner.score([Score(runner, slot, tokens, 0)])


def course(runner: ModelRunner, seed: int = 0, prompt: int = 200, rounds: int = 5) -> list[Tensor]:
    """A prompt, and drafts of which some are taken back; the logits of every check."""
    slot, found, words = runner.acquire(), [], text(seed, 4000)
    read(runner, slot, words[:prompt])
    for i in range(rounds):
        found.append(check(runner, slot, words[1000 + 20 * i :][: 4 + i]))
        runner.truncate(slot, runner.length(slot) - i % 3)
    runner.release(slot)
    return found


def load(folder: Path, context: int = 512) -> ModelRunner:
    return ModelRunner.load(folder, device="cpu", slots=4, context=context)
