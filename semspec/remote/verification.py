"""From what servers report about a step to the rows a rule reads, and the rule's verdict.

A step has a vocabulary of its own: the tokens it is made of, the likeliest ones at each of its positions, and one that
stands for all others and has their probability. So a row is a whole distribution, and rules, evidence and judges are
those of models in this process. What is lost is the tail: an entropy counts it as one token.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from semspec.errors import BadRequest
from semspec.probe.evidence import confidence, evidence
from semspec.probe.probe import Probe
from semspec.remote.answers import Piece
from semspec.remote.pieces import MARKERS
from semspec.types import Draft, DraftSteps, Sampling, ScoreOutput, Verdict, VerifyRequest
from semspec.verify.base import Rule
from semspec.verify.decide import decide
from semspec.verify.step_rule import StepRule

OTHERS = 0  # the token that stands for all that a row does not name
NO_STATES = (
    "this pair is two servers, which report log-probabilities and no hidden states; semantic+ with a judge probe of "
    "evidence alone works (semspec probe fit without --judge-states, then semantic+:probes=DIR), as do specreason, "
    "likely-step and the controls of steps"
)


class JudgeProbes:
    """The judge probes of a pair's rules, by folder, read once."""

    def __init__(self, own: str = "") -> None:
        self.own = own  # the folder of the one that came with the pair; "": none did
        self._read: dict[str, Probe] = {}

    def get(self, folder: str) -> Probe:
        place = folder or self.own
        if not place:
            raise BadRequest(
                "there is no judge probe for these servers, which semantic+ needs; make one of evidence alone with "
                "`semspec probe fit`, and name its folder: semantic+:probes=DIR"
            )
        if place not in self._read:
            probe = Probe.load(f"{place}/judge", None)
            if probe.layers:
                raise BadRequest(f"the judge probe in {place} reads hidden states, and {NO_STATES}")
            self._read[place] = probe
        return self._read[place]


class StepVocabulary:
    """The tokens of one step, by text; for a rule, the resources of a pair (`verify.RuleResources`)."""

    def __init__(self, judge_probes: JudgeProbes, turn: tuple[str, str] | None = None) -> None:
        self._judge_probes = judge_probes
        self._turn = turn  # what the target's chat template has around a user's next turn
        self._ids: dict[str, int] = {}
        self.texts = [""]

    def id(self, text: str) -> int:
        if text not in self._ids:
            self._ids[text] = len(self.texts)
            self.texts.append(text)
        return self._ids[text]

    def rows(self, pieces: Sequence[Piece]) -> Tensor:
        """[pieces, V] log-probabilities; call it when every text has its id."""
        table = torch.full((len(pieces), len(self.texts)), -math.inf)
        for row, piece in zip(table, pieces, strict=True):
            known = dict(piece.top)
            if piece.logprob is not None:
                known[piece.text] = max(piece.logprob, known.get(piece.text, -math.inf))
            for text, logprob in known.items():
                row[self.id(text)] = logprob
            rest = 1.0 - sum(math.exp(logprob) for logprob in known.values())
            row[OTHERS] = math.log(rest) if rest > 1e-9 else -math.inf
            if not known:
                row[OTHERS] = 0.0
        return table

    # -- as resources

    def tokens_of(self, text: str) -> list[int]:
        return [self.id(text)]  # whatever its length: what it is made of is the server's business

    def next_turn(self, question: str) -> list[int]:
        if self._turn is None:
            raise BadRequest("the target's server does not tell its chat template, so it cannot be asked in a new turn")
        return [self.id(question.join(self._turn))]

    def tokens_with(self, word: str) -> Tensor:
        return torch.tensor([word in text.lower() for text in self.texts])

    def probes(self, folder: str) -> tuple[Probe, Probe]:
        raise BadRequest(NO_STATES)

    def judge_probe(self, folder: str) -> Probe:
        return self._judge_probes.get(folder)

    def numbers(self) -> Tensor:
        return torch.tensor([any(letter.isdigit() for letter in text) for text in self.texts])

    def draft_numbers(self) -> Tensor | None:
        return None  # both models' tokens are texts of one vocabulary


@dataclass(slots=True)
class ScoredStep:
    """What both servers report about one step."""

    pieces: list[Piece]  # the step in the target's tokens
    after: Piece  # what the target writes after it
    asked: Piece | None = None  # and after the rule's question, if it has one
    own: list[Piece] | None = None  # the step in the draft's tokens
    whole: bool = True  # False: the draft would end the text with it
    valid: bool | None = None  # a referee's decision


