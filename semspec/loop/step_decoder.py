"""The loop of step rules: draft and target alternate in writing whole reasoning steps.

The target writes the first step, or as many as `StepRule.lead` says. Then the draft writes one, or, while it is
confident, several (`StepRule.steps`); the target reads them in one pass, and the rule accepts or rejects each. If all
are accepted, the target adds one token and the draft continues; the first rejected step is written by the target,
starting with its own choice at the step's first token, which the pass has computed already.

A draft model with an early exit (`draft_min_p`, `draft_max_entropy`) stops inside a step. The part it has written is
verified token by token, the target adds the token at which the draft was not confident, and the draft goes on from
there. Only the target may end the thinking: a draft step that would is dropped, or with `keep` verified token by token.
What follows the thinking is written by the target.
"""

from __future__ import annotations

import copy
from collections.abc import Generator, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any, Literal

from semspec.loop.candidates import WHOLE, add_candidates, taken_candidate
from semspec.loop.decoder import DECODE_TOKENS, Decoder, Job
from semspec.loop.stats import Stats
from semspec.sampling import noise
from semspec.text.steps import StepEnd, StepTracker
from semspec.types import (
    GREEDY,
    Draft,
    DraftedStep,
    Drafter,
    DraftRequest,
    DraftSteps,
    Event,
    Request,
    Runner,
    StepOutcome,
)
from semspec.verify.step_rule import StepRule

Ending = StepEnd | Literal["unfinished", "no space", "not begun"]
UNDECIDED = 0.5  # the rating of a draft model that has no room left for the question


