"""Several candidates for one reasoning step (`StepRule.candidates`), which the target reads in one pass.

The draft writes one after the other, each from the same context. Where it samples, each has noise of its own; where it
is greedy, the further ones begin with the next likeliest first tokens. Together they are a tree draft of
chains, so there are fewer where they would not fit into a tree, and one alone is a draft like any other. Only whole
steps are judged, each text once: a further candidate that would end the thinking, or finds no room, is dropped. If the
first is no whole step, there are no others.
"""

from __future__ import annotations

import copy
from collections.abc import Generator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from semspec.tree import MAX_TREE
from semspec.types import Draft, Event, Request

if TYPE_CHECKING:
    from semspec.loop.step_decoder import StepDecoder

WHOLE = ("blank line", "length")  # how a step ends that can be judged


def add_candidates(loop: StepDecoder, first: Draft, left: int) -> Generator[Request, Any, Draft]:
    """A draft of the first candidate, a whole step, and of others beside it."""
    rule, context = loop.step_rule, loop.context
    room = min(MAX_TREE, loop.target.max_seq_len - len(context) - 1) - len(first.tokens)
    found = [first]
    if room < len(first.tokens) or not _is_legal(loop, first):
        return first
    greedy = rule.request(1, loop.job.sampling, loop.round).sampling.greedy
    begun = (yield from _first_tokens(loop, first)) if greedy else [Draft([])] * (rule.candidates - 1)
    for number, begin in enumerate(begun, 1):
        if room < min(len(candidate.tokens) for candidate in found):
            break  # one that is shorter than all would be luck
        step, before = copy.copy(loop.step), begin.tokens
        step.feed(before)
        loop.drafter.accept(len(context) + len(before) - 1)  # a model goes on from a token that it is fed
        rest, ending = yield from loop.propose_step(step, before, min(left, room), number)
        candidate = Draft.join([part for part in (begin, rest) if part.tokens])
        same = any(candidate.tokens == other.tokens for other in found)
        if ending in WHOLE and not same and _is_legal(loop, candidate):
            found.append(candidate)
            room -= len(candidate.tokens)
    loop.drafter.accept(len(context) - 1)  # it reads what was accepted when it next proposes
    return Draft.side_by_side(found) if len(found) > 1 else first


def _first_tokens(loop: StepDecoder, first: Draft) -> Generator[Request, Any, list[Draft]]:
    """The draft's likeliest tokens here but the one with which its first candidate begins, the likeliest first."""
    rule = loop.step_rule
    request = replace(rule.request(1, loop.job.sampling, loop.round, loop.steps.stops), keep_logits=True)
    loop.drafter.accept(len(loop.context) - 1)
    one: Draft = yield from loop.propose_from(loop.context, request)
    if one.logits is None:
        return []
    best = one.logits[0].topk(min(rule.candidates, one.logits.shape[-1]))
    ranked = zip(best.indices.tolist(), best.values.tolist(), strict=True)
    logits = one.logits if rule.keeps_draft_logits else None
    others = [token for token, logit in ranked if logit > -torch.inf and token != first.tokens[0]]
    return [Draft([token], logits, one.hidden) for token in others[: rule.candidates - 1]]


def _is_legal(loop: StepDecoder, candidate: Draft) -> bool:
    return len(loop.fit(candidate, loop.step_rule)[0].tokens) == len(candidate.tokens)


def taken_candidate(candidates: list[Draft], event: Event) -> int | None:
    """Which of them was accepted as a whole, if one was. None is another's beginning: a step ends where it ends."""
    written = event.tokens[: event.accepted]
    return next((i for i, candidate in enumerate(candidates) if candidate.tokens == written), None)
