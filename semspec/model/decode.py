"""Writing autoregressively by scoring one token at a time: how any runner rolls that has nothing faster."""

from __future__ import annotations

from collections.abc import Sequence

from semspec.sampling.draw import next_tokens
from semspec.types import Decode, DecodeOutput, Runner, Score


def decode_by_score(runner: Runner, requests: Sequence[Decode]) -> list[DecodeOutput]:
    """All sequences write in lock step; one that has stopped or has enough leaves the batch."""
    written: list[list[DecodeOutput]] = [[] for _ in requests]
    live = [(i, r, r.tokens) for i, r in enumerate(requests)]
    while live:
        rows = runner.score([Score(runner, r.slot, feed, 1, r.layers) for _, r, feed in live])
        going = []
        for one, (i, r, _) in zip(next_tokens([r for _, r, _ in live], rows), live, strict=True):
            written[i].append(one)
            if len(written[i]) < r.n and one.tokens[0] >= 0 and one.tokens[0] not in r.stop:
                going.append((i, r, one.tokens))
        live = going
    return [DecodeOutput.join(parts) for parts in written]
