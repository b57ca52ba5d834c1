"""What models, drafters and rules return: rows of logits, tokens, drafts, verdicts."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from semspec import tree
from semspec.events import TokenLogprob


@dataclass(slots=True)
class ScoreOutput:
    """Rows for the last `logits_to_keep` tokens fed: row i predicts the token after fed token i."""

    logits: Tensor  # [keep, V]
    hidden: dict[int, Tensor] = field(default_factory=dict)  # layer -> [Score.kept_states, d]
    cached: int = 0  # tokens of the request that a prefix cache had already
    again: int = 0  # earlier tokens that were read once more
    best: np.ndarray[Any, Any] | None = None  # [2, keep, Score.best] the likeliest tokens' log-probabilities, and ids

    @staticmethod
    def join(parts: Sequence[ScoreOutput]) -> ScoreOutput:
        if len(parts) == 1:
            return parts[0]
        best = [p.best for p in parts if p.best is not None]
        return ScoreOutput(
            torch.cat([p.logits for p in parts]),
            _join_hidden(parts),
            best=np.concatenate(best, 1) if best else None,
        )


@dataclass(slots=True)
class DecodeOutput:
    """Tokens generated autoregressively; row i of logits and hidden is what token i was drawn from."""

    tokens: list[int]
    logits: Tensor | None = None  # [n, V] temperature and filters applied; at temperature 0 unprocessed
    hidden: dict[int, Tensor] = field(default_factory=dict)  # layer -> [n, d]
    logprobs: list[TokenLogprob] | None = None

    @staticmethod
    def join(parts: Sequence[DecodeOutput]) -> DecodeOutput:
        if len(parts) == 1:
            return parts[0]
        logits = [p.logits for p in parts if p.logits is not None]
        tokens = [token for p in parts for token in p.tokens]
        logprobs = [lp for p in parts for lp in p.logprobs or []] if parts[0].logprobs is not None else None
        return DecodeOutput(tokens, torch.cat(logits) if logits else None, _join_hidden(parts), logprobs)


def _join_hidden(parts: Sequence[ScoreOutput | DecodeOutput]) -> dict[int, Tensor]:
    return {layer: torch.cat([p.hidden[layer] for p in parts]) for layer in parts[0].hidden}


@dataclass(frozen=True, slots=True)
class DraftSteps:
    """The whole reasoning steps of a draft. Only step rules draft any."""

    ends: tuple[int, ...] = ()  # token counts at which they end
    valid: tuple[bool, ...] = ()  # a referee's decision on each, if the rule needs one
    self_ratings: tuple[float, ...] = ()  # the draft model's own rating of each, if the rule asks for it

    def first(self, tokens: int) -> DraftSteps:
        """Those within the first tokens."""
        n = sum(end <= tokens for end in self.ends)
        return DraftSteps(self.ends[:n], self.valid[:n], self.self_ratings[:n])


NO_STEPS = DraftSteps()


@dataclass(slots=True)
class Draft:
    """A proposal. Without `logits` each token had probability 1. Rows of logits and states belong to `own` tokens."""

    tokens: list[int]
    logits: Tensor | None = None  # [K, V] temperature and filters applied; at temperature 0 unprocessed
    hidden: dict[int, Tensor] = field(default_factory=dict)  # layer -> [K, d]
    steps: DraftSteps = NO_STEPS
    early_exit: bool = False  # the draft model stopped because it was not confident enough
    own: list[int] | None = None  # the draft as its model's tokenizer has it; None: both models have the same tokens
    own_ends: tuple[int, ...] = ()  # how many of these spell the draft up to each of `tokens`
    parents: tuple[int, ...] = ()  # of a tree draft: each token's parent, see tree.py; none: a chain

    @property
    def is_candidates(self) -> bool:
        """Whether its steps are candidates for one place, and not one after the other."""
        return bool(self.parents and self.steps.ends)

    @property
    def longest(self) -> int:
        """Tokens on its longest path."""
        return max(tree.depths(self.parents), default=-1) + 1 if self.parents else len(self.tokens)

    def only(self, some: Iterable[int]) -> Draft:
        """Of a tree draft only these tokens, without those that follow others."""
        left, parents = tree.pruned(self.parents, some)
        logits = None if self.logits is None else self.logits[left]
        return Draft([self.tokens[i] for i in left], logits, parents=parents)

    @property
    def own_tokens(self) -> list[int]:
        return self.tokens if self.own is None else self.own

    def own_count(self, n: int) -> int:
        """How many own tokens the first n stand for."""
        return n if self.own is None else self.own_ends[n - 1] if n else 0

    @property
    def segments(self) -> list[tuple[int, int]]:
        """Ranges that are verified separately: every whole step, then what follows the last one, if anything."""
        if not (ends := self.steps.ends):
            return [(0, len(self.tokens))]
        rest = ends[-1] < len(self.tokens)
        return list(pairwise([0, *ends, *([len(self.tokens)] if rest else [])]))

    def first(self, n: int) -> Draft:
        """Its first n tokens."""
        if n >= len(self.tokens):
            return self
        if self.parents:
            return self.only(range(n))
        rows = self.own_count(n)
        logits = None if self.logits is None else self.logits[:rows]
        hidden = {layer: states[:rows] for layer, states in self.hidden.items()}
        own, ends = None if self.own is None else self.own[:rows], self.own_ends[:n]
        return Draft(self.tokens[:n], logits, hidden, self.steps.first(n), self.early_exit, own, ends)

    @staticmethod
    def join(parts: Sequence[Draft]) -> Draft:
        """Consecutive parts as one draft, without its steps."""
        if not parts:
            return Draft([])
        whole = DecodeOutput.join([DecodeOutput(part.tokens, part.logits, part.hidden) for part in parts])
        draft = Draft(whole.tokens, whole.logits, whole.hidden)
        for part in parts:
            if part.own is not None:
                draft.own_ends += tuple(len(draft.own or []) + end for end in part.own_ends)
                draft.own = (draft.own or []) + part.own
        return draft

    @staticmethod
    def side_by_side(candidates: Sequence[Draft]) -> Draft:
        """Whole steps, each of them a candidate for the same place, as one draft; of one candidate a chain."""
        lengths = [len(candidate.tokens) for candidate in candidates]
        draft = Draft.join(candidates)
        draft.steps, draft.parents = DraftSteps(tuple(accumulate(lengths))), tree.side_by_side(lengths)
        return draft

    @property
    def candidates(self) -> list[Draft]:
        """The tokens of each candidate; a draft that has none is its only one."""
        if not self.is_candidates:
            return [self]
        return [Draft(self.tokens[begin:end], steps=DraftSteps((end - begin,))) for begin, end in self.segments]


@dataclass(slots=True)
class Verdict:
    """A rule's decision about one draft."""

    accepted: int
    next: int
    relaxed: tuple[int, ...] = ()  # draft positions that were accepted against the target's own choice
    target_tokens: tuple[int, ...] = ()  # the target's own choice at each of them
    evidence: tuple[tuple[float, ...], ...] = ()  # the numbers that decided each, for Rule.reason
    logprobs: list[TokenLogprob] | None = None  # of the accepted tokens and of `next`
    state: Tensor | None = None  # given to the rule with this sequence's next draft
    last: int = -1  # of a tree draft: the last accepted token,
    path: tuple[int, ...] = ()  # and all of them
    worth: float = -math.inf  # of an accepted step, by which the best of several candidates is chosen

    @property
    def taken(self) -> Sequence[int]:
        """The accepted tokens of the draft."""
        return self.path or range(self.accepted)

    @staticmethod
    def join(parts: Sequence[Verdict], lengths: Sequence[int]) -> Verdict:
        """Verdicts on the segments of one draft, of these lengths, as one: nothing after a rejection is accepted."""
        if len(parts) == 1:
            return parts[0]
        whole = Verdict(0, parts[0].next)
        for part, length in zip(parts, lengths, strict=True):
            whole.relaxed += tuple(whole.accepted + i for i in part.relaxed)
            whole.target_tokens += part.target_tokens
            whole.evidence += part.evidence
            whole.accepted, whole.next, whole.state = whole.accepted + part.accepted, part.next, part.state
            if part.accepted != length:
                break
        return whole

    @staticmethod
    def best(parts: Sequence[Verdict], begins: Sequence[int]) -> Verdict:
        """Of verdicts on candidates for one step, which begin there in the draft: the accepted one that is worth most;
        if all are rejected, the one of which most is accepted all the same. Of equal ones the first."""

        def value(i: int) -> tuple[float, int]:
            return parts[i].worth, parts[i].accepted if parts[i].worth == -math.inf else 0

        chosen = max(range(len(parts)), key=value)
        verdict, begin = parts[chosen], begins[chosen]
        verdict.path = tuple(range(begin, begin + verdict.accepted))
        verdict.last = verdict.path[-1] if verdict.path else -1
        return verdict
