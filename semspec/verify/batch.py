"""The drafts of many sequences laid side by side, as rules see them, and their decisions; collate.py makes the one and
brings back the other.

Drafts have different lengths. Small things (ids, masks, decisions) are padded to the longest draft K, one sequence a
row: [B, K]. Big things (logits) stay ragged: the rows of all sequences one after the other, [R, V]. `rows` maps from
the padded view into the ragged one.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from semspec.errors import OLD_NAME
from semspec.sampling import noise
from semspec.sampling.draw import Processed, SamplingRows, best, softmax
from semspec.verify.trees import DraftTrees

FORMER = {
    "branches": "trees",
    "beliefs": "soft_target_probs",
    "belief_in_draft": "soft_target_prob_of_draft",
    "draft_beliefs": "draft_probs",
    "draft_beliefs_by_token": "draft_probs_by_token",
    "marks": "self_ratings",
}


@dataclass
class DraftBatch:
    """The drafts of B sequences with the target's logits for them. V is the vocabulary both models share."""

    ids: Tensor  # [B, K] draft tokens, -1 after the end of a shorter draft
    counts: Tensor  # [B] draft lengths
    target_logits: Tensor  # [R, V] processors applied, no temperature; a sequence's first row predicts its first token.
    # After the rows of all sequences there may be others, with anything in them; the same with D.
    first_row: Tensor  # [B] where in R a sequence begins; its draft of k tokens has at least k + 1 rows
    draft_logits: Tensor | None  # [D, V] what each draft token was drawn from, see types.Draft; None: all were certain
    first_draft: Tensor  # [B] where in D a sequence begins
    target_sampling: SamplingRows  # [R]
    seed: Tensor  # [B]
    position: Tensor  # [B] index in its sequence of the first draft token
    round: Tensor  # [B]
    state: Tensor | None = None  # [B, S] what the rule returned with each sequence's previous draft
    protected: Tensor | None = None  # [V] tokens that no rule may relax
    hidden: dict[int, Tensor] | None = None  # layer -> [R, d] of the target
    draft_hidden: dict[int, Tensor] | None = None  # layer -> [D, d] of the draft model
    whole: Tensor | None = None  # [B] which are whole reasoning steps; None: all
    valid: Tensor | None = None  # [B] which of those a referee accepts
    self_ratings: Tensor | None = None  # [B] the draft model's own rating of each step, where a rule asks for it
    own_ids: Tensor | None = None  # [B, O] the draft model's own tokens, which D has rows of; None: the same as ids
    own_ends: Tensor | None = None  # [B, K] how many of them are needed up to each draft token
    trees: DraftTrees | None = None  # of tree drafts, whose tokens are in any order; None: chains
    places: Tensor | None = None  # [B, K + 1] of a path through such a draft: where its rows are

    def __getattr__(self, name: str) -> Any:
        """What rules of other packages call by its name in the last release."""
        if name not in FORMER:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        warnings.warn(f"{name} is now {FORMER[name]}; {OLD_NAME}", DeprecationWarning, 2)
        return getattr(self, FORMER[name])

    @cached_property
    def positions(self) -> Tensor:
        """[K + 1] 0, 1, ... K"""
        return torch.arange(self.ids.shape[1] + 1, device=self.ids.device)

    @cached_property
    def exists(self) -> Tensor:
        """[B, K] where there is a draft token"""
        return self.positions[:-1] < self.counts[:, None]

    @cached_property
    def rows(self) -> Tensor:
        """[B, K + 1] the row of R that predicts draft token k; after the draft's end, its bonus row again. Of a tree
        draft: the row that follows draft token k - 1"""
        if self.places is not None:
            return self.first_row[:, None] + self.places
        return self.first_row[:, None] + torch.minimum(self.positions, self.counts[:, None])

    @cached_property
    def draft_rows(self) -> Tensor:
        """[B, K] the row of D that draft token k was drawn from; after the end, any valid row"""
        last = (self.counts - 1).clamp_min(0)[:, None]
        assert self.draft_logits is not None
        at = torch.minimum(self.positions[:-1], last) if self.places is None else (self.places[:, 1:] - 1).clamp_min(0)
        return (self.first_draft[:, None] + at).clamp_max(max(self.draft_logits.shape[0] - 1, 0))

    def own_counts(self, counts: Tensor | None = None) -> Tensor:
        """[B] how many of the draft model's own tokens the first counts [B] tokens of each draft stand for"""
        counts = self.counts if counts is None else counts
        if self.own_ends is None:
            return counts
        return torch.where(counts > 0, self.own_ends.gather(1, (counts - 1).clamp_min(0)[:, None])[:, 0], 0)

    def own(self, counts: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """[B, O] each: the draft model's own tokens of the first counts [B] of each draft, their rows of D, and where
        there is one"""
        ids = self.safe_ids if self.own_ids is None else self.own_ids.clamp_min(0)
        assert self.draft_logits is not None
        n, at = self.own_counts(counts)[:, None], torch.arange(ids.shape[1], device=ids.device)
        rows = self.first_draft[:, None] + torch.minimum(at, (self.own_counts() - 1).clamp_min(0)[:, None])
        return ids, rows.clamp_max(max(self.draft_logits.shape[0] - 1, 0)), at < n

    @cached_property
    def target(self) -> Processed:
        """The target's rows with temperature and filters applied: as logits, as probabilities, or to draw from"""
        return Processed(self.target_logits, self.target_sampling)

    @property
    def target_probs(self) -> Tensor:
        """[R, V] the distributions that the target would draw from"""
        return self.target.probs

    @cached_property
    def soft_target_probs(self) -> Tensor:
        """[R, V] the target's probabilities: as drawn from when sampling, at temperature 1 where it is greedy (and
        `target_probs` one-hot)"""
        if not self.target_sampling.use.some_greedy:
            return self.target_probs
        raw = softmax(self.target_logits)
        if self.target_sampling.all_greedy:
            return raw
        return torch.where((self.target_sampling.temperature == 0.0)[:, None], raw, self.target_probs)

    def soft_target_prob_of_draft(self) -> Tensor:
        """[B, K] `soft_target_probs` of each draft token"""
        return self.soft_target_probs[self.rows[:, :-1], self.safe_ids]

    @cached_property
    def safe_ids(self) -> Tensor:
        """[B, K] draft tokens, with 0 for padding, for gathers"""
        return self.ids.clamp_min(0)

    def uniform(self, purpose: int) -> Tensor:
        """[B, K + 1] noise for each draft position and the one after; fresh in every round but for TARGET"""
        stream = noise.stream(purpose, self.round * (purpose != noise.TARGET))
        at = self.positions
        if self.places is not None:  # each token of a tree has its own, so siblings are decided apart
            at = torch.cat([self.places[:, 1:] - 1, self.places[:, -1:]], 1)
        return noise.uniform(self.seed[:, None], self.position[:, None] + at, stream[:, None])

    def key(self, purpose: int) -> Tensor:
        """[B, K + 1] the same as keys, for draws of tokens"""
        stream = noise.stream(purpose, self.round * (purpose != noise.TARGET))
        return noise.key(self.seed[:, None], self.position[:, None] + self.positions, stream[:, None])

    def target_choice(self, purpose: int = noise.TARGET) -> Tensor:
        """[B, K + 1] what the target itself writes at each position: its argmax, or its draw when sampling; with
        another purpose than TARGET, another draw"""
        if self.target_sampling.all_greedy:
            return best(self.target_logits)[self.rows]
        key = self.key(purpose)
        if self.places is not None:  # paths share rows: each is drawn from once
            inside = key.gather(1, torch.minimum(self.positions, self.counts[:, None])).flatten()
            keys = torch.zeros_like(self.target_logits[:, 0], dtype=torch.long).scatter(0, self.rows.flatten(), inside)
            return self.target.choose(keys)[self.rows]
        return self.target.choose(key.flatten(), self.rows.flatten()).view_as(self.rows)

    def target_prob_of_draft(self) -> Tensor:
        """[B, K] the target's probability of each draft token"""
        return self.target_probs[self.rows[:, :-1], self.safe_ids]

    @property
    def all_certain(self) -> bool:
        """Whether every draft token was its drafter's only choice: by lookup, or greedy"""
        return self.draft_logits is None or self.target_sampling.all_greedy

    @cached_property
    def greedy(self) -> Tensor:
        """[B] which sequences are greedy, in a batch where some sample"""
        return self.target_sampling.temperature[self.first_row] == 0.0

    @cached_property
    def draft_probs(self) -> Tensor:
        """[D, V] the draft model's probabilities: as drawn from when sampling, at temperature 1 where greedy"""
        assert self.draft_logits is not None
        return softmax(self.draft_logits)

    def draft_probs_by_token(self) -> Tensor:
        """[B, K, V] the drafter's probabilities at each draft token; a lookup gives 1 to the token it found"""
        if self.draft_logits is None:
            return self._one_hot(self.safe_ids)
        return self.draft_probs[self.draft_rows]

    def draft_prob_of_draft(self) -> Tensor:
        """[B, K] the probability with which the drafter drew each draft token"""
        ones = torch.ones_like(self.safe_ids, dtype=torch.float32)
        if self.all_certain:
            return ones
        return torch.where(self.greedy[:, None], ones, self.draft_probs[self.draft_rows, self.safe_ids])

    def draft_distribution(self, k: Tensor) -> Tensor:
        """[B, V] what draft token k[b] was drawn from; all zero after the draft's end, where nothing was drawn"""
        inside = k < self.counts
        if not self.ids.shape[1]:
            return torch.zeros_like(self.target_probs[self.first_row])
        at = k.clamp_max(self.ids.shape[1] - 1)[:, None]
        q = self._one_hot(self.safe_ids.gather(1, at)[:, 0])
        if not self.all_certain:
            q = torch.where(self.greedy[:, None], q, self.draft_probs[self.draft_rows.gather(1, at)[:, 0]])
        return q * inside[:, None]

    def _one_hot(self, ids: Tensor) -> Tensor:
        """[...] -> [..., V]"""
        shape = [*ids.shape, self.target_logits.shape[-1]]
        return torch.zeros(shape, device=ids.device).scatter_(-1, ids[..., None], 1.0)

    def target_distribution(self, k: Tensor) -> Tensor:
        """[B, V] the target's distribution at draft position k[b]"""
        return self.target_probs[self.rows.gather(1, k[:, None])[:, 0]]


@dataclass
class Decisions:
    """A rule's decisions for B sequences, still on the device."""

    accepted: Tensor  # [B]
    next: Tensor  # [B]
    relaxed: Tensor | None = None  # [B, K] accepted against the target's choice
    state: Tensor | None = None  # [B, S]
    target_tokens: Tensor | None = None  # [B, K] the target's choice
    evidence: Tensor | None = None  # [B, K, E] float32, the numbers that `Rule.reason` explains
    last: Tensor | None = None  # [B] of tree drafts: the last accepted token, -1: none; K is along its path
    worth: Tensor | None = None  # [B] of accepted steps, where several candidates are judged; -inf: rejected


def accepted_prefix(ok: Tensor, exists: Tensor) -> Tensor:
    """[B, K] -> [B] how many draft tokens are accepted before the first rejected one."""
    return (ok & exists).long().cumprod(-1).sum(-1)
