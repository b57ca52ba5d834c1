"""The loop of step rules: draft and target take turns in writing whole steps of reasoning.

The target writes the first step, or as many as `StepRule.lead` says. Then the draft writes one, or, while it is sure of
what it writes, several (`StepRule.steps`); the target looks at them in one pass, and the rule says of each whether it
stands. If all do, the target adds one token and it is the draft's turn again; the first that does not, the target
writes itself, from its own choice at the step's first token, which the pass has shown already.

A draft model that is told to stop where it is unsure (`draft_min_p`, `draft_max_entropy`) stops inside a step. The part
it has written is checked token by token, the target puts a word of its own where the draft was unsure, and the draft
goes on from there. Ending the thinking is the target's business: a draft step that would is thrown away, or with `keep`
checked token by token. What follows the thinking, the target writes alone.
"""

from __future__ import annotations

import copy
from collections.abc import Generator, Sequence
from itertools import pairwise
from typing import Any, Literal

from semspec.loop.decoder import WRITE_AHEAD, Decoder, Job
from semspec.loop.kept import Kept
from semspec.loop.stats import Stats
from semspec.text.steps import Step, StepEnd
from semspec.types import Draft, DraftedStep, Drafter, Event, Request, Runner, StepOutcome
from semspec.verify.step_rule import StepRule

Ending = StepEnd | Literal["unfinished", "no room"]
WHOLE = ("blank line", "length")


