"""Writing autoregressively by scoring one token at a time: how any runner rolls that has nothing faster."""

from __future__ import annotations

from collections.abc import Sequence

from semspec.sampling import next_tokens
from semspec.types import Roll, Rolled, Runner, Score


def roll_by_score(runner: Runner, requests: Sequence[Roll]) -> list[Rolled]:
    """All sequences write in lock step; one that has stopped or has enough leaves the batch."""
    written: list[list[Rolled]] = [[] for _ in requests]
    live = [(i, r, r.tokens) for i, r in enumerate(requests)]
    while live:
        rows = runner.score([Score(runner, r.slot, feed, 1, r.layers) for _, r, feed in live])
        going = []
        for one, (i, r, _) in zip(next_tokens([r for _, r, _ in live], rows), live, strict=True):
            written[i].append(one)
            if len(written[i]) < r.n and one.tokens[0] not in r.stop:
                going.append((i, r, one.tokens))
        live = going
    return [Rolled.join(parts) for parts in written]