@dataclass(slots=True)
class StepVerdict:
    """A rule's verdict on a step."""

    accepted: int  # tokens
    relaxed: dict[int, tuple[str, str]]  # of these, by index: why, and the target's own choice
    state: Tensor | None = None  # given to the rule with the next step
    evidence: Tensor | None = None  # [all evidence] for those who collect it; with the draft's confidence, if known


def question_of(rule: StepRule, vocabulary: StepVocabulary) -> str:
    """What a rule wants the target to read after a step."""
    bound = rule.bind(vocabulary)
    step = vocabulary.id("a step")
    return "".join(vocabulary.texts[i] for i in bound.layout([step])[1:])


def verify_step(
    rule: StepRule,
    step: ScoredStep,
    vocabulary: StepVocabulary,
    sampling: Sampling,
    position: int,
    round: int,
    state: Tensor | None = None,
) -> StepVerdict:
    """The rule's decision, by its own `verify`; `state` is what it returned with the step before."""
    ids = [vocabulary.id(piece.text) for piece in step.pieces]
    own = None if step.own is None else [vocabulary.id(piece.text) for piece in step.own]
    for piece in (*step.pieces, *(step.own or ()), step.after, *([step.asked] if step.asked else [])):
        for text in (piece.text, *piece.top):
            vocabulary.id(text)
    bound: Rule = rule.bind(vocabulary)
    if bound.keeps_draft_logits and step.own is None:  # the rule cannot tell, so it is safe to reject
        return StepVerdict(0, {}, state)
    asked = len(bound.layout(ids)) - len(ids)  # texts of its question, each of which counts as a token
    read = [*step.pieces, step.after, *[Piece("")] * (asked - 1), *([step.asked] if step.asked else [])]
    target = vocabulary.rows(read)
    valid = () if step.valid is None else (step.valid,)
    draft = Draft(ids, steps=DraftSteps((len(ids),) if step.whole else (), valid))
    drawn = sampling if isinstance(bound, StepRule) and bound.samples_drafts else Sampling()
    if step.own is not None and own is not None:
        drafted = vocabulary.rows(step.own)
        draft.own, draft.own_ends = own, _ends(step.pieces, step.own)
        draft.logits = drafted / (1.0 if drawn.greedy else drawn.temperature)  # as the loop has them
    protected = torch.tensor([text in MARKERS for text in vocabulary.texts])
    request = VerifyRequest(bound, draft, ScoreOutput(target), sampling, position, round, state, None, protected)
    (verdict,) = decide(bound, [request])
    reasons, seen = _reasons(bound, verdict, vocabulary), evidence_of(step.pieces, vocabulary, step.own)
    return StepVerdict(verdict.accepted, reasons, verdict.state, seen)


def _reasons(rule: Rule, verdict: Verdict, vocabulary: StepVocabulary) -> dict[int, tuple[str, str]]:
    found = {}
    for n, i in enumerate(verdict.relaxed):
        choice = vocabulary.texts[verdict.target_tokens[n]] if verdict.target_tokens else ""
        found[i] = (rule.reason(verdict.evidence[n] if verdict.evidence else ()), choice)
    return found


def evidence_of(pieces: Sequence[Piece], vocabulary: StepVocabulary, own: Sequence[Piece] | None = None) -> Tensor:
    """[all evidence] of a step in the target's tokens; with it in the draft's, the draft's confidence as well."""
    for piece in (*pieces, *(own or ())):
        for text in (piece.text, *piece.top):
            vocabulary.id(text)
    parts = [evidence(vocabulary.rows(pieces), *_at(pieces, vocabulary), vocabulary.numbers())]
    if own:
        parts.append(confidence(vocabulary.rows(own), *_at(own, vocabulary)))
    return torch.cat(parts, -1)[0]


def _at(pieces: Sequence[Piece], vocabulary: StepVocabulary) -> tuple[Tensor, Tensor, Tensor]:
    """Rows, tokens and which exist, of one step whose rows are the first."""
    ids = [vocabulary.id(piece.text) for piece in pieces]
    return torch.arange(len(ids))[None], torch.tensor([ids]), torch.ones(1, len(ids), dtype=torch.bool)


def _ends(pieces: Sequence[Piece], own: Sequence[Piece]) -> tuple[int, ...]:
    """How many of the draft's tokens are needed up to the end of each of the target's."""
    ends, taken, length, reached = list[int](), 0, 0, 0
    for piece in pieces:
        reached += len(piece.text)
        while taken < len(own) and length < reached:
            length += len(own[taken].text)
            taken += 1
        ends.append(taken)
    return (*ends[:-1], len(own)) if ends else ()