class StepDecoder(Decoder):
    """One sequence, step by step. `self.step` is the one being written."""

    def __init__(self, job: Job, target: Runner, drafter: Drafter, stats: Stats) -> None:
        super().__init__(job, target, drafter, stats)
        assert isinstance(job.rule, StepRule) and job.steps is not None
        self.step_rule, self.steps = job.rule, job.steps
        self.rewriter = job.rewriter
        self.step = StepTracker(self.steps)
        self.step_start = len(self.context)  # where it began
        self.lead = job.rule.lead  # steps left for the target to write before the draft may
        self.drafting = self.lead == 0  # the draft writes next
        self.takeover, self.taken = 0, list[int]()  # tokens left for the target to write, and those it has written
        self.prolonged = False  # it was given more of them
        self.target_only = False  # the target writes the rest
        self.finishing = False  # because the thinking has ended, or the draft wanted to end it
        self.end_at: int | None = None  # where the text then ends at the latest

    def advance(self, left: int) -> Generator[Request, Any, Event]:
        if self.target_only or self.exact_only or not self.drafting or self.outside_thinking():
            return (yield from self.target_writes(left))
        draft, ending = yield from self.propose(left)
        if ending in WHOLE and self.step_rule.candidates > 1:
            draft = yield from add_candidates(self, draft, self.space(left))
        if ending in (*WHOLE, "unfinished") or (ending == "not begun" and draft.tokens):
            return (yield from self.check_steps(draft, left))
        # The draft would end the thinking or the text, or no step fits: the target writes.
        if self.step_rule.keep and draft.tokens:
            return (yield from self.check_steps(draft, left, ending))
        if ends := draft.steps.ends:
            return (yield from self.check_steps(draft.first(ends[-1]), left))
        if ending != "not begun":
            self.leave_to_target(ending)
        self.drafting = False
        self.drafter.accept(len(self.context) - 1)  # it may draft for `rewrite` next
        self.round += 1  # new noise: that of a draft dropped for how it ends would bias the next
        drafted = self.draft_steps(draft)
        event = yield from self.target_writes(left)
        if draft.tokens:
            self.record(event, ["handed over"], drafted)
        return event

    def take(self, tokens: list[int], left: int) -> Generator[Request, Any, Event]:
        event = yield from super().take(tokens, left)
        self.track_steps(event.tokens)
        return event

    def propose(self, left: int) -> Generator[Request, Any, tuple[Draft, Ending]]:
        """The draft's steps, perhaps with a part of another after the last whole one; and how the last of all ended."""
        rule, step = self.step_rule, copy.copy(self.step)
        left = self.space(left)
        tokens, steps, ends, ratings = list[int](), list[Draft](), list[int](), list[float]()
        while True:
            written, ending = yield from self.propose_step(step, tokens, left)
            if written.tokens:
                steps.append(written)
            tokens += written.tokens
            if ending not in WHOLE:
                break
            ends.append(len(tokens))
            if rule.asks_draft:
                ratings.append((yield from self.ask_draft(tokens)))
            if len(ends) == rule.steps or rule.confidence(written, self.job.sampling) < rule.ahead:
                break
            step, left = StepTracker(self.steps), min(left, rule.max_step_tokens)
        if ending == "no space" and ends:  # for another step in this draft, but perhaps in the next
            ending = "unfinished"
        draft = Draft.join(steps)
        draft.steps = DraftSteps(tuple(ends), self_ratings=tuple(ratings))
        return draft, ending

    def space(self, left: int) -> int:
        """For a draft, where `left` tokens of the answer are; the target's own token must fit as well."""
        return min(left, self.target.max_seq_len - len(self.context)) - 1

    def propose_step(
        self, step: StepTracker, before: list[int], left: int, candidate: int = 0
    ) -> Generator[Request, Any, tuple[Draft, Ending]]:
        """One step after these new tokens, as far as the draft is confident and the slot has space."""
        round = noise.round_of(self.round, candidate)
        parts, tokens = list[Draft](), list(before)
        while step.end is None and left > len(tokens):
            n = min(step.tokens_left, left - len(tokens))
            request = self.step_rule.request(n, self.job.sampling, round, self.steps.stops)
            glimpse = self.step_rule.glimpses and not parts
            if glimpse and request.sampling.truncated:  # of a truncated draw, the logits do not show what was left out
                look = replace(request, max_tokens=1, keep_logits=True, sampling=GREEDY)
                first: Draft = yield from self.propose_from(self.context + tokens, look)
                self.drafter.accept(len(self.context) + len(tokens) - 1)
                if first.tokens and not self.step_rule.begins(first, GREEDY):
                    return Draft([]), "not begun"
                glimpse = False
            elif glimpse:
                request = replace(request, max_tokens=1, keep_logits=True)
            part: Draft = yield from self.propose_from(self.context + tokens, request)
            if glimpse and part.tokens:
                if not self.step_rule.begins(part, self.job.sampling):
                    return Draft([]), "not begun"
                if not self.step_rule.keeps_draft_logits:  # the parts of a draft are alike
                    part.logits = None
                    part.own, part.own_ends = (part.own, part.own_ends) if part.hidden else (None, ())
            taken = step.feed(part.tokens)
            if taken is not None:  # a draft with another tokenizer may go on after it
                part = part.first(taken)
            if part.tokens:
                parts.append(part)
                tokens += part.tokens
            if part.early_exit and step.end is None:
                return Draft.join(parts), "unfinished"
            if not part.tokens:
                break
        return Draft.join(parts), step.end or "no space"

    def ask_draft(self, tokens: list[int]) -> Generator[Request, Any, float]:
        """What the draft model itself thinks of the step with which these new tokens end, from 0 to 1."""
        rule, so_far = self.step_rule, self.context + tokens
        question = rule.layout(tokens)[len(tokens) :]
        answer: Draft = yield from self.drafter.propose(so_far + question, DraftRequest(1, GREEDY, keep_logits=True))
        self.drafter.accept(len(so_far))  # the question is forgotten again
        return UNDECIDED if answer.logits is None else rule.rate_by_draft(answer.logits[0])

    def check_steps(self, draft: Draft, left: int, ending: Ending | None = None) -> Generator[Request, Any, Event]:
        """Verify the draft. With an ending, the target finishes what follows the whole steps."""
        candidates = draft.candidates
        drafted, *others = [self.draft_steps(candidate) for candidate in candidates]
        if self.step_rule.refereed:
            whole, draft = draft, self.ask_referee(draft, drafted)
            ending = ending if len(draft.tokens) == len(whole.tokens) else None
        event = yield from self.check(draft, self.step_rule, left)
        taken: int | None = 0
        if others:
            taken = taken_candidate(candidates, event)
            draft, drafted = candidates[taken or 0], [drafted, *others][taken or 0]
        accepted = 0 if taken is None else sum(end <= event.accepted for end in draft.steps.ends)
        outcomes: list[StepOutcome] = ["accepted"] * accepted
        self.drafting = accepted == len(draft.steps.ends) and ending is None
        if accepted < len(draft.steps.ends):
            outcomes += ["rejected"] if len(event.tokens) > event.accepted else []  # else the text ended inside it
        elif ending:
            outcomes.append("handed over")
        self.record(event, outcomes, drafted, taken, len(candidates))
        if outcomes[-1:] == ["rejected"]:
            self.takeover = self.step_rule.takeover_tokens()
        self.track_steps(event.tokens, accepted)
        self.take_over(event.tokens[event.accepted :])
        if ending and outcomes[-1:] == ["handed over"]:
            self.leave_to_target(ending)
        return event

    def leave_to_target(self, ending: Ending) -> None:
        """The draft has stopped for this reason; it may be the last that it writes."""
        self.target_only = self.target_only or self.step_rule.hand_over or ending == "no space"
        self.finishing = self.finishing or (self.target_only and ending != "no space")

    def draft_steps(self, draft: Draft) -> list[tuple[int, list[int]]]:
        """Of each of the draft's steps, the number of new tokens before it, and its tokens, committed ones included."""
        prompt, so_far = len(self.job.prompt), len(self.context)
        ends = [self.step_start - prompt, *(so_far - prompt + end for _, end in draft.segments)]
        new = self.context[prompt:] + draft.tokens
        return [(begin, new[begin:end]) for begin, end in pairwise(ends)]

    def ask_referee(self, draft: Draft, drafted: list[tuple[int, list[int]]]) -> Draft:
        """The draft with the referee's decision on each step, cut after the first invalid one."""
        assert self.job.referee is not None
        new, valid = self.context[len(self.job.prompt) :] + draft.tokens, list[bool]()
        for end, (start, step) in zip(draft.steps.ends, drafted, strict=False):
            valid.append(self.job.referee(new[:start], step))
            if not valid[-1]:
                draft = draft.first(end)
                break
        draft.steps = replace(draft.steps, valid=tuple(valid))
        return draft

    def record(
        self,
        event: Event,
        outcomes: Sequence[StepOutcome],
        drafted: list[tuple[int, list[int]]],
        taken: int | None = 0,
        candidates: int = 1,
    ) -> None:
        """Record the drafted steps with their outcomes; of several candidates the accepted one, else the first."""
        if candidates > 1:
            self.stats.candidates[candidates] += 1
            if taken is not None:
                self.stats.taken_candidates[taken] += 1
        for outcome, (start, step) in zip(outcomes, drafted, strict=False):
            if len(step) > 1 or outcome != "handed over":  # an end marker by itself is no step
                self.stats.step_outcomes[outcome] += 1
                event.drafted_steps.append(DraftedStep(outcome, step, start, None, taken or 0, candidates))

    def target_writes(self, left: int) -> Generator[Request, Any, Event]:
        """The target continues its step, or the rest of the text, with token-level speculation if `rewrite` says so."""
        if self.finishing and self.step_rule.end_tokens:
            self.end_at = self.end_at or len(self.context) + self.step_rule.end_tokens
            left = min(left, self.end_at - len(self.context))
        n = min(self.step_rule.rewrite_tokens, left - 1)
        if self.rewriter is None or n < 1:
            n = min(DECODE_TOKENS, self.step.tokens_left, self.takeover or DECODE_TOKENS)
            event = yield from self.decode_target(n, left, self.steps.stops)
        else:
            rule = self.allowed(self.rewriter)
            draft = yield from self.propose_from(self.context, rule.request(n, self.job.sampling, self.round))
            event = yield from self.check(draft, rule, left)
        self.track_steps(event.tokens)
        self.take_over(event.tokens)
        return event

    def take_over(self, tokens: Sequence[int]) -> None:
        """Count what the target writes for a while; then the draft goes on, inside a step or not."""
        if self.takeover and not self.target_only:
            self.taken += tokens
            self.takeover = max(0, self.takeover - len(tokens))
            if not self.takeover:
                self.takeover = 0 if self.prolonged else self.step_rule.prolong(self.taken)
                self.prolonged, self.taken = self.takeover > 0, []
                self.drafting = not self.takeover

    def track_steps(self, tokens: Sequence[int], accepted_steps: int = 0) -> None:
        """Follow step ends in committed tokens and decide which model writes next. The first steps are the draft's."""
        while tokens and not self.target_only:
            taken = self.step.feed(tokens)
            if taken is None:
                return
            tokens = tokens[taken:]
            self.target_only = self.finishing = self.step.end in ("end of thinking", "end of text")
            self.lead = max(0, self.lead - 1)
            if accepted_steps:
                accepted_steps -= 1
            else:
                marker = self.target_only and self.step.length == 1  # an end marker by itself is no step
                self.stats.step_outcomes["target"] += not marker
                self.drafting = self.lead == 0 and not self.takeover
            self.step = StepTracker(self.steps)
            self.step_start = len(self.context) - len(tokens)
