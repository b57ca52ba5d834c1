"""From requests to a batch of drafts, and from a rule's decisions to verdicts: one copy to the device, one back.

What depends on values is apart from what depends on sizes (`Layout`), so that a batch can also be made of memory at
fixed addresses, with more room than its drafts need: tokens that are none, and rows that belong to nobody.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from semspec.sampling import noise
from semspec.sampling.copies import to_device
from semspec.sampling.draw import SamplingRows, SamplingUse, columns_of
from semspec.tree import paths
from semspec.types import Verdict, VerifyRequest
from semspec.verify.batch import Decisions, DraftBatch
from semspec.verify.trees import DraftTrees

Array = np.ndarray[Any, Any]
RATING_SCALE = 1_000_000  # ratings travel as whole numbers, with the other columns
NUMBERS = 9  # count, first row, first draft row, seed, position, round, whole, valid, rating
PAD = (1.0, 0.0, 1.0, 0.0)  # sampling options of a row that belongs to nobody
# A batch's big tensors: logits of both models, states of a rule, and hidden states by model and layer.
Part = Literal["target", "draft", "state"] | tuple[Literal["target", "draft"], int]


@dataclass(frozen=True, slots=True)
class Layout:
    """Sizes of a batch. All that a rule depends on, but for values and the kinds of its tensors."""

    sequences: int  # B; steps of one draft count each
    tokens: int  # K
    rows: int  # R
    draft_rows: int  # D
    own: int | None  # the draft models' own tokens, if another tokenizer is in it; None: the same
    use: SamplingUse

    @staticmethod
    def of(requests: Sequence[VerifyRequest]) -> Layout:
        segments = [(r.draft, begin, end) for r in requests for begin, end in r.draft.segments]
        own = None
        if any(r.draft.own is not None for r in requests):
            own = max(draft.own_count(end) - draft.own_count(begin) for draft, begin, end in segments)
        return Layout(
            sequences=len(segments),
            tokens=max(end - begin for _, begin, end in segments),
            rows=sum(map(num_rows, requests)),
            draft_rows=sum(len(r.draft.own_tokens) for r in requests),
            own=own,
            use=SamplingUse.of([r.sampling for r in requests]),
        )

    @property
    def width(self) -> int:
        """Of a table of numbers."""
        return self.tokens + NUMBERS + (0 if self.own is None else self.own + self.tokens)


def collate(requests: Sequence[VerifyRequest], parts: Mapping[Part, list[Tensor]] | None = None) -> DraftBatch:
    """Batch the drafts of several sequences. They share rule and protected tokens; draft logits: all or none. `parts`
    are their `tensor_parts`, if those have been made already.

    A draft of several reasoning steps becomes several drafts, one after the other: the row that predicts a step's first
    token is the bonus row of the step before. So do candidates for one step, each with the row after the context before
    its own. `join_segments` joins their verdicts again."""
    layout, device = Layout.of(requests), requests[0].rows.logits.device
    numbers, columns = (to_device(table, device) for table in tables(requests, layout))
    tensors = {name: torch.cat(own) for name, own in (parts or tensor_parts(requests)).items()}
    batch = assemble(layout, numbers, columns, tensors, requests[0].protected)
    if any(trees := [() if r.draft.is_candidates else r.draft.parents for r in requests]):
        batch.trees = DraftTrees.of(trees, layout.tokens, device)
    return batch


def num_rows(request: VerifyRequest) -> int:
    """Of the target's logits, in a batch."""
    draft, own = request.draft, request.rows.logits.shape[0]
    return own + len(draft.segments) - 1 if draft.is_candidates else own


def tables(requests: Sequence[VerifyRequest], layout: Layout) -> tuple[Array, Array]:
    """What the host knows: numbers of each sequence [B, W], and sampling options of each row [R, 4]."""
    table, row, draft_row = list[list[int]](), 0, 0
    for r in requests:
        draft, steps = r.draft, r.draft.steps
        for i, (begin, end) in enumerate(draft.segments):
            padded = draft.tokens[begin:end] + [-1] * (layout.tokens - (end - begin))
            first = draft.own_count(begin)
            before, candidate = (0, i) if draft.is_candidates else (begin, 0)
            numbers = [end - begin, row + begin + candidate, draft_row + first, r.sampling.seed, r.position + before]
            numbers.append(noise.round_of(r.round, candidate))
            rating = round(RATING_SCALE * sum(steps.self_ratings[i : i + 1]))
            numbers += [i < len(steps.ends), any(steps.valid[i : i + 1]), rating]
            if layout.own is not None:
                own = draft.own_tokens[first : draft.own_count(end)]
                ends = [draft.own_count(i + 1) - first for i in range(begin, end)]
                numbers += own + [-1] * (layout.own - len(own)) + ends + [0] * (layout.tokens - len(ends))
            table.append(padded + numbers)
        row, draft_row = row + num_rows(r), draft_row + len(draft.own_tokens)
    heights = [num_rows(r) for r in requests]
    columns = columns_of([r.sampling for r in requests], heights, layout.use)
    if len(columns) and layout.rows > len(columns):
        columns = np.concatenate([columns, np.full((layout.rows - len(columns), 4), PAD, np.float32)])
    return np.array(table, np.int64), columns


