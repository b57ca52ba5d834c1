"""What the target itself thinks of a text that some arm wrote: its log-probabilities, from one scoring pass."""

from __future__ import annotations

from collections.abc import Sequence
from math import fsum

import torch

from semspec.loop.executor import Executor
from semspec.types import Acquire, Runner, Score, ScoreOutput, SequenceGenerator

PIECE = 128  # tokens whose logits are in memory at a time
Texts = Sequence[tuple[list[int], list[int]]]  # prompts and what was written after them, in the target's tokens
Likelihood = dict[str, float | int | None]


def likelihoods(target: Runner, texts: Texts, temperature: float) -> list[list[tuple[float, float]]]:
    """For each text, each token's log-probability at temperature 1 and at this one (at 0: at 1 again). Filters such as
    top_p are left out: a token that they forbid would make a whole text impossible."""
    found: list[list[tuple[float, float]]] = [[] for _ in texts]
    Executor().run_all(
        _score(target, prompt, written, temperature or 1.0, rows)
        for (prompt, written), rows in zip(texts, found, strict=True)
        if prompt and written
    )
    return found


def _score(
    target: Runner, prompt: list[int], written: list[int], temperature: float, rows: list[tuple[float, float]]
) -> SequenceGenerator:
    (slot,) = yield Acquire([target], [prompt])
    try:
        fed = prompt
        for begin in range(0, len(written), PIECE):
            piece = written[begin : begin + PIECE]
            after: ScoreOutput = yield Score(target, slot, fed + piece[:-1], logits_to_keep=len(piece))
            logits, tokens = after.logits.float(), torch.tensor(piece, device=after.logits.device)[:, None]
            both = [torch.log_softmax(logits / t, -1).gather(1, tokens)[:, 0].tolist() for t in (1.0, temperature)]
            rows += zip(*both, strict=True)
            fed = piece[-1:]
    finally:
        target.release(slot)


def summed_up(rows: Sequence[tuple[float, float]]) -> Likelihood | None:
    """Means in nats per token, and the least likely token."""
    if not rows:
        return None
    ones, requests = zip(*rows, strict=True)
    return {
        "one": fsum(ones) / len(rows),
        "request": fsum(requests) / len(rows),
        "lowest": min(ones),
        "tokens": len(rows),
    }
