"""Draft batches for rules to verify: a few written by hand, or very many drawn from random languages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from semspec.sampling import noise
from semspec.sampling.draw import SamplingRows, choose, process
from semspec.types import GREEDY, Sampling
from semspec.verify import Decisions, DraftBatch, Rule
from tests.chi import chi_square, count

CPU = torch.device("cpu")


# -- by hand


@dataclass(frozen=True)
class One:
    """One sequence's draft, in plain lists."""

    target: list[list[float]]  # logits, one row more than there are draft tokens
    ids: list[int]
    draft: list[list[float]] | None = None  # logits as of types.Draft, a row for each token; None: a certain drafter
    sampling: Sampling = GREEDY
    position: int = 0
    round: int = 0


def build(*ones: One) -> DraftBatch:
    """Batch drafts, by the definition of `DraftBatch`."""
    longest = max(len(one.ids) for one in ones)
    heights = [len(one.target) for one in ones]
    counts = [len(one.ids) for one in ones]
    certain = all(one.draft is None for one in ones)
    draft_rows = [row for one in ones for row in one.draft or []]
    vocab = len(ones[0].target[0])
    return DraftBatch(
        ids=torch.tensor([one.ids + [-1] * (longest - len(one.ids)) for one in ones]).view(len(ones), longest).long(),
        counts=torch.tensor(counts),
        target_logits=torch.tensor([row for one in ones for row in one.target]),
        first_row=torch.tensor([sum(heights[:i]) for i in range(len(ones))]),
        draft_logits=None if certain else torch.tensor(draft_rows).view(-1, vocab),
        first_draft=torch.tensor([sum(counts[:i]) for i in range(len(ones))]),
        target_sampling=SamplingRows.of([one.sampling for one in ones], heights, CPU),
        seed=torch.tensor([one.sampling.seed for one in ones]),
        position=torch.tensor([one.position for one in ones]),
        round=torch.tensor([one.round for one in ones]),
    )


def outcomes(rule: Rule, *ones: One) -> list[tuple[int, int]]:
    """(accepted, next) of each."""
    decisions = rule.verify(build(*ones))
    return list(zip(decisions.accepted.tolist(), decisions.next.tolist(), strict=True))


def decide(rule: Rule, ones: list[One], protected: frozenset[int] = frozenset()) -> list[tuple[int, int, list[int]]]:
    """(accepted, next, the relaxed ones) of each."""
    drafts = build(*ones)
    drafts.protected = torch.tensor([v in protected for v in range(drafts.target_logits.shape[1])])
    d = rule.verify(drafts)
    assert d.relaxed is not None
    relaxed = [[i for i, r in enumerate(row) if r] for row in d.relaxed.tolist()]
    return list(zip(d.accepted.tolist(), d.next.tolist(), relaxed, strict=True))


def hot(token: int, vocab: int = 6) -> list[float]:
    """Logits of a model that is sure of one token."""
    return [9.0 * (i == token) for i in range(vocab)]


def random_one(seed: int, k: int, sampling: Sampling, vocab: int = 6, certain: bool = False) -> One:
    """A draft of k tokens drawn from random logits, with random target rows for it."""
    random = torch.Generator().manual_seed(seed)
    target = torch.randn(k + 1, vocab, generator=random)
    raw = torch.randn(k, vocab, generator=random)
    own = process(raw, SamplingRows.of([sampling], [k], CPU))
    ids = torch.multinomial(own.softmax(-1), 1, generator=random)[:, 0].tolist() if k else []
    own = raw if sampling.greedy else own
    draft = None if certain else own.tolist()
    return One(target.tolist(), ids, draft, replace(sampling, seed=seed), position=seed % 50, round=seed % 7)


# -- by the hundred thousand


class Language:
    """Random logits for every state, which is made of the last `memory` tokens."""

    def __init__(self, vocab: int, memory: int, seed: int, spread: float = 1.2) -> None:
        self.vocab_size, self.states = vocab, vocab**memory
        self.table = torch.randn(self.states, vocab, generator=torch.Generator().manual_seed(seed)) * spread

    def near(self, distance: float, seed: int) -> Language:
        """A language like this one: a draft model for it."""
        other = object.__new__(Language)
        other.vocab_size, other.states = self.vocab_size, self.states
        noise = torch.randn(self.table.shape, generator=torch.Generator().manual_seed(seed))
        other.table = self.table + noise * distance
        return other

    def processed(self, sampling: Sampling) -> Tensor:
        """[states, V]"""
        return process(self.table, SamplingRows.of([sampling], [self.states], CPU))

    def after(self, state: Tensor, token: Tensor) -> Tensor:
        return (state * self.vocab_size + token) % self.states

    def joint(self, length: int, sampling: Sampling) -> Tensor:
        """[V ** length] the exact probability of every text of this length, from state 0."""
        probs = self.processed(sampling).softmax(-1).double()
        joint, state = torch.ones(1, dtype=torch.float64), torch.zeros(1, dtype=torch.long)
        for _ in range(length):
            joint = (joint[:, None] * probs[state]).flatten()
            state = self.after(state[:, None], torch.arange(self.vocab_size)).flatten()
        return joint