class StepDecoder(Decoder):
    """One sequence on its way, step by step. `self.step` is the one being written."""

    def __init__(self, job: Job, target: Runner, drafter: Drafter, stats: Stats, kept: Kept | None = None) -> None:
        super().__init__(job, target, drafter, stats, kept)
        assert isinstance(job.rule, StepRule) and job.steps is not None
        self.step_rule, self.steps = job.rule, job.steps
        self.rewriter = job.rewriter
        self.step = Step(self.steps)
        self.begun = len(self.context)  # where it began
        self.lead = job.rule.lead  # steps that the target is still to write before the draft may
        self.drafting = self.lead == 0  # whose turn it is
        self.alone = False  # the target writes the rest

    def advance(self, room: int) -> Generator[Request, Any, Event]:
        if self.alone or self.strict or not self.drafting or self.outside_thinking():
            return (yield from self.target_writes(room))
        draft, ending = yield from self.propose(room)
        if ending in (*WHOLE, "unfinished"):
            return (yield from self.try_steps(draft, room))
        # The draft would end the thinking or the text, or there is no room for a step: the target's to write.
        if self.step_rule.keep and draft.tokens:
            return (yield from self.try_steps(draft, room, ending))
        if draft.step_ends:
            return (yield from self.try_steps(draft.first(draft.step_ends[-1]), room))
        self.alone = self.step_rule.hand_over or ending == "no room"
        self.drafting = False
        self.drafter.accept(len(self.context) - 1)  # so that it has something to go on from, should it help the target
        self.round += 1  # help is drawn anew: what was picked for how it ends is no sample of the draft's any more
        pieces = self.draft_steps(draft)
        event = yield from self.target_writes(room)
        if draft.tokens:
            self.note(event, ["handed over"], pieces)
        return event

    def propose(self, room: int) -> Generator[Request, Any, tuple[Draft, Ending]]:
        """Steps of the draft's, perhaps with words behind the last whole one; and how the last of all came to end."""
        rule, step = self.step_rule, copy.copy(self.step)
        room = min(room, self.target.capacity - len(self.context)) - 1  # the target's own token must fit as well
        tokens, steps, cuts = list[int](), list[Draft](), list[int]()
        while True:
            written, ending = yield from self.propose_step(step, tokens, room)
            if written.tokens:
                steps.append(written)
            tokens += written.tokens
            if ending not in WHOLE:
                break
            cuts.append(len(tokens))
            if len(cuts) == rule.steps or rule.confidence(written, self.job.sampling) < rule.ahead:
                break
            step, room = Step(self.steps), min(room, rule.max_step_tokens)
        if ending == "no room" and cuts:  # for another step in this draft, but perhaps in the next
            ending = "unfinished"
        draft = Draft.join(steps)
        draft.step_ends = tuple(cuts)
        return draft, ending

    def propose_step(self, step: Step, before: list[int], room: int) -> Generator[Request, Any, tuple[Draft, Ending]]:
        """One step behind these new tokens, as much of it as the draft is sure of and as there is room for."""
        parts, tokens = list[Draft](), list(before)
        while step.end is None and room > len(tokens):
            n = min(step.room, room - len(tokens))
            request = self.step_rule.request(n, self.job.sampling, self.round, self.steps.stops)
            part: Draft = yield from self.drafter.propose(self.context + tokens, request)
            if not part.tokens:
                break
            parts.append(part)
            tokens += part.tokens
            step.feed(part.tokens)
            if part.early_exit:
                return Draft.join(parts), "unfinished"
        return Draft.join(parts), step.end or "no room"

    def try_steps(self, draft: Draft, room: int, ending: Ending | None = None) -> Generator[Request, Any, Event]:
        """Let the target check the draft. With an ending, what lies behind its whole steps ends in the target's way."""
        pieces = self.draft_steps(draft)
        if self.step_rule.refereed:
            whole, draft = draft, self.ask_referee(draft, pieces)
            ending = ending if len(draft.tokens) == len(whole.tokens) else None
        event = yield from self.check(draft, self.step_rule, room)
        stood = sum(cut <= event.accepted for cut in draft.step_ends)
        fates: list[StepOutcome] = ["accepted"] * stood
        self.drafting = stood == len(draft.step_ends) and ending is None
        if stood < len(draft.step_ends):
            fates += ["refused"] if len(event.tokens) > event.accepted else []  # else the text has ended inside it
        elif ending:
            fates.append("handed over")
        self.note(event, fates, pieces)
        self.follow(event.tokens, stood)
        if fates[-1:] == ["handed over"]:
            self.alone = self.alone or self.step_rule.hand_over or ending == "no room"
        return event

    def draft_steps(self, draft: Draft) -> list[tuple[int, list[int]]]:
        """The draft's steps, the first with the words that stand of it already: new tokens before each, and its own."""
        prompt, so_far = len(self.job.prompt), len(self.context)
        ends = [self.begun - prompt, *(so_far - prompt + end for _, end in draft.segments)]
        new = self.context[prompt:] + draft.tokens
        return [(begin, new[begin:end]) for begin, end in pairwise(ends)]

    def ask_referee(self, draft: Draft, pieces: list[tuple[int, list[int]]]) -> Draft:
        """The draft with a referee's word on each step; nothing behind the first bad one is worth a look."""
        assert self.job.referee is not None
        new, valid = self.context[len(self.job.prompt) :] + draft.tokens, list[bool]()
        for cut, (begun, step) in zip(draft.step_ends, pieces, strict=False):
            valid.append(self.job.referee(new[:begun], step))
            if not valid[-1]:
                draft = draft.first(cut)
                break
        draft.valid = tuple(valid)
        return draft

    def note(self, event: Event, fates: Sequence[StepOutcome], pieces: list[tuple[int, list[int]]]) -> None:
        """What the draft had to say is kept, whatever became of it."""
        for fate, (begun, step) in zip(fates, pieces, strict=False):
            if len(step) > 1 or fate != "handed over":  # a mere mark of the end is no step
                self.stats.step_outcomes[fate] += 1
                event.drafted_steps.append(DraftedStep(fate, step, begun))

    def target_writes(self, room: int) -> Generator[Request, Any, Event]:
        """The target goes on with its step, or with the rest of the text, alone or helped along by the draft."""
        n = min(self.step_rule.rewrite_tokens, room - 1)
        if self.rewriter is None or n < 1:
            event = yield from self.write(min(WRITE_AHEAD, self.step.room), room, self.steps.stops)
        else:
            rule = self.allowed(self.rewriter)
            draft = yield from self.drafter.propose(self.context, rule.request(n, self.job.sampling, self.round))
            event = yield from self.check(draft, rule, room)
        self.follow(event.tokens)
        return event

    def follow(self, tokens: Sequence[int], taken_over: int = 0) -> None:
        """See where committed tokens end steps, the first few of which are the draft's, and whose turn it is then."""
        while tokens and not self.alone:
            taken = self.step.feed(tokens)
            if taken is None:
                return
            tokens = tokens[taken:]
            self.alone = self.step.end in ("end of thinking", "end of text")
            self.lead = max(0, self.lead - 1)
            if taken_over:
                taken_over -= 1
            else:
                self.stats.step_outcomes["target"] += not (
                    self.alone and self.step.length == 1
                )  # a mere mark of the end is no step
                self.drafting = self.lead == 0
            self.step = Step(self.steps)
            self.begun = len(self.context) - len(tokens)
