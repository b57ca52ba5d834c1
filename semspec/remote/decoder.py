"""The loop of step rules over two servers: the draft's writes a step, the target's scores it, the rule decides.

The same decisions as in loop/step_decoder.py, on text. A step that is accepted costs two round trips: the draft's
server writes up to a blank line; the target's reads the step, reports the log-probabilities of its tokens, and adds one
token of its own. Of a rejected step the beginning may stay, as the rule says, and the target's server writes the rest
of it in one more. Prefix caching on both servers makes each of these read what is new only, scoring too where a server
can report the last tokens alone.

A draft's server that fails leaves the target writing alone, until it answers again.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Generator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from torch import Tensor

from semspec.errors import RemoteError
from semspec.loop.decoder import Job
from semspec.loop.stats import Stats
from semspec.remote.answers import UNFINISHED, Answer, Piece, head, spelled, tail
from semspec.remote.connection import Refused
from semspec.remote.executor import Call
from semspec.remote.model import BLANK, Ending, RemoteModel
from semspec.remote.pieces import Pieces, TextPrompt, words
from semspec.remote.verification import JudgeProbes, ScoredStep, StepVerdict, StepVocabulary, question_of, verify_step
from semspec.text.tokenizer import THINKING
from semspec.types import GREEDY, DraftedStep, Event, FinishReason, Relaxed, Sampling, StepOutcome
from semspec.verify.step_rule import StepRule

log = logging.getLogger(__name__)
TARGET_CALL_TOKENS = 128  # that the target writes in one call where no step has to end
REST_SECONDS = 15.0  # that a draft's server which failed is left alone
CLOSING = tuple(end for _, end in THINKING)
LONGEST_MARKER = max(map(len, CLOSING))
BLANK_LINE: Ending = "blank line"
Calls = Generator[Call | Event, Any, Any]


@dataclass(slots=True)
class Servers:
    """What all sequences of a pair share."""

    target: RemoteModel
    draft: RemoteModel | None
    pieces: Pieces
    judge_probes: JudgeProbes
    turn: tuple[str, str] | None = None  # what the target's chat template has around a user's next turn
    clock: Callable[[], float] = time.monotonic
    down_until: float = 0.0  # the draft's server failed, and is not asked before then

    def vocabulary(self) -> StepVocabulary:
        return StepVocabulary(self.judge_probes, self.turn)

    def lose_draft(self, error: RemoteError) -> None:
        self.down_until = self.clock() + REST_SECONDS
        log.warning("the target writes alone: %s", error)


@dataclass(slots=True)
class Proposal:
    text: str
    ending: Ending
    own: list[Piece]  # in the draft's tokens


@dataclass(slots=True)
class TextDecoder:
    """One sequence."""

    job: Job
    servers: Servers
    stats: Stats
    referee: Callable[[str, str], bool] | None = None
    text: str = ""  # the answer so far
    tokens: list[int] = field(default_factory=list)
    step_start: int = 0  # tokens before the step that is being written
    text_start: int = 0  # characters
    round: int = 0
    drafting: bool = True  # the draft writes next
    target_only: bool = False  # the target writes all the rest
    lost: bool = False  # the draft's server has failed this sequence
    lead: int = 0  # steps left for the target to write before the draft may
    question: str = ""
    state: Tensor | None = None  # the rule's

    def decode(self) -> Calls:
        rule = self.job.rule
        if isinstance(rule, StepRule):
            self.lead, self.question = rule.lead, question_of(rule, self.servers.vocabulary())
        else:
            self.target_only = True
        finish: FinishReason | None = None
        while finish is None:
            event = yield from self.advance()
            finish = event.finish_reason
            yield event

    @property
    def left(self) -> int:
        return self.job.max_new_tokens - len(self.tokens)

    @property
    def rule(self) -> StepRule:
        assert isinstance(self.job.rule, StepRule)
        return self.job.rule

    @property
    def prompt(self) -> TextPrompt:
        assert isinstance(self.job.prompt, TextPrompt)
        return self.job.prompt

    def sampling(self, how: Sampling) -> Sampling:
        """With a seed of its own for every call."""
        self.round += 1
        return how if how.greedy else replace(how, seed=(how.seed + 7919 * self.round) % 2**62)

    def advance(self) -> Calls:
        if self.target_only or not self.drafting or self.lead:
            return (yield from self.target_writes())
        proposal = yield from self.propose()
        if proposal is None:
            return (yield from self.target_writes())
        ending = proposal.ending == "end of text"
        if proposal.text.strip() and (self.rule.keep or not ending):
            return (yield from self.check(proposal, whole=not ending))
        self.hand_over()  # the draft would end the text or the thinking
        event = yield from self.target_writes()
        if proposal.text.strip():
            self.record(event, "handed over", proposal.text)
        return event

    # -- the draft

    def propose(self) -> Calls:
        """The draft's next step; None: its server fails."""
        draft, servers = self.servers.draft, self.servers
        assert draft is not None
        if servers.clock() < servers.down_until:
            self.lose()
            return None
        bound = self.rule.bind(servers.vocabulary())
        how = self.sampling(self.job.sampling if bound.samples_drafts else GREEDY)
        top = draft.abilities.top if bound.keeps_draft_logits else 0
        tokens = min(self.rule.max_step_tokens, self.left)
        lead, text, ending, answer = "", "", BLANK_LINE, None
        while not text.strip() and ending == BLANK_LINE and len(lead) < 3 * len(BLANK):
            lead += text  # blank lines before the first word belong to the step
            write = partial(draft.write, self.prompt.draft + self.text + lead, tokens, how, [BLANK], top)
            try:
                answer = yield Call(write, "draft")
                text, ending = yield from self.settled(draft, self.prompt.draft + self.text + lead, answer, "draft")
            except RemoteError as error:
                self.lose(error)
                return None
        assert answer is not None
        text = text.rstrip(UNFINISHED) if ending == "length" else text
        cut = min((at for marker in CLOSING if (at := text.find(marker)) >= 0), default=None)
        if cut is not None:
            text, ending = text[:cut], "end of text"
        own = head(answer.pieces, text)
        return Proposal(lead + text, ending, [Piece(lead), *own] if lead and own else own)

    def lose(self, error: RemoteError | None = None) -> None:
        if isinstance(error, Refused):  # this text only: it may be too long for the draft's context
            self.target_only = True
            log.warning("the target writes alone: %s", error)
        elif error is not None:
            self.servers.lose_draft(error)
        self.stats.calls["draft lost"] += not self.lost
        self.lost = True

    def hand_over(self) -> None:
        self.drafting = False
        self.target_only = self.target_only or self.rule.hand_over

    # -- the target

    def check(self, step: Proposal, whole: bool) -> Calls:
        target, rule, job = self.servers.target, self.rule, self.job
        cooled = replace(job.sampling, temperature=min(job.sampling.temperature, rule.bonus_temperature))
        prompt, how = self.prompt.target + self.text + step.text + self.question, self.sampling(cooled)
        last = self.reach(step) if target.abilities.scores_last else None
        answer: Answer = yield Call(lambda: target.score(prompt, how, last))
        scored = self.scored(answer, step, whole, last is not None)
        if scored is None and last is not None:  # the step has more of the target's tokens than was thought
            answer = yield Call(lambda: target.score(prompt, how))
            scored = self.scored(answer, step, whole)
        if scored is None:
            log.warning("%r reports tokens that do not spell the text; its step counts as rejected", target)
            verdict = StepVerdict(0, {}, self.state)
            texts = words(step.text)
        else:
            vocabulary = self.servers.vocabulary()
            position = len(self.prompt) + len(self.tokens)
            verdict = verify_step(rule, scored, vocabulary, job.sampling, position, self.round, self.state)
            self.state = verdict.state
            texts = [piece.text for piece in scored.pieces]
        accepted = verdict.accepted
        passed = accepted == len(texts)
        new, ended = texts[:accepted], False
        if passed and not self.question:
            ended = answer.finish != "length" and not answer.text
            new += [answer.text] if answer.text and UNFINISHED not in answer.text else []
        event = self.commit(new, accepted, ended, verdict)
        event.drafted = len(texts)
        self.stats.observe(len(texts), event.accepted, len(event.relaxed), bonus=len(event.tokens) - event.accepted)
        outcome: StepOutcome = "handed over" if not whole else "accepted" if passed else "rejected"
        self.record(event, outcome, step.text, texts, verdict)
        if passed and whole:
            self.begin_step(len(event.tokens) - event.accepted, len("".join(new[accepted:])))
        elif not whole:
            self.hand_over()
        else:
            self.drafting = False
        return event

    def reach(self, step: Proposal) -> int:
        """More tokens than the target has for a step and the question, in all likelihood."""
        text, own = step.text + self.question, len(step.own) or len(step.text.encode())
        return min(len(text.encode()), own * 3 // 2 + len(self.question) // 2 + 16) + 1

    def scored(self, answer: Answer, step: Proposal, whole: bool, part: bool = False) -> ScoredStep | None:
        """`part`: only the prompt's last tokens are known; if the step takes all, it may have begun before them."""
        pieces = tail(answer.prompt or (), step.text + self.question)
        asked = tail(pieces, self.question) if pieces and self.question else []
        if not pieces or asked is None or (part and len(pieces) == len(answer.prompt or ())):
            return None
        first = answer.pieces[0] if answer.pieces else Piece("")
        after = Piece("", None, asked[0].top) if asked else first
        if asked:
            at, short = len(pieces) - len(asked), len(step.text) - sum(len(p.text) for p in pieces[: -len(asked)])
            between = [replace(pieces[at], text=pieces[at].text[:short])] if short > 0 else []
            pieces = pieces[:at] + between
        before, so_far = self.text[: self.text_start], self.text[self.text_start :]
        valid = self.referee(before, so_far + step.text) if self.referee and self.rule.refereed else None
        return ScoredStep(pieces, after, first if asked else None, step.own or None, whole, valid)

    def target_writes(self) -> Calls:
        """The rest of its step, or of the text."""
        target, how = self.servers.target, self.sampling(self.job.sampling)
        stop = [] if self.target_only else [BLANK]
        tokens = min(self.left, TARGET_CALL_TOKENS if self.target_only else max(1, self.rule.max_step_tokens))
        prompt = self.prompt.target + self.text
        answer: Answer = yield Call(lambda: target.write(prompt, tokens, how, stop))
        text, ending = yield from self.settled(target, prompt, answer, "target", bool(stop))
        if ending == "length" and (cut := text.rstrip(UNFINISHED)):
            text = cut
        if not text and ending == "length":
            target.connection.fail("writes nothing, and says that there is more")
        new = spelled(answer.pieces, text, words)
        event = self.commit(new, 0, ended=ending == "end of text")
        for _ in event.tokens:
            self.stats.observe(drafted=0, accepted=0)
        if ending != "length" and text.strip() and not self.target_only:
            self.stats.step_outcomes["target"] += 1
            self.lead = max(0, self.lead - 1)
            self.begin_step()
        return event

    # -- both

    def settled(self, model: RemoteModel, prompt: str, answer: Answer, to: str, stops: bool = True) -> Calls:
        """What was written and why it ended. A server that does not tell a stop string from the end of the text is
        asked once more: does the text go on?"""
        text, ending = model.ending(answer)
        if ending != "unknown":
            return text, ending
        if not stops:
            return text, "end of text"
        more: Answer = yield Call(partial(model.write, prompt + text, 1, GREEDY), to)
        return (text + BLANK, BLANK_LINE) if more.text or more.finish == "length" else (text, "end of text")

    def begin_step(self, back: int = 0, characters: int = 0) -> None:
        """A step has ended, so many tokens before the end of the answer."""
        self.step_start, self.text_start = len(self.tokens) - back, len(self.text) - characters
        self.drafting = True

    def commit(self, texts: list[str], accepted: int, ended: bool, verdict: StepVerdict | None = None) -> Event:
        """Add tokens to the answer, as many as belong to it."""
        assert self.job.halt is not None
        number = self.servers.pieces.number
        tokens = [number(text) for text in texts[: self.left]]
        halted = self.job.halt(tokens)
        tokens = tokens if halted is None else tokens[:halted]
        whole = len(tokens) == len(texts)
        before = max(0, len(self.text) - LONGEST_MARKER)
        self.text += "".join(texts[: len(tokens)])
        if any(marker in self.text[before:] for marker in CLOSING):
            self.target_only = True  # what follows the thinking is the target's
        self.tokens += tokens
        if self.job.thinking is not None:
            self.job.thinking.feed(tokens)
        finish: FinishReason | None = None
        if halted is not None or (ended and whole):
            finish = "stop"
        elif self.left <= 0:
            finish = "length"
        event = Event(tokens, ["target"] * len(tokens), finish_reason=finish)
        event.accepted = min(accepted, len(tokens))
        relaxed = verdict.relaxed if verdict else {}
        for i in range(event.accepted):
            event.origins[i] = "relaxed" if i in relaxed else "draft"
            if i in relaxed:
                reason, choice = relaxed[i]
                event.relaxed[i] = Relaxed(reason, number(choice) if choice else None)
        self.check_repetition(len(tokens))
        return event

    def record(
        self,
        event: Event,
        outcome: StepOutcome,
        text: str,
        texts: list[str] | None = None,
        verdict: StepVerdict | None = None,
    ) -> None:
        """The step that the draft wrote, with its outcome and what was seen of it."""
        self.stats.step_outcomes[outcome] += 1
        begun = self.tokens[self.step_start : len(self.tokens) - len(event.tokens)]
        own = [self.servers.pieces.number(t) for t in (words(text) if texts is None else texts)]
        evidence = None if verdict is None else verdict.evidence
        event.drafted_steps.append(DraftedStep(outcome, begun + own, self.step_start, evidence))

    def check_repetition(self, new: int) -> None:
        if self.job.rule.lossless or self.target_only:
            return
        loop = self.job.repetition_guard.find(self.tokens, new)
        if loop is not None:
            self.target_only, self.stats.loops = True, self.stats.loops + 1
            log.warning(
                "%s wrote %d tokens %d times in a row; the target goes on alone",
                self.job.rule.name, loop.period, loop.repeats,
            )  # fmt: skip