def tensor_parts(requests: Sequence[VerifyRequest]) -> dict[Part, list[Tensor]]:
    """The big tensors, in the parts that each sequence has."""
    device = requests[0].rows.logits.device
    parts: dict[Part, list[Tensor]] = {"target": [_by_candidate(r, _logits(r)) for r in requests]}
    if requests[0].draft.logits is not None:
        parts["draft"] = [r.draft.logits.to(device) for r in requests if r.draft.logits is not None]
    if states := [r.state[None] for r in requests for _ in r.draft.segments if r.state is not None]:
        parts["state"] = states
    for layer in requests[0].rows.hidden:
        parts["target", layer] = [_by_candidate(r, r.rows.hidden[layer]).to(device) for r in requests]
    for layer in requests[0].draft.hidden:
        parts["draft", layer] = [r.draft.hidden[layer].to(device) for r in requests]
    return parts


def _by_candidate(r: VerifyRequest, rows: Tensor) -> Tensor:
    """The target's rows as chains have them: before those of each candidate the one that all of them follow."""
    if not r.draft.is_candidates:
        return rows
    return torch.cat([part for begin, end in r.draft.segments for part in (rows[:1], rows[begin + 1 : end + 1])])


def _logits(r: VerifyRequest) -> Tensor:
    if r.history is None:
        return r.rows.logits
    if not r.draft.parents:
        return r.history.apply(r.rows.logits, r.draft.tokens)
    made = r.rows.logits.float().clone()
    for path in paths(r.draft.parents):
        rows = [0, *(i + 1 for i in path)]
        made[rows] = r.history.apply(r.rows.logits[rows], [r.draft.tokens[i] for i in path])
    return made


def assemble(
    layout: Layout, numbers: Tensor, columns: Tensor, tensors: Mapping[Part, Tensor], protected: Tensor | None
) -> DraftBatch:
    """A batch of `tables` and big tensors that are on the device."""
    ids, rest = numbers[:, : layout.tokens], numbers[:, layout.tokens :]
    counts, first_row, first_draft, seed, position, round, whole, valid, rating = rest[:, :NUMBERS].unbind(1)
    own = None if layout.own is None else rest[:, NUMBERS:].split([layout.own, layout.tokens], 1)
    return DraftBatch(
        ids=ids,
        counts=counts,
        target_logits=tensors["target"],
        first_row=first_row,
        draft_logits=tensors.get("draft"),
        first_draft=first_draft,
        target_sampling=SamplingRows(columns, layout.use),
        seed=seed,
        position=position,
        round=round,
        state=tensors.get("state"),
        protected=protected,
        hidden=_hidden(tensors, "target"),
        draft_hidden=_hidden(tensors, "draft"),
        whole=whole > 0,
        valid=valid > 0,
        self_ratings=rating / RATING_SCALE,
        own_ids=own and own[0],
        own_ends=own and own[1],
    )


def _hidden(tensors: Mapping[Part, Tensor], model: str) -> dict[int, Tensor] | None:
    return {name[1]: t for name, t in tensors.items() if isinstance(name, tuple) and name[0] == model} or None


def join_segments(parts: Sequence[Verdict], requests: Sequence[VerifyRequest]) -> list[Verdict]:
    """From verdicts on the segments of drafts to one verdict per draft."""
    whole, taken = [], 0
    for request in requests:
        segments = request.draft.segments
        own, taken = parts[taken : taken + len(segments)], taken + len(segments)
        if request.draft.is_candidates:
            whole.append(Verdict.best(own, [begin for begin, _ in segments]))
        else:
            whole.append(Verdict.join(own, [end - begin for begin, end in segments]))
    return whole


@dataclass(slots=True)
class Packed:
    """Decisions as one table [B, W], which one copy brings to the host; evidence as the bits of its floats."""

    table: Tensor
    widths: list[int]  # of accepted, next and last, relaxed, target tokens, evidence, worth
    evidence: int  # numbers for each token
    state: Tensor | None

    @staticmethod
    def of(d: Decisions) -> Packed:
        empty = d.accepted.new_empty(len(d.accepted), 0)
        parts = [
            torch.stack([d.accepted, d.next, torch.full_like(d.next, -1) if d.last is None else d.last], 1),
            empty if d.relaxed is None else d.relaxed.long(),
            empty if d.target_tokens is None else d.target_tokens,
            empty if d.evidence is None else d.evidence.contiguous().view(torch.int32).long().flatten(1),
            empty if d.worth is None else d.worth.contiguous().view(torch.int32).long()[:, None],
        ]
        each = 0 if d.evidence is None else d.evidence.shape[-1]
        return Packed(torch.cat(parts, 1), [part.shape[1] for part in parts], each, d.state)

    def verdicts(self) -> list[Verdict]:
        heads, marks, choices, bits, worths = self.table.cpu().split(self.widths, 1)
        evidence = bits.int().view(torch.float32).view(len(bits), -1, self.evidence).tolist() if self.evidence else None
        worth = worths.int().view(torch.float32)[:, 0].tolist() if self.widths[-1] else None
        found = []
        lists = zip(heads.tolist(), marks.tolist(), choices.tolist(), strict=True)
        for b, ((accepted, next_token, last), row, choice) in enumerate(lists):
            at = tuple(i for i, mark in enumerate(row[:accepted]) if mark)
            found.append(
                Verdict(
                    accepted,
                    next_token,
                    relaxed=at,
                    target_tokens=tuple(choice[i] for i in at) if choice else (),
                    evidence=tuple(tuple(evidence[b][i]) for i in at) if evidence else (),
                    state=None if self.state is None else self.state[b],
                    last=last,
                    worth=worth[b] if worth else -math.inf,
                )
            )
        return found


def verdicts(decisions: Decisions) -> list[Verdict]:
    """Copy decisions to the host, the one copy per round."""
    return Packed.of(decisions).verdicts()