@dataclass
class Crowd:
    """N sequences that differ only in their seeds: their tokens and states."""

    target: Language
    draft: Language
    sampling: Sampling
    certain: bool  # the drafter is greedy and gives no distribution
    tokens: Tensor  # [N, length] -1 where there is no token yet
    lengths: Tensor  # [N]
    state: Tensor  # [N]

    @staticmethod
    def of(target: Language, draft: Language, n: int, length: int, sampling: Sampling, certain: bool = False) -> Crowd:
        zeros = torch.zeros(n, dtype=torch.long)
        return Crowd(target, draft, sampling, certain, torch.full([n, length], -1), zeros, zeros)

    @property
    def seeds(self) -> Tensor:
        return torch.arange(len(self.tokens))

    def drafts(self, k: int, round: int) -> DraftBatch:
        """All sequences draft k tokens, with the noise that the real drafter would use in this round."""
        n = len(self.tokens)
        processed = self.draft.processed(self.sampling)
        stream = torch.tensor(noise.stream(noise.DRAFT, round))
        state, states, ids = self.state, [self.state], []
        for i in range(k):
            key = noise.key(self.seeds, self.lengths + i, stream)
            token = processed[state].argmax(-1) if self.certain else choose(processed[state], key)
            state = self.target.after(state, token)
            ids.append(token)
            states.append(state)
        rows = torch.stack(states, 1)  # [N, K + 1]
        return DraftBatch(
            ids=torch.stack(ids, 1),
            counts=torch.full([n], k),
            target_logits=self.target.table[rows.flatten()],
            first_row=torch.arange(n) * (k + 1),
            draft_logits=None if self.certain else processed[rows[:, :-1].flatten()],
            first_draft=torch.arange(n) * k,
            target_sampling=SamplingRows.of([self.sampling], [n * (k + 1)], CPU),
            seed=self.seeds,
            position=self.lengths,
            round=torch.full([n], round),
        )

    def commit(self, drafts: DraftBatch, decisions: Decisions) -> None:
        """Append the accepted tokens and the token that follows."""
        for i in range(drafts.ids.shape[1] + 1):
            drafted = drafts.ids[:, min(i, drafts.ids.shape[1] - 1)]
            token = torch.where(decisions.accepted == i, decisions.next, drafted)
            self._write(token, i <= decisions.accepted)

    def complete(self) -> None:
        """The target generates the missing tokens."""
        probs = self.target.processed(self.sampling).softmax(-1)
        random = torch.Generator().manual_seed(12345)
        for _ in range(self.tokens.shape[1]):
            token = torch.multinomial(probs[self.state], 1, generator=random)[:, 0]
            self._write(token, torch.ones_like(token, dtype=torch.bool))

    def _write(self, token: Tensor, where: Tensor) -> None:
        where = where & (self.lengths < self.tokens.shape[1])
        index = torch.arange(len(self.tokens))[where]
        self.tokens[index, self.lengths[where]] = token[where]
        self.state = torch.where(where, self.target.after(self.state, token), self.state)
        self.lengths = self.lengths + where

    def p_value(self) -> float:
        """How likely texts like these are if the target wrote them."""
        length = self.tokens.shape[1]
        code = torch.zeros(len(self.tokens), dtype=torch.long)
        for i in range(length):
            code = code * self.target.vocab_size + self.tokens[:, i]
        return chi_square(count(code, self.target.vocab_size**length), self.target.joint(length, self.sampling))


def fit(
    rule: Rule,
    target: Language,
    draft: Language,
    sampling: Sampling,
    certain: bool = False,
    k: int = 3,
    n: int = 100_000,
    rounds: Sequence[int] = (0,),
) -> float:
    """The p-value of the joint distribution of the first k + 1 tokens, generated in one round or more.

    `rounds` are the round numbers given to the rule; drafts always have fresh noise.
    """
    crowd = Crowd.of(target, draft, n, k + 1, sampling, certain)
    for i, round in enumerate(rounds):
        drafts = crowd.drafts(k, i)
        drafts.round = torch.full_like(drafts.round, round)
        crowd.commit(drafts, rule.verify(drafts))
    crowd.complete()
    return crowd.p_value()


# -- rules that are wrong on purpose


@dataclass(frozen=True)
class ResamplesFromTarget(Rule):
    """Speculative sampling, but a rejected token is replaced by a draw from p instead of the residual."""

    name = "biased-resample"
    lossless = True
    needs_draft_logits = True

    def verify(self, drafts: DraftBatch) -> Decisions:
        p, q = drafts.target_prob_of_draft(), drafts.draft_prob_of_draft()
        ok = drafts.uniform(noise.ACCEPT)[:, :-1] * q < p
        accepted = ok.long().cumprod(-1).sum(-1)
        key = drafts.key(noise.RESIDUAL).gather(1, accepted[:, None])[:, 0]
        return Decisions(accepted, choose(drafts.target_distribution(accepted).log(), key))


@dataclass(frozen=True)
class AcceptsEverything(Rule):
    name = "biased-accept"
    lossless = True
    needs_draft_logits = True

    def verify(self, drafts: DraftBatch) -> Decisions:
        key = drafts.key(noise.RESIDUAL).gather(1, drafts.counts[:, None])[:, 0]
        return Decisions(drafts.counts, choose(drafts.target_distribution(drafts.counts).log(), key))
