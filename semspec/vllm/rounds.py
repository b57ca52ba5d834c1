"""One step of vLLM: the drafts of all requests, each verified by its own rule, by the same `Rule.verify` as elsewhere.

A rule's decisions become logits that leave no choice: the tokens it accepts, and the token it puts after them, are
raised above all others. vLLM's sampler then accepts, rejects and counts as the rule decided, greedy or sampled,
whatever proposed the draft. Requests without a rule are not touched. Nothing here waits for the device, and nothing
depends on a clock or on the rank: with tensor parallelism every rank decides by itself, and all must decide alike.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from semspec.errors import BadRequest
from semspec.loop.thinking import Thinking
from semspec.pair.resources import Resources
from semspec.sampling.draw import SamplingRows
from semspec.text.tokenizer import opens_thinking
from semspec.types import Sampling
from semspec.verify.base import Rule
from semspec.verify.batch import DraftBatch
from semspec.vllm.monitor import Monitor
from semspec.vllm.request import Choice

RAISED = 1e9  # above any logit, and finite at any temperature


@dataclass
class EngineStep:
    """vLLM's rows for B requests. A request's row i predicts the token fed at its row i + 1."""

    slots: list[int]  # where vLLM keeps each request
    logits: Tensor  # [R, V] float32, changed in place
    first_row: Tensor  # [B]
    counts: Tensor  # [B] draft tokens
    ids: Tensor  # [B, K] draft tokens; anything after them
    position: Tensor  # [B] index in its sequence of the first draft token
    tokens_at: Callable[[Tensor, Tensor], Tensor]  # batch places [B'], indices [B', n] -> committed tokens
    reading: frozenset[int] = frozenset()  # batch places that still read their prompt, and have no draft
    lengths: Sequence[int] = ()  # of texts, at most; where they are not known, nobody leaves a slot and comes back
    gaps: bool = False  # tokens of steps without any draft are committed without our being asked
    draft_logits: Tensor | None = None  # [D, V] as DraftBatch wants them
    first_draft: Tensor | None = None  # [B]


@dataclass
class LossyRequest:
    """A request with a rule of ours."""

    rule: Rule
    choice: Choice
    sampling: Sampling
    prompt: int  # tokens
    round: int = 0
    state: Tensor | None = None
    exact_only: bool = False  # it repeats itself, and vLLM's own sampler has taken over
    followed: bool = False  # its markers of thinking are followed
    length: int = 0  # tokens of its text, at most
    resumed: int = 0  # tokens it came with, if it had to leave its slot before; 0 once that is settled
    text: Tensor | None = None  # on leaving its slot
    seeded: bool = False  # by the client

    def same_request(self, other: LossyRequest) -> bool:
        """As far as what was asked for tells."""
        seed = other.sampling.seed if not self.seeded else self.sampling.seed
        asked = (self.choice, self.prompt, self.seeded, replace(self.sampling, seed=seed))
        return asked == (other.choice, other.prompt, other.seeded, other.sampling)


class Rounds:
    def __init__(
        self, resources: Resources, slots: int, draft_tokens: int, reports: bool = True,
        text_in: Callable[[int], Tensor] | None = None,
    ) -> None:  # fmt: skip
        """`reports`: this rank counts; the others would count the same again. `text_in`: the tokens in a slot, until
        another request's are written there; for engines that let requests leave their slots."""
        device = resources.target.device
        self.resources, self.draft_tokens = resources, draft_tokens
        self.requests: dict[int, LossyRequest] = {}
        self.relaxed = torch.zeros((), dtype=torch.long, device=device)
        self._serial = 0
        self._text_in = text_in
        self._left: deque[LossyRequest] = deque(maxlen=slots)  # vLLM does not say which of them will come back
        self._open = torch.zeros(slots, dtype=torch.bool, device=device)  # inside the thinking
        self._seen = torch.zeros(slots, dtype=torch.long, device=device)  # committed tokens that this knows of
        self._monitor = Monitor(self.relaxed, reports)

    def begin(
        self, slot: int, choice: Choice | None, params: Callable[[int], Sampling], prompt: int, resumed: int = 0
    ) -> bool:
        """A request enters this slot. Returns whether a rule of ours verifies it. `resumed`: it comes back with so many
        tokens."""
        self.end(slot)
        self._serial += 1
        if choice is None:
            return False
        rule = choice.rule.bind(self.resources).for_draft_length(self.draft_tokens)
        if choice.thinking_only and self.resources.thinking is None:
            raise BadRequest("this model has no markers of thinking, so nothing may be relaxed")
        seeded = params(0).seed == params(1).seed
        self.requests[slot] = LossyRequest(rule, choice, params(self._serial), prompt, resumed=resumed, seeded=seeded)
        return True

    def end(self, slot: int) -> None:
        request = self.requests.pop(slot, None)
        if request is not None and request.length and self._text_in is not None:
            request.text = self._text_in(slot)[: request.length].clone()
            self._left.append(request)

    def _recall(self, step: EngineStep) -> None:
        """A request that had to leave its slot goes on with what its rule knew: a budget is not given twice. vLLM does
        not say which request it was, so what was asked for and its text do; of several, that with the shortest text."""
        gone = [slot for slot in self.requests if slot not in step.slots]  # their slots are not taken yet
        for slot in step.slots:
            request = self.requests.get(slot)
            if request is None or not request.resumed or self._text_in is None:
                continue
            for other in gone:
                self.requests[other].text = self._text_in(other)
            now, length = self._text_in(slot)[: request.resumed], request.resumed
            request.resumed = 0
            known = [
                before
                for before in (*self._left, *(self.requests[other] for other in gone))
                if before.text is not None and before.length >= length and request.same_request(before)
                and torch.equal(before.text[:length], now)
            ]  # fmt: skip
            if known:
                before = min(known, key=lambda one: one.length)
                request.round, request.state, request.exact_only = before.round, before.state, before.exact_only
                request.sampling = before.sampling
                before.text = None  # it has come back: nobody else goes on from it

    def stats(self) -> dict[str, int]:
        """Relaxed tokens, and requests that repeated themselves, since the engine was started."""
        return {"relaxed_tokens": int(self.relaxed), "loops": self._monitor.loops}

    def decide(self, step: EngineStep) -> None:
        groups: dict[tuple[Rule, bool], list[int]] = {}
        self._recall(step)
        for slot, length in zip(step.slots, step.lengths, strict=False):
            if slot in self.requests:
                self.requests[slot].length = length
        for place, slot in enumerate(step.slots):
            request = self.requests.get(slot)
            if request is None or request.exact_only or place in step.reading:
                continue
            if step.draft_logits is not None or not request.rule.needs_draft_logits:
                groups.setdefault((request.rule, request.state is None), []).append(place)
        for (rule, _), places in groups.items():
            self._decide(step, rule, places)
        self._monitor.look(step, [p for places in groups.values() for p in places], self.requests, self.draft_tokens)

    def _decide(self, step: EngineStep, rule: Rule, places: list[int]) -> None:
        requests = [self.requests[step.slots[p]] for p in places]
        batch, rows, drafted, may = self._batch(step, places, requests)
        decisions = rule.verify(batch)
        accepted = batch.positions < decisions.accepted[:, None]
        tokens = torch.where(accepted, torch.cat([batch.ids, batch.ids[:, :1]], 1), decisions.next[:, None])
        decided = (batch.positions <= decisions.accepted[:, None]) & (tokens >= 0) & may[:, None]
        raised = torch.where(decided, RAISED, float("-inf"))
        flat = (rows * step.logits.shape[1] + tokens.clamp_min(0)).flatten()
        step.logits.view(-1).scatter_reduce_(0, flat, raised.flatten(), "amax")  # a row may be there twice
        if decisions.relaxed is not None:
            self.relaxed += (decisions.relaxed & decided[:, :-1]).sum()
        for i, request in enumerate(requests):
            request.round += 1
            if decisions.state is not None:
                new = decisions.state[i]
                # A round without a draft leaves the state as it was.
                request.state = new if request.state is None else torch.where(drafted[i], new, request.state)

    def _batch(
        self, step: EngineStep, places: list[int], requests: list[LossyRequest]
    ) -> tuple[DraftBatch, Tensor, Tensor, Tensor]:
        """The drafts at these places, their rows [B, K + 1] of the step's logits, which requests have a draft [B] and
        which of them may be decided here [B]."""
        device = step.logits.device
        table = [[p, step.slots[p], r.sampling.seed, r.round] for p, r in zip(places, requests, strict=True)]
        at, slots, seed, rounds = torch.tensor(table).to(device, non_blocking=True).unbind(1)
        first, counts, ids, position = step.first_row[at], step.counts[at], step.ids[at].long(), step.position[at]
        along = torch.arange(ids.shape[1] + 1, device=device)
        rows = first[:, None] + torch.minimum(along, counts[:, None])
        limit, may = counts, torch.ones_like(counts, dtype=torch.bool)
        if any(r.choice.thinking_only for r in requests):
            for place in places:
                self._begin_thinking(step, place)
            limit, may = self._thinking(step, requests, at, slots, ids, counts, position)
        every = len(places) == len(step.slots) and len(step.logits) == rows.numel()
        states = [r.state for r in requests if r.state is not None]
        batch = DraftBatch(
            ids=torch.where(along[:-1] < limit[:, None], ids, -1),
            counts=limit,
            target_logits=step.logits if every else step.logits[rows.flatten()],
            first_row=first if every else torch.arange(len(places), device=device) * rows.shape[1],
            draft_logits=step.draft_logits if requests[0].rule.needs_draft_logits else None,
            first_draft=torch.zeros_like(first) if step.first_draft is None else step.first_draft[at],
            target_sampling=SamplingRows.of([r.sampling for r in requests], [rows.shape[1]] * len(places), device),
            seed=seed,
            position=position,
            round=rounds,
            state=torch.stack(states) if states else None,
            protected=self.resources.protected,
        )
        return batch, rows, counts > 0, may

    def _thinking(
        self,
        step: EngineStep,
        requests: list[LossyRequest],
        at: Tensor,
        slots: Tensor,
        ids: Tensor,
        counts: Tensor,
        position: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """[B] how many draft tokens are verified, and [B] whether any are. Where only the thinking may be relaxed:
        those up to its end, if it is open, as the tokens committed since the last round tell."""
        assert self.resources.thinking is not None
        begin, end = self.resources.thinking
        only = torch.tensor([r.choice.thinking_only for r in requests]).to(ids.device, non_blocking=True)
        width = self.draft_tokens + 1
        if step.gaps:
            width = max(width, int((position - self._seen[slots]).max()))
        back = position[:, None] - 1 - torch.arange(width, device=ids.device)
        tokens = step.tokens_at(at, back.clamp_min(0))
        marks = ((tokens == begin) | (tokens == end)) & (back >= self._seen[slots][:, None])
        last = tokens.gather(1, marks.long().argmax(1, keepdim=True))[:, 0]
        inside = torch.where(marks.any(1), last == begin, self._open[slots])
        self._open[slots], self._seen[slots] = inside, position
        ends = (ids == end) & (torch.arange(ids.shape[1], device=ids.device) < counts[:, None])
        upto = torch.where(ends.any(1), ends.long().argmax(1) + 1, counts)
        return torch.where(only, upto, counts), inside | ~only

    def _begin_thinking(self, step: EngineStep, place: int) -> None:
        """At a request's first round its whole text is read, once: the prompt may end inside the thinking."""
        slot = step.slots[place]
        request = self.requests[slot]
        if request.followed or not request.choice.thinking_only:
            return
        request.followed = True
        markers, length = self.resources.thinking, int(step.position[place])
        assert markers is not None
        where = torch.arange(length, device=step.position.device)[None]
        tokens = step.tokens_at(torch.tensor([place], device=where.device), where)[0].tolist()
        thinking = Thinking(*markers, opens_thinking(self.resources.tokenizer, tokens[: request.prompt], markers))
        thinking.feed(tokens[request.prompt :])
        self._open[slot], self._seen[slot] = thinking.open, length
