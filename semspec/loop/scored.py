"""Passes with what their requests want besides the rows, and the levels of trees, made in one call."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from semspec.sampling.draw import add_likeliest
from semspec.types import Grow, Runner, Score, ScoreOutput

NO_ROWS = torch.empty(0)


def score(runner: Runner, requests: Sequence[Score]) -> list[ScoreOutput]:
    rows = runner.score(requests)
    add_likeliest(requests, rows)
    return rows


def grow(runner: Runner, requests: Sequence[Grow], most: int) -> None:
    """All trees in lock step: a pass for each level, of at most so many tokens."""
    if (found := runner.grow(requests)) is not None:
        for r, made in zip(requests, found, strict=True):
            tokens = r.tokens
            for best in made:
                if tokens:
                    tokens, _ = r.growth.add(ScoreOutput(NO_ROWS, best=best[:, : len(tokens)]))
        return
    levels = [(r, r.tokens, [-1] * len(r.tokens)) for r in requests]  # what is fed next, and the parents of all fed
    while levels:
        scores = [
            Score(runner, r.slot, tokens, len(tokens), drafting=True, parents=tuple(fed), best=r.growth.best)
            for r, tokens, fed in levels
        ]
        rows = [row for part in _parts(scores, most) for row in score(runner, part)]
        following = []
        for (r, _, fed), row in zip(levels, rows, strict=True):
            tokens, parents = r.growth.add(row)
            if tokens:
                following.append((r, tokens, fed + parents))
        levels = following


def _parts(scores: Sequence[Score], most: int) -> list[list[Score]]:
    parts, left = [list[Score]()], most
    for one in scores:
        if parts[-1] and len(one.tokens) > left:
            parts.append([])
            left = most
        parts[-1].append(one)
        left -= len(one.tokens)
    return parts
