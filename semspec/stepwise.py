"""The loop of step rules: draft and target take turns in writing whole steps of reasoning.

The target writes the first step. Then the draft writes one; the target looks at it in one pass, and the rule says
whether it stands. If so, the target adds one token and it is the draft's turn again; if not, the target writes the
step itself, from its own choice at the step's first token, which the pass has shown already. Ending the thinking is
the target's business: a draft step that would is thrown away. What follows the thinking, the target writes alone.
"""

from __future__ import annotations

import copy
from collections.abc import Generator, Sequence
from typing import Any

from semspec.decode import WRITE_AHEAD, Decoder, Job
from semspec.draft.model import ModelDrafter
from semspec.kept import Kept
from semspec.stats import Stats
from semspec.steps import Step
from semspec.types import Draft, Event, Request, Rolled, Runner
from semspec.verify.step import StepRule
from semspec.verify.step_controls import RandomStep

REFUSE = RandomStep(rate=0.0)


class StepDecoder(Decoder):
    """One sequence on its way, step by step. `self.step` is the one being written."""

    drafter: ModelDrafter

    def __init__(self, job: Job, target: Runner, drafter: ModelDrafter, stats: Stats, kept: Kept | None = None) -> None:
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
        if self.alone or self.strict or not self.drafting:
            return (yield from self.target_writes(room))
        draft, step = yield from self.propose(room)
        if step.end in ("blank line", "length"):
            return (yield from self.try_step(draft, room))
        # The draft would end the thinking or the text, or there is no room for a step: the target's to write.
        self.alone = self.step_rule.hand_over or step.end is None
        self.drafting = False
        self.drafter.accept(len(self.context) - 1)  # so that it has something to go on from, should it help the target
        whole = self.whole(draft)
        event = yield from self.target_writes(room)
        if draft.tokens:
            self.note(event, "handed over", *whole)
        return event

    def propose(self, room: int) -> Generator[Request, Any, tuple[Draft, Step]]:
        """The draft's next step, or as much of it as there is room for."""
        step, parts = copy.copy(self.step), list[Rolled]()
        room = min(room, self.target.capacity - len(self.context)) - 1  # the target's own token must fit as well
        tokens: list[int] = []
        while step.end is None and room > len(tokens):
            draft: Draft = yield from self.drafter.propose(
                self.context + tokens, min(step.room, room - len(tokens)), self.job.sampling, self.round,
                self.step_rule, self.steps.stops,
            )  # fmt: skip
            if not draft.tokens:
                break
            parts.append(Rolled(draft.tokens, draft.logits, draft.hidden))
            tokens += draft.tokens
            step.feed(draft.tokens)
        whole = Rolled.join(parts) if parts else Rolled([])
        return Draft(whole.tokens, whole.logits, whole.hidden), step

    def try_step(self, draft: Draft, room: int) -> Generator[Request, Any, Event]:
        rule, job = self.step_rule, self.job
        whole, begun = self.whole(draft)
        if rule.refereed:
            assert job.referee is not None
            rule = rule if job.referee(self.context[len(job.prompt) :][:begun], whole) else REFUSE
        event = yield from self.check(draft, rule, room)
        self.drafting = event.accepted == len(draft.tokens)
        self.note(event, "accepted" if self.drafting else "refused", whole, begun)
        self.follow(event.tokens)
        return event

    def whole(self, draft: Draft) -> tuple[list[int], int]:
        """The step as the draft would have it, with the words it began with, and how many new tokens lie before it."""
        return self.context[self.begun :] + draft.tokens, self.begun - len(self.job.prompt)

    def note(self, event: Event, fate: str, step: list[int], begun: int) -> None:
        """What the draft had to say is kept, whatever became of it."""
        self.stats.fates[fate] += 1
        event.fate, event.step, event.begun = fate, step, begun

    def target_writes(self, room: int) -> Generator[Request, Any, Event]:
        """The target goes on with its step, or with the rest of the text, alone or helped along by the draft."""
        n = min(self.step_rule.rewrite_tokens, room - 1)
        if self.rewriter is None or n < 1:
            event = yield from self.write(min(WRITE_AHEAD, self.step.room), room, self.steps.stops)
        else:
            draft = yield from self.drafter.propose(self.context, n, self.job.sampling, self.round, self.rewriter)
            event = yield from self.check(draft, self.rewriter, room)
        self.follow(event.tokens)
        return event

    def follow(self, tokens: Sequence[int]) -> None:
        """See where committed tokens end steps, and whose turn it is then."""
        while tokens and not self.alone:
            taken = self.step.feed(tokens)
            if taken is None:
                return
            tokens = tokens[taken:]
            self.alone = self.step.end in ("end of thinking", "end of text")
            if not self.drafting:
                self.stats.fates["target"] += 1
            self.lead = max(0, self.lead - 1)
            self.drafting = self.lead == 0
            self.step = Step(self.steps)
            self.begun = len(self.context) - len(tokens)
