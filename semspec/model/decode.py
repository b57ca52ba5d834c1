"""Decoding by scoring one token at a time: for runners and requests that have nothing faster."""

from __future__ import annotations

from collections.abc import Sequence

from semspec.errors import ModelError
from semspec.sampling.draw import next_tokens
from semspec.types import Decode, DecodeOutput, Runner, Score


def decode_by_score(runner: Runner, requests: Sequence[Decode]) -> list[DecodeOutput]:
    """All sequences decode in lock step; one that has stopped or has enough tokens leaves the batch."""
    written: list[list[DecodeOutput]] = [[] for _ in requests]
    live = [(i, r, r.tokens) for i, r in enumerate(requests)]
    while live:
        rows = runner.score([Score(runner, r.slot, feed, 1, r.layers) for _, r, feed in live])
        going = []
        for one, row, (i, r, _) in zip(next_tokens([r for _, r, _ in live], rows), rows, live, strict=True):
            written[i].append(one)
            if len(written[i]) < r.n and one.tokens[0] not in r.stop:
                going.append((i, r, one.tokens))
            else:
                refuse_nan(bool(row.logits.isnan().any()))
        live = going
    return [DecodeOutput.join(parts) for parts in written]


def refuse_nan(found: bool) -> None:
    """NaN in the cache makes all later logits NaN: to check the last ones of a decode is enough."""
    if found:
        raise ModelError(
            "the model's logits are NaN: its weights are damaged, or their dtype is too narrow; load it in bfloat16 or "
            "float32"
        )
