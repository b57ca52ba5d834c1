"""The loop: propose, score, verify, commit. Written for one sequence, as a generator of requests.

It never calls a model: it yields requests (types.Request) and is sent their results, and yields an Event for each
commit. The Executor batches the requests of many such generators, so no rule or drafter has to know about batching.
Closing the generator at any point releases its slots.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Generator
from dataclasses import replace
from typing import Any

from torch import Tensor

from semspec import tree
from semspec.loop.draft_length import DECODE_TOKENS, FixedLength, Round, Situation
from semspec.loop.job import Job as Job
from semspec.loop.job import Referee as Referee
from semspec.loop.stats import Stats
from semspec.loop.target_scorer import TargetScorer
from semspec.sampling.draw import entropy, logprobs_of
from semspec.sampling.noise import TARGET
from semspec.sampling.processors import History, Processors
from semspec.types import (
    Acquire,
    Decode,
    DecodeOutput,
    Draft,
    Drafter,
    DraftRequest,
    Event,
    FinishReason,
    Handover,
    ProposalGenerator,
    Relaxed,
    Request,
    Runner,
    ScoreOutput,
    SequenceGenerator,
    TokenLogprob,
    Verdict,
    VerifyRequest,
)
from semspec.verify.base import Rule
from semspec.verify.exact import EXACT

log = logging.getLogger(__name__)
MAX_QUOTE = 80  # characters of repeated text in the log
PROMPT_ROWS = 64  # of a prompt's logits at a time
MAX_GIVEN = 64  # tokens that follow without a pass, between two checks for cancellation


class Decoder:
    """One sequence. Between rounds the target's cache holds all of the context but its last token."""

    def __init__(self, job: Job, target: Runner, drafter: Drafter, stats: Stats) -> None:
        self.job, self.target, self.drafter, self.stats = job, target, drafter, stats
        self.context = list(job.prompt)
        self.slot = -1
        self.round = 0
        length = job.num_draft_tokens
        self.draft_length = FixedLength(length) if isinstance(length, int) else length
        self.undrafted = len(job.prompt)  # tokens that the drafter has not seen
        self.undrafted_rounds = 0  # since the last one with a draft
        self.states: dict[Rule, Tensor | None] = {}  # what each rule has returned for this sequence
        self.exact_only = False  # a lossy rule repeated itself, and `exact` has taken over
        self.thinking = job.thinking
        self.scorer = TargetScorer(target, drafter)

    def decode(self) -> SequenceGenerator:
        slots: list[int] = []
        try:
            drafts, read = self.drafter.runners, self.job.draft_prompt or self.job.prompt
            # What is too long for a draft model is never fed to it.
            prompts = [self.job.prompt, *(read if len(read) <= runner.max_seq_len else () for runner in drafts)]
            slots = yield Acquire([self.target, *drafts], prompts, self.job.salt)
            self.slot, *rest = slots
            self.scorer.slot = self.slot
            self.drafter.begin(rest)
            end = len(self.context) + self.job.max_new_tokens
            finish: FinishReason | None = None
            prompt_logprobs = yield from self.score_prompt()
            while finish is None:
                left = end - len(self.context)
                given = self.given(left)
                event = yield from (self.take(given, left) if given or not left else self.advance(left))
                finish = event.finish_reason
                event.prompt_logprobs, prompt_logprobs = prompt_logprobs, None
                yield event
        finally:
            self.draft_length.close()
            if slots:
                self.target.release(self.slot)
                self.drafter.close()

    def advance(self, left: int) -> Generator[Request, Any, Event]:
        """The next round, of at most `left` tokens."""
        if self.job.rule.speculates:
            return (yield from self.speculate(left))
        return (yield from self.decode_target(DECODE_TOKENS, left))

    def score_prompt(self) -> Generator[Request, Any, list[TokenLogprob | None] | None]:
        """The logprobs of those of the prompt's tokens that are asked for; its first has none."""
        job, last = self.job, len(self.job.prompt) - 1
        if job.prompt_logprobs is None:
            return None
        begin = max(0, last - (job.prompt_logprobs_last or last))
        if before := job.prompt[:begin]:
            yield from self.scorer.score(before, logits_to_keep=1)
        found: list[TokenLogprob | None] = [] if begin else [None]
        for start in range(begin, last, PROMPT_ROWS):  # rows of a whole prompt may not fit into memory
            tokens = job.prompt[start : min(start + PROMPT_ROWS, last)]
            rows: ScoreOutput = yield from self.scorer.score(tokens, logits_to_keep=len(tokens))
            found += logprobs_of(rows.logits, job.prompt[start + 1 :][: len(tokens)], job.prompt_logprobs)
        return found

    def given(self, left: int) -> list[int]:
        """What has to follow, whatever the target would write: the end of a thinking that has had its tokens, or what
        is the only token allowed."""
        if self.thinking is not None and self.thinking.over:
            self.thinking.cut = True
            return [self.thinking.end]
        return [] if self.job.processors is None else self.job.processors.forced(self.context, min(left, MAX_GIVEN))

    def take(self, tokens: list[int], left: int) -> Generator[Request, Any, Event]:
        """Commit tokens without a pass; the target is fed them with what follows."""
        logprobs = None
        if self.job.logprobs is not None and tokens:
            feed = self.pending() + tokens[:-1]
            rows: ScoreOutput = yield from self.scorer.score(feed, logits_to_keep=len(tokens))
            logprobs = logprobs_of(rows.logits, tokens, self.job.logprobs)
        count, finish = self.cut(tokens, left)
        for _ in range(count):
            self.stats.observe(drafted=0, accepted=0)
        self.undrafted += count
        return self.commit(tokens[:count], logprobs, finish)

    def speculate(self, left: int) -> Generator[Request, Any, Event]:
        """A round with the draft length of the policy, perhaps 0, whose result the policy observes."""
        # The target always adds a token of its own, so a draft is at least one shorter than what is left.
        n, before = self.draft_length.length(self.situation(left)), dict(self.stats.seconds)
        # Do not learn from the seconds of a round with a prefill: of the prompt, or of what the drafter has not seen.
        prompt = len(self.pending()) > 1
        timed = not prompt and not (n and self.undrafted and self.drafter.runners)
        if n:
            request = self.job.rule.request(min(n, left - 1), self.job.sampling, self.round)
            if (threshold := self.draft_length.threshold) != request.threshold:
                request = replace(request, threshold=threshold)
            if self.target.hands_over and (handover := self.handover()):
                request = replace(request, handover=handover)
            draft: Draft = yield from self.propose_from(self.context, request)
            event = yield from self.check(draft, self.allowed(self.job.rule), left, request.handover)
            drafted = min(draft.longest, event.drafted)
        else:
            event = yield from self.decode_target(self.draft_length.target_only_tokens(self.undrafted_rounds), left)
            drafted = 0
        self.undrafted_rounds = 0 if n else self.undrafted_rounds + 1
        self.undrafted = 0 if n else self.undrafted + len(event.tokens)
        if event.finish_reason is None:  # else the end of the answer may have cut it
            spent = {kind: seconds - before[kind] for kind, seconds in self.stats.seconds.items()}
            target = sum(spent.values()) - spent["draft"] - spent["capture"]
            tokens, drafting, timed = len(event.tokens), spent["draft"], timed and not spent["capture"]
            made = Round(min(n, left - 1), drafted, tokens, drafting, target, timed, prompt, scored=event.drafted)
            self.draft_length.observe(made)
        return event

    def situation(self, left: int) -> Situation:
        # What the target has found in its prefix cache, a draft model will mostly find in its own.
        unread = max(self.undrafted - self.stats.cached_tokens, 0) if self.drafter.runners else 0
        return Situation(len(self.context), len(self.context) - len(self.job.prompt), left, unread)

    def handover(self) -> Handover | None:
        """By which the target reads a draft as it is, if it will."""
        job, pending, plain = self.job, self.pending(), type(self.job.rule).layout is Rule.layout
        if not plain or len(pending) > 1 or job.processors is not None or self.scorer.layers:
            return None
        return Handover(self.target, self.slot, pending, self.allowed(job.rule).layers)

    def propose_from(self, context: list[int], request: DraftRequest) -> ProposalGenerator:
        if self.job.processors is not None:
            request = replace(request, processors=self.job.processors)
        return self.drafter.propose(context, request)

    def check(
        self, draft: Draft, rule: Rule, left: int, handover: Handover | None = None
    ) -> Generator[Request, Any, Event]:
        """Score, verify, commit."""
        job = self.job
        draft, layout = self.fit(draft, rule)
        feed = self.pending() + layout
        rows: ScoreOutput = yield from self.scorer.score(
            feed, 1 + len(layout), rule.layers, dense=not draft.tokens, parents=draft.parents, handover=handover
        )
        if not draft.tokens:  # nothing to verify: the target's own token follows
            rule = EXACT
        if rule is EXACT and rule is not job.rule:  # with other sequences, whose rules want other layers or none
            draft, rows = replace(draft, hidden={}), ScoreOutput(rows.logits)
        verdict: Verdict = yield VerifyRequest(
            rule,
            draft,
            rows,
            job.sampling,
            len(self.context),
            self.round,
            self.states.get(rule),
            job.logprobs,
            job.protected,
            self.history(),
        )
        self.round += 1
        self.states[rule] = verdict.state

        tokens = [*(draft.tokens[i] for i in verdict.taken), verdict.next]
        count, finish = self.cut(tokens, left)
        accepted = min(verdict.accepted, count)
        if draft.parents:
            self.scorer.compact(len(layout), verdict.path)
        if job.count_entropy:
            on_path = [0, *(i + 1 for i in verdict.taken)][:count]
            self.stats.entropy += float(entropy(rows.logits[on_path].float().softmax(-1)).sum())
            self.stats.entropy_tokens += count
        relaxed = [i for i in verdict.relaxed if i < accepted]
        self.stats.observe(len(draft.tokens), accepted, len(relaxed), count - accepted, draft.longest)
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
        job, pending = self.job, self.pending()
        if self.scorer.layers and len(pending) > 1:  # a decode has no states of what it reads before its first token
            yield from self.scorer.score(pending[:-1], logits_to_keep=0)
            pending = pending[-1:]
        n = 1 if job.processors is not None else n  # what is forced or over is seen between requests
        out: DecodeOutput = yield Decode(
            self.target, self.slot, pending, min(n, left), job.sampling, TARGET, job.stop | pause,
            logprobs=job.logprobs, layers=self.scorer.layers, history=self.history(),
        )  # fmt: skip
        self.scorer.add(out.hidden)
        count, finish = self.cut(out.tokens, left)
        for _ in range(count):
            self.stats.observe(drafted=0, accepted=0)
        return self.commit(out.tokens[:count], out.logprobs, finish)

    def history(self) -> History | None:
        return None if self.job.processors is None else self.job.processors.after(self.context)

    def allowed(self, rule: Rule) -> Rule:
        """This rule, or `exact` where a lossy one is not allowed."""
        return rule if rule.lossless or not (self.exact_only or self.outside_thinking()) else EXACT

    def outside_thinking(self) -> bool:
        """Whether only the thinking may be relaxed, and it has not started or has ended."""
        return self.thinking is not None and self.thinking.relax_only and not self.thinking.open

    def fit(self, draft: Draft, rule: Rule) -> tuple[Draft, list[int]]:
        """The draft with its layout, shortened to what is allowed, to what fits into the slot, and to one side of the
        end of thinking."""
        # A rule that divides by the probabilities of draft tokens rejects those that are not allowed: to leave them out
        # because of what was drawn would bias it.
        processors = self.job.processors if draft.logits is None or not rule.needs_draft_logits else None
        end = self.thinking.end if self.thinking and self.thinking.relax_only else None
        if draft.parents:
            draft = legal_tree(draft, self.context, processors, end)
        elif processors is not None:
            draft = draft.first(processors.legal(self.context, draft.tokens))
        space = self.target.max_seq_len - len(self.context)
        if draft.parents:
            return (draft := draft.first(space)), draft.tokens
        while draft.tokens and (len(rule.layout(draft.tokens)) > space or end in draft.tokens[:-1]):
            draft = draft.first(len(draft.tokens) - 1)
        return draft, rule.layout(draft.tokens)

    def check_repetition(self, new: int) -> None:
        """If a lossy rule repeats itself, use `exact` from here on."""
        # Repetition in the prompt does not count.
        found = self.job.repetition_guard.find(self.context[len(self.job.prompt) :], new)
        if found is not None:
            self.exact_only = True
            self.stats.loops += 1
            times = f"{found.period} tokens {found.repeats} times in a row"
            what = f"{self.job.rule.name} wrote {times}; going on with exact"
            text = self.job.text_of(list(found.block))
            quoted = repr(text if len(text) <= MAX_QUOTE else text[: MAX_QUOTE - 3] + "...")
            # A server's log does not quote its users' texts.
            log.warning("%s: %s", what, quoted, extra={"public": what})

    def pending(self) -> list[int]:
        """The part of the context not yet in the target's cache: its last token, or at first the whole prompt."""
        return self.context[self.target.length(self.slot) :]

    def cut(self, tokens: list[int], left: int) -> tuple[int, FinishReason | None]:
        """How many of these tokens belong to the answer, and its finish reason if it ends there."""
        ends = [i + 1 for i, token in enumerate(tokens) if token in self.job.stop][:1]
        if self.job.processors is not None and (over := self.job.processors.ended(self.context, tokens)) is not None:
            ends = [min([over, *ends])]
        room = self.thinking.room(tokens) if self.thinking and not self.thinking.over else len(tokens)
        count = min([room, left, *ends])
        halted = self.job.halt(tokens[:count]) if self.job.halt else None
        if halted is not None:
            return halted, "stop"
        if ends and count == ends[0]:
            return count, "stop"
        if count < left:
            return count, None
        inside = copy.copy(self.thinking)
        if inside is not None:
            inside.feed(tokens[:count])
        return count, "thinking" if inside is not None and inside.open else "length"

    def commit(self, tokens: list[int], logprobs: list[TokenLogprob] | None, finish: FinishReason | None) -> Event:
        """Append tokens to the context and drop what the target cached after them."""
        self.context += tokens
        if self.thinking is not None:
            self.thinking.feed(tokens)
        if not (self.job.rule.lossless or self.exact_only):
            self.check_repetition(len(tokens))
        self.target.truncate(self.slot, min(self.target.length(self.slot), len(self.context) - 1))
        self.scorer.observe(self.context)
        own = None if logprobs is None else logprobs[: len(tokens)]
        return Event(tokens, ["target"] * len(tokens), logprobs=own, finish_reason=finish)


def legal_tree(draft: Draft, context: list[int], processors: Processors | None, end: int | None) -> Draft:
    """A tree draft without what may not follow the context, and without what follows an `end`."""
    if processors is None and end is None:
        return draft
    some = set[int]()
    for path in tree.paths(draft.parents):
        tokens = [draft.tokens[i] for i in path]
        n = len(tokens) if processors is None else processors.legal(context, tokens)
        some.update(path[: tokens.index(end) + 1 if end in tokens[:n] else n])
    return draft if len(some) == len(draft.tokens) else draft.only(some)
