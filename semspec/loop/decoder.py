"""The loop: propose, score, verify, commit. Written for one sequence, as a generator that asks for passes.

It never touches a model: it yields requests (types.Request) and is sent their results, and yields an Event for
whatever was committed. The Executor answers the requests of many such generators together, so every rule and drafter
is batched without knowing it. Closing the generator at any point gives its slots back.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from semspec.loop.draft_length import TARGET_ONLY_TOKENS, DraftLengthPolicy, FixedLength
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
QUOTED = 80  # characters of repeated text in the log
DECODE_TOKENS = 8  # that the target generates without a draft between two checks for stop strings and cancellation


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
    thinking_open: bool = False  # the prompt ends inside the thinking, as some chat templates have it
    logprobs: int | None = None  # how many top logprobs to report with each token's own; None: no logprobs
    steps: Steps | None = None  # where reasoning steps end, for step rules
    referee: Referee | None = None  # for rules that ask one
    rewriter: Rule | None = None  # the token rule by which the draft speeds up what the target writes in a step rule
    repetition_guard: RepetitionGuard = field(default_factory=RepetitionGuard)
    text_of: Callable[[list[int]], str] = str  # for messages


Referee = Callable[[list[int], list[int]], bool]
"""Whether a reasoning step is valid: (new tokens so far, the step's tokens) -> bool."""


class Decoder:
    """One sequence. Between rounds the target's cache holds all of the context but its last token."""

    def __init__(self, job: Job, target: Runner, drafter: Drafter, stats: Stats) -> None:
        self.job, self.target, self.drafter, self.stats = job, target, drafter, stats
        self.context = list(job.prompt)
        self.slot = -1
        self.round = 0
        length = job.num_draft_tokens
        self.draft_length = FixedLength(length) if isinstance(length, int) else length
        self.undrafted = len(job.prompt)  # tokens that the drafter has not been shown
        self.state: Tensor | None = None  # the rule's memory of this sequence
        self.strict = False  # a loose rule repeated itself, and `exact` has taken over
        self.thinking_open = job.thinking_open

    def decode(self) -> SequenceGenerator:
        held: list[int] = []
        try:
            held = yield Acquire([self.target, *self.drafter.runners], self.job.prompt)
            self.slot, *rest = held
            self.drafter.begin(rest)
            end = len(self.context) + self.job.max_new_tokens
            finish: FinishReason | None = None
            while finish is None:
                event = yield from self.advance(end - len(self.context))
                finish = event.finish_reason
                yield event
        finally:
            if held:
                self.target.release(self.slot)
                self.drafter.close()

    def advance(self, left: int) -> Generator[Request, Any, Event]:
        """The next round, of at most `left` tokens."""
        if self.job.rule.speculates:
            return (yield from self.speculate(left))
        return (yield from self.decode_target(DECODE_TOKENS, left))

    def speculate(self, left: int) -> Generator[Request, Any, Event]:
        """A round with a draft as long as seems best, perhaps none; the policy is told what came of it."""
        # The target always adds a token of its own, so a draft is at least one shorter than what is left.
        n, before = self.draft_length.length(), dict(self.stats.seconds)
        # Seconds of a round in which a model reads more than its last token say nothing about other rounds.
        typical = len(self.pending()) == 1 and not (n and self.undrafted)
        if n:
            request = self.job.rule.request(min(n, left - 1), self.job.sampling, self.round)
            draft: Draft = yield from self.drafter.propose(self.context, request)
            event = yield from self.check(draft, self.allowed(self.job.rule), left)
        else:
            event = yield from self.decode_target(TARGET_ONLY_TOKENS, left)
        self.undrafted = 0 if n else self.undrafted + len(event.tokens)
        if event.finish_reason is None:  # else the answer's end has cut it short
            spent = {what: seconds - before[what] for what, seconds in self.stats.seconds.items()}
            target = sum(spent.values()) - spent["draft"]
            self.draft_length.observe(min(n, left - 1), len(event.tokens), spent["draft"], target, timed=typical)
        return event

    def check(self, draft: Draft, rule: Rule, left: int) -> Generator[Request, Any, Event]:
        """Score, verify, commit."""
        job = self.job
        draft, layout = self.fit(draft, rule)
        rows: ScoreOutput = yield Score(
            self.target, self.slot, self.pending() + layout, keep=1 + len(layout), layers=rule.layers
        )
        if not draft.tokens:  # nothing to verify: the target's own token follows
            rule = EXACT
        verdict: Verdict = yield VerifyRequest(
            rule, draft, rows, job.sampling, len(self.context), self.round, self.state, job.logprobs, job.protected
        )
        self.round += 1
        if rule is job.rule:
            self.state = verdict.state

        tokens = [*draft.tokens[: verdict.accepted], verdict.next]
        count, finish = self.cut(tokens, left)
        accepted = min(verdict.accepted, count)
        relaxed = [i for i in verdict.relaxed if i < accepted]
        self.stats.observe(len(draft.tokens), accepted, len(relaxed), bonus=count - accepted)
        self.drafter.accept(len(self.context) + accepted)
        event = self.commit(tokens[:count], verdict.logprobs, finish)
        event.drafted, event.accepted = len(draft.tokens), accepted
        for i in range(accepted):
            event.origins[i] = "relaxed" if i in relaxed else "draft"
        for n, i in enumerate(relaxed):
            reason = rule.reason(verdict.evidence[n]) if verdict.evidence else rule.reason(())
            event.relaxed[i] = Relaxed(reason, verdict.target_tokens[n] if verdict.target_tokens else None)
        return event

    def decode_target(self, n: int, left: int, pause: frozenset[int] = frozenset()) -> Generator[Request, Any, Event]:
        """The target generates a few tokens without a draft, up to one at which to pause."""
        job = self.job
        out: DecodeOutput = yield Decode(
            self.target, self.slot, self.pending(), min(n, left), job.sampling, TARGET, job.stop | pause,
            logprobs=job.logprobs,
        )  # fmt: skip
        count, finish = self.cut(out.tokens, left)
        for _ in range(count):
            self.stats.observe(drafted=0, accepted=0)
        return self.commit(out.tokens[:count], out.logprobs, finish)

    def allowed(self, rule: Rule) -> Rule:
        """This rule, or `exact` where a lossy one is not allowed."""
        return rule if rule.lossless or not (self.strict or self.outside_thinking()) else EXACT

    def outside_thinking(self) -> bool:
        """Whether only the thinking may be relaxed, and it has not begun or is over."""
        return self.job.thinking is not None and not self.thinking_open

    def fit(self, draft: Draft, rule: Rule) -> tuple[Draft, list[int]]:
        """The draft with its layout, shortened to what fits into the slot and to one side of the end of thinking."""
        space, end = self.target.capacity - len(self.context), self.job.thinking[1] if self.job.thinking else None
        while draft.tokens and (len(rule.layout(draft.tokens)) > space or end in draft.tokens[:-1]):
            draft = draft.first(len(draft.tokens) - 1)
        return draft, rule.layout(draft.tokens)

    def check_repetition(self, new: int) -> None:
        """Loose acceptance can lead into a loop. If it does, the target alone decides from here on."""
        # A prompt may repeat itself as it likes.
        loop = self.job.repetition_guard.look(self.context[len(self.job.prompt) :], new)
        if loop is not None:
            self.strict = True
            self.stats.loops += 1
            what = f"{self.job.rule.name} wrote {loop.period} tokens {loop.repeats} times in a row; going on with exact"
            text = self.job.text_of(list(loop.block))
            quoted = repr(text if len(text) <= QUOTED else text[: QUOTED - 3] + "...")
            # A log of other people's texts records no more than what happened.
            log.warning("%s: %s", what, quoted, extra={"public": what})

    def pending(self) -> list[int]:
        """The part of the context that the target has not read: its last token, or at first the whole prompt."""
        return self.context[self.target.length(self.slot) :]

    def cut(self, tokens: list[int], left: int) -> tuple[int, FinishReason | None]:
        """How many of these tokens belong to the answer, and why it ends there, if it does."""
        ends = [i + 1 for i, token in enumerate(tokens) if token in self.job.stop][:1]
        count = min([len(tokens), left, *ends])
        halted = self.job.halt(tokens[:count]) if self.job.halt else None
        if halted is not None:
            return halted, "stop"
        if ends and count == ends[0]:
            return count, "stop"
        return count, "length" if count == left else None

    def commit(self, tokens: list[int], logprobs: list[TokenLogprob] | None, finish: FinishReason | None) -> Event:
        """Make tokens part of the context and forget what the target scored beyond them."""
        self.context += tokens
        if self.job.thinking is not None:
            begin, end = self.job.thinking
            marks = (token == begin for token in reversed(tokens) if token in (begin, end))
            self.thinking_open = next(marks, self.thinking_open)
        if not (self.job.rule.lossless or self.strict):
            self.check_repetition(len(tokens))
        self.target.truncate(self.slot, min(self.target.length(self.slot), len(self.context) - 1))
        own = None if logprobs is None else logprobs[: len(tokens)]
        return Event(tokens, ["target"] * len(tokens), logprobs=own, finish_reason=finish)
