"""Which rows of a packed pass its requests want: logits of each one's last tokens, states perhaps of more."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from semspec.model.attention_metadata import SequenceChunk
from semspec.types import Score, ScoreOutput


def chunks_of(requests: Sequence[Score], starts: Sequence[int]) -> list[SequenceChunk]:
    return [SequenceChunk(r.slot, start, len(r.tokens), r.parents) for r, start in zip(requests, starts, strict=True)]


def last_rows(requests: Sequence[Score]) -> tuple[list[int], list[int]]:
    """Rows of the pass whose logits are wanted, and rows whose states are; mostly the same."""
    wanted, observed, row = list[int](), list[int](), 0
    for r in requests:
        row += len(r.tokens)
        wanted += range(row - r.logits_to_keep, row)
        observed += range(row - r.kept_states, row)
    return wanted, observed


def split_rows(requests: Sequence[Score], logits: Tensor, hidden: dict[int, Tensor]) -> list[ScoreOutput]:
    """Each request's part of these rows."""
    rows = logits.split([r.logits_to_keep for r in requests])
    states = {layer: h.split([r.kept_states for r in requests]) for layer, h in hidden.items()}
    return outputs_of(requests, rows, states)


def copied_rows(padded: Tensor, spans: Sequence[tuple[int, int]]) -> Sequence[Tensor]:
    """Rows [n, ...] from here to there of each sequence of a padded pass [B, Q, ...], as the next pass writes where
    they lie: one copy of what any of them wants."""
    first, last = min(begin for begin, _ in spans), max(end for _, end in spans)
    copy = padded[: len(spans), first:last].clone().flatten(0, 1)
    return copy.split([size for a, b in spans for size in (a - first, b - a, last - b)])[1::3]


def outputs_of(
    requests: Sequence[Score], rows: Sequence[Tensor], states: Mapping[int, Sequence[Tensor]]
) -> list[ScoreOutput]:
    """Logits, and states by layer, of each."""
    return [
        ScoreOutput(rows[i], {layer: states[layer][i] for layer in r.layers} if r.layers else {})
        for i, r in enumerate(requests)
    ]


def prefill(r: Score, count: int) -> Score:
    """The first tokens of a request, in a pass before the rest: no logits, and states only of those that want them."""
    states = max(0, r.states - (len(r.tokens) - count))
    return replace(
        r, tokens=r.tokens[:count], parents=(), logits_to_keep=0, states=states, layers=r.layers if states else ()
    )


def first(r: Score, count: int) -> Score:
    """The first tokens of a request, in a pass of their own, with those of its rows that are theirs."""
    after = len(r.tokens) - count
    keep, states = max(0, r.logits_to_keep - after), max(0, r.states - after)
    return replace(r, tokens=r.tokens[:count], parents=(), logits_to_keep=keep, states=states)


def rest(r: Score, count: int) -> Score:
    tokens = r.tokens[count:]
    return replace(
        r, tokens=tokens, logits_to_keep=min(r.logits_to_keep, len(tokens)), states=min(r.states, len(tokens))
    )


def after_prefill(
    before: Sequence[Score], read: Sequence[ScoreOutput], requests: Sequence[Score], rows: Sequence[ScoreOutput]
) -> list[ScoreOutput]:
    """What the requests get if some of their tokens were read in a pass before, whose states are theirs too."""
    states = {r.slot: part.hidden for r, part in zip(before, read, strict=True)}
    return [after(states.get(r.slot), row) for r, row in zip(requests, rows, strict=True)]


def after(states: dict[int, Tensor] | None, row: ScoreOutput) -> ScoreOutput:
    """This row with the states of earlier tokens before its own, if there are any."""
    if not states:
        return row
    hidden = {i: torch.cat([h, row.hidden[i]]) if i in row.hidden else h for i, h in states.items()}
    return replace(row, hidden=hidden)
