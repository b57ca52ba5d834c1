"""The loop: propose, score, judge, commit. Written for one sequence, as a generator that asks for passes.

It never touches a model: it yields requests (types.Request) and is sent their results, and yields an Event for
whatever was committed. The Executor answers the requests of many such generators together, so every rule and drafter
is batched without knowing it. Closing the generator at any point gives its slots back, or leaves them to a
conversation's next turn (`kept`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from semspec.loop.draft_length import TARGET_ONLY_TOKENS, DraftLengthPolicy, FixedLength
from semspec.loop.kept import Kept
from semspec.loop.repetition import RepetitionGuard
from semspec.loop.stats import Stats
from semspec.sampling.noise import TARGET
from semspec.text.steps import Steps
from semspec.types import (
    Acquire,
    Decode,
    DecodeOutput,
    Draft,
    Drafter,
    Event,
    FinishReason,
    Relaxed,
    Request,
    Runner,
    Sampling,
    Score,
    ScoreOutput,
    SequenceGenerator,
    TokenLogprob,
    Verdict,
    VerifyRequest,
)
from semspec.verify.base import Rule
from semspec.verify.exact import Exact

log = logging.getLogger(__name__)
EXACT = Exact()
QUOTED = 80  # characters of a text that goes in circles, in the log
WRITE_AHEAD = 8  # tokens a target without a draft writes between two looks at stop strings and cancellation


@dataclass(slots=True)
class Job:
    """One sequence to decode, in tokens. Text is not known here."""

    prompt: list[int]
    rule: Rule
    num_draft_tokens: int | DraftLengthPolicy
    max_new_tokens: int
    sampling: Sampling = field(default_factory=Sampling)
    stop: frozenset[int] = frozenset()
    halt: Callable[[list[int]], int | None] | None = None  # new tokens -> how many to keep, if the text ends there
    protected: Tensor | None = None  # [V] tokens that no rule may relax
    thinking: tuple[int, int] | None = None  # relax only between these two tokens; None: everywhere
    logprobs: int | None = None  # how many rivals to report with each token's logprob; None: no logprobs
    steps: Steps | None = None  # where steps end, for rules whose unit is one
    referee: Referee | None = None  # for rules that ask one
    rewriter: Rule | None = None  # the token rule by which the draft helps where the target writes, if it does
    watch: RepetitionGuard = field(default_factory=RepetitionGuard)  # when a loose rule has gone in circles
    spell: Callable[[list[int]], str] = str  # tokens as a person reads them


Referee = Callable[[list[int], list[int]], bool]
"""Whether a step is valid: (new tokens so far, the step's tokens) -> bool."""


class Decoder:
    """One sequence on its way. Between steps the target's cache holds all of the context but its last token."""

    def __init__(self, job: Job, target: Runner, drafter: Drafter, stats: Stats, kept: Kept | None = None) -> None:
        self.job, self.target, self.drafter, self.stats, self.kept = job, target, drafter, stats, kept
        self.context = list(job.prompt)
        self.slot = -1
        self.round = 0
        self.pace = FixedLength(job.num_draft_tokens) if isinstance(job.num_draft_tokens, int) else job.num_draft_tokens
        self.unread = len(job.prompt)  # tokens that the drafter has not been shown
        self.state: Tensor | None = None  # the rule's memory of this sequence
        self.strict = False  # a loose rule went in circles, so `exact` has taken over

    def decode(self) -> SequenceGenerator:
        runners, held = [self.target, *self.drafter.runners], list[int]()
        try:
            held = (yield from self.kept.acquire(runners, self.context)) if self.kept else (yield Acquire(runners))
            self.slot, *rest = held
            self.drafter.begin(rest)
            end = len(self.context) + self.job.max_new_tokens
            finish: FinishReason | None = None
            while finish is None:
                room = end - len(self.context)
                event = yield from self.advance(room)
                finish = event.finish_reason
                yield event
        finally:
            if held and self.kept:
                self.kept.keep(runners, held, self.context)
            elif held:
                self.target.release(self.slot)
                self.drafter.close()

    def advance(self, room: int) -> Generator[Request, Any, Event]:
        """Whatever comes next, of at most so many tokens."""
        return (yield from (self.paced(room) if self.job.rule.speculates else self.write(WRITE_AHEAD, room)))

    def paced(self, room: int) -> Generator[Request, Any, Event]:
        """A step with a draft as long as seems best, or without; what came of it is told to who chose."""
        # The target always adds a token of its own, so a draft may be at most one shorter than the room left.
        n, before = self.pace.length(), dict(self.stats.seconds)
        # A model that has a longer text to catch up with says nothing about its usual speed.
        usual = len(self.pending()) == 1 and not (n and self.unread)
        event = yield from (self.speculate(min(n, room - 1), room) if n else self.write(TARGET_ONLY_TOKENS, room))
        self.unread = 0 if n else self.unread + len(event.tokens)
        if event.finish_reason is None:  # else the answer's end has cut it short
            spent = {what: seconds - before[what] for what, seconds in self.stats.seconds.items()}
            target = sum(spent.values()) - spent["draft"]
            self.pace.observe(min(n, room - 1), len(event.tokens), spent["draft"], target, timed=usual)
        return event

    def speculate(self, n: int, room: int) -> Generator[Request, Any, Event]:
        """Propose, score, judge, commit."""
        job = self.job
        draft: Draft = yield from self.drafter.propose(self.context, job.rule.request(n, job.sampling, self.round))
        return (yield from self.check(draft, self.allowed(job.rule), room))

    def check(self, draft: Draft, rule: Rule, room: int) -> Generator[Request, Any, Event]:
        """Score, judge, commit."""
        job = self.job
        draft, layout = self.fit(draft, rule)
        rows: ScoreOutput = yield Score(
            self.target, self.slot, self.pending() + layout, keep=1 + len(layout), layers=rule.layers
        )
        if not draft.tokens:  # then there is nothing to judge, and the target's own token follows
            rule = EXACT
        verdict: Verdict = yield VerifyRequest(
            rule, draft, rows, job.sampling, len(self.context), self.round, self.state, job.logprobs, job.protected
        )
        self.round += 1
        if rule is job.rule:
            self.state = verdict.state

        tokens = [*draft.tokens[: verdict.accepted], verdict.next]
        kept, finish = self.cut(tokens, room)
        accepted = min(verdict.accepted, kept)
        relaxed = [i for i in verdict.relaxed if i < accepted]
        self.stats.observe(len(draft.tokens), accepted, len(relaxed), bonus=kept - accepted)
        self.drafter.accept(len(self.context) + accepted)
        event = self.commit(tokens[:kept], verdict.logprobs, finish)
        event.drafted, event.accepted = len(draft.tokens), accepted
        for i in range(accepted):
            event.origins[i] = "relaxed" if i in relaxed else "draft"
        for n, i in enumerate(relaxed):
            reason = rule.reason(verdict.evidence[n]) if verdict.evidence else rule.reason(())
            event.relaxed[i] = Relaxed(reason, verdict.target_tokens[n] if verdict.target_tokens else None)
        return event

    def write(self, n: int, room: int, pause: frozenset[int] = frozenset()) -> Generator[Request, Any, Event]:
        """The target alone writes a few tokens, up to one at which to pause."""
        job = self.job
        rolled: DecodeOutput = yield Decode(
            self.target, self.slot, self.pending(), min(n, room), job.sampling, TARGET, job.stop | pause,
            logprobs=job.logprobs,
        )  # fmt: skip
        kept, finish = self.cut(rolled.tokens, room)
        for _ in range(kept):
            self.stats.observe(drafted=0, accepted=0)
        return self.commit(rolled.tokens[:kept], rolled.logprobs, finish)

    def allowed(self, rule: Rule) -> Rule:
        """This rule, or `exact` where a loose one has no business."""
        return rule if rule.lossless or not (self.strict or self.outside_thinking()) else EXACT

    def outside_thinking(self) -> bool:
        """Whether the thinking that alone may be relaxed has not begun, or is over."""
        if self.job.thinking is None:
            return False
        begin, end = self.job.thinking
        return next((token == end for token in reversed(self.context) if token in (begin, end)), True)

    def fit(self, draft: Draft, rule: Rule) -> tuple[Draft, list[int]]:
        """The draft with its layout, shortened to what has room in the slot, and to one side of the end of thinking."""
        room, end = self.target.capacity - len(self.context), self.job.thinking[1] if self.job.thinking else None
        while draft.tokens and (len(rule.layout(draft.tokens)) > room or end in draft.tokens[:-1]):
            draft = draft.first(len(draft.tokens) - 1)
        return draft, rule.layout(draft.tokens)

    def watch(self, new: int) -> None:
        """Loose acceptance can talk itself into a circle. If it does, the target alone decides from here on."""
        # A prompt may repeat itself as it likes: nobody wrote that here.
        loop = self.job.watch.look(self.context[len(self.job.prompt) :], new)
        if loop is not None:
            self.strict = True
            self.stats.loops += 1
            what = f"{self.job.rule.name} wrote {loop.period} tokens {loop.repeats} times in a row; going on with exact"
            text = self.job.spell(list(loop.block))
            quoted = repr(text if len(text) <= QUOTED else text[: QUOTED - 3] + "...")
            # Who keeps logs of other people's texts writes down no more than what happened.
            log.warning("%s: %s", what, quoted, extra={"public": what})

    def pending(self) -> list[int]:
        """The part of the context that the target has not seen: its last token, or at first the whole prompt."""
        return self.context[self.target.length(self.slot) :]

    def cut(self, tokens: list[int], room: int) -> tuple[int, FinishReason | None]:
        """How many of these tokens belong to the answer, and why it ends there, if it does."""
        ends = [i + 1 for i, token in enumerate(tokens) if token in self.job.stop][:1]
        kept = min([len(tokens), room, *ends])
        halted = self.job.halt(tokens[:kept]) if self.job.halt else None
        if halted is not None:
            return halted, "stop"
        if ends and kept == ends[0]:
            return kept, "stop"
        return kept, "length" if kept == room else None

    def commit(self, tokens: list[int], logprobs: list[TokenLogprob] | None, finish: FinishReason | None) -> Event:
        """Make tokens part of the context and forget what the target scored beyond them."""
        self.context += tokens
        if not (self.job.rule.lossless or self.strict):
            self.watch(len(tokens))
        self.target.truncate(self.slot, min(self.target.length(self.slot), len(self.context) - 1))
        kept = None if logprobs is None else logprobs[: len(tokens)]
        return Event(tokens, ["target"] * len(tokens), logprobs=kept, finish_reason=finish)
