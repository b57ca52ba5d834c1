"""What a verifier is: a pure, vectorised function of tensors.

A rule sees the target's logits for the drafts of many sequences at once and says, for each, how many draft tokens
stand and which token follows. There is no model inside, no cache, no I/O and no host synchronisation: every shape is
known on the host before the call, so the same function serves the Executor, vLLM and transformers.

Drafts have different lengths. Small things (ids, masks, decisions) are padded to the longest draft K, one sequence a
row: [B, K]. Big things (logits) stay ragged: the rows of all sequences one after the other, [R, V]. `rows` maps from
the padded view into the ragged one.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, ClassVar, Literal, Protocol

import torch
from torch import Tensor

from semspec.sampling import noise
from semspec.sampling.draw import SamplingRows, best, choose, process
from semspec.types import DraftRequest, Sampling, Verdict, VerifyRequest

if TYPE_CHECKING:
    from semspec.probe.head import Probe

GREEDY = Sampling()


@dataclass
class DraftBatch:
    """The drafts of B sequences with what the target said about them. V is the vocabulary both models share."""

    ids: Tensor  # [B, K] draft tokens, -1 behind a shorter draft
    counts: Tensor  # [B] draft lengths
    target_logits: Tensor  # [R, V] as the model gave them; a sequence's first row predicts its first draft token
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
    whole: Tensor | None = None  # [B] which are whole steps of reasoning; None: all
    valid: Tensor | None = None  # [B] which of those a referee calls valid

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
        """[B, K + 1] the row of R that predicts draft token k; behind the draft's end, its bonus row again"""
        return self.first_row[:, None] + torch.minimum(self.positions, self.counts[:, None])

    @cached_property
    def draft_rows(self) -> Tensor:
        """[B, K] the row of D that draft token k was drawn from; behind the end, some row that exists"""
        last = (self.counts - 1).clamp_min(0)[:, None]
        assert self.draft_logits is not None
        return (self.first_draft[:, None] + torch.minimum(self.positions[:-1], last)).clamp_max(
            max(self.draft_logits.shape[0] - 1, 0)
        )

    @cached_property
    def target_processed(self) -> Tensor:
        """[R, V] the target's logits with temperature and filters applied"""
        return process(self.target_logits, self.target_sampling)

    @cached_property
    def target_probs(self) -> Tensor:
        """[R, V] the distributions that the target would draw from"""
        return self.target_processed.softmax(-1)

    @cached_property
    def beliefs(self) -> Tensor:
        """[R, V] the target's degrees of belief: as drawn from when sampling, at temperature 1 where it is greedy"""
        raw = self.target_logits.float().softmax(-1)
        if self.target_sampling.all_greedy:
            return raw
        return torch.where((self.target_sampling.temperature == 0.0)[:, None], raw, self.target_probs)

    def belief_in_draft(self) -> Tensor:
        """[B, K] the target's belief in each draft token"""
        return self.beliefs[self.rows[:, :-1], self.safe_ids]

    @cached_property
    def safe_ids(self) -> Tensor:
        """[B, K] draft tokens, with a harmless 0 where there is none, for gathers"""
        return self.ids.clamp_min(0)

    def uniform(self, purpose: int) -> Tensor:
        """[B, K + 1] noise for each draft position and the one behind; fresh in every round but for TARGET"""
        stream = noise.stream(purpose, self.round * (purpose != noise.TARGET))
        return noise.uniform(self.seed[:, None], self.position[:, None] + self.positions, stream[:, None])

    def key(self, purpose: int) -> Tensor:
        """[B, K + 1] the same as keys, for draws of tokens"""
        stream = noise.stream(purpose, self.round * (purpose != noise.TARGET))
        return noise.key(self.seed[:, None], self.position[:, None] + self.positions, stream[:, None])

    def target_choice(self, purpose: int = noise.TARGET) -> Tensor:
        """[B, K + 1] what the target itself writes at each position: its argmax, or its draw when sampling; with
        another purpose than TARGET, another draw"""
        if self.target_sampling.all_greedy:
            return best(self.target_logits)[self.rows]
        flat = self.rows.flatten()
        return choose(self.target_processed[flat], self.key(purpose).flatten()).view_as(self.rows)

    def target_prob_of_draft(self) -> Tensor:
        """[B, K] the target's probability of each draft token"""
        return self.target_probs[self.rows[:, :-1], self.safe_ids]

    @property
    def all_certain(self) -> bool:
        """Whether every draft token was its drafter's only choice: looked up, or written greedily"""
        return self.draft_logits is None or self.target_sampling.all_greedy

    @cached_property
    def greedy(self) -> Tensor:
        """[B] which sequences are greedy, in a batch where some sample"""
        return self.target_sampling.temperature[self.first_row] == 0.0

    @cached_property
    def draft_beliefs(self) -> Tensor:
        """[D, V] the draft model's degrees of belief: as drawn from when sampling, at temperature 1 where greedy"""
        assert self.draft_logits is not None
        return self.draft_logits.float().softmax(-1)

    def draft_beliefs_by_token(self) -> Tensor:
        """[B, K, V] the drafter's beliefs at each draft token; a lookup believes in what it found and nothing else"""
        if self.draft_logits is None:
            return self._only(self.safe_ids)
        return self.draft_beliefs[self.draft_rows]

    def draft_prob_of_draft(self) -> Tensor:
        """[B, K] the probability with which the drafter drew each draft token"""
        ones = torch.ones_like(self.safe_ids, dtype=torch.float32)
        if self.all_certain:
            return ones
        return torch.where(self.greedy[:, None], ones, self.draft_beliefs[self.draft_rows, self.safe_ids])

    def draft_distribution(self, k: Tensor) -> Tensor:
        """[B, V] what draft token k[b] was drawn from; all zero behind the draft's end, where nothing was drawn"""
        inside = k < self.counts
        if not self.ids.shape[1]:
            return torch.zeros_like(self.target_probs[self.first_row])
        at = k.clamp_max(self.ids.shape[1] - 1)[:, None]
        q = self._only(self.safe_ids.gather(1, at)[:, 0])
        if not self.all_certain:
            q = torch.where(self.greedy[:, None], q, self.draft_beliefs[self.draft_rows.gather(1, at)[:, 0]])
        return q * inside[:, None]

    def _only(self, ids: Tensor) -> Tensor:
        """[...] -> [..., V] all the mass on one token"""
        shape = [*ids.shape, self.target_logits.shape[-1]]
        return torch.zeros(shape, device=ids.device).scatter_(-1, ids[..., None], 1.0)

    def target_distribution(self, k: Tensor) -> Tensor:
        """[B, V] the target's distribution at draft position k[b]"""
        return self.target_probs[self.rows.gather(1, k[:, None])[:, 0]]


@dataclass
class Decisions:
    """A rule's answer for B sequences, still on the device."""

    accepted: Tensor  # [B]
    next: Tensor  # [B]
    relaxed: Tensor | None = None  # [B, K] accepted against the target's choice
    state: Tensor | None = None  # [B, S]
    target_tokens: Tensor | None = None  # [B, K] the target's choice
    evidence: Tensor | None = None  # [B, K, E] float32, the numbers that `Rule.reason` puts into words


class RuleResources(Protocol):
    """What a rule may ask of the pair it is going to judge for."""

    def tokens_of(self, text: str) -> list[int]: ...

    def probes(self, folder: str) -> tuple[Probe, Probe]:
        """The target's and the draft's probe in this folder; "" for those that came with the pair."""
        ...

    def judge_probe(self, folder: str) -> Probe:
        """The probe that judges whole steps, see `semantic+`."""
        ...

    def numbers(self) -> Tensor:
        """[V] tokens with a digit in them."""
        ...


class Rule(ABC):
    """Decides what counts as right. Subclasses are frozen dataclasses: their fields are the rule's options."""

    name: ClassVar[str]
    unit: ClassVar[Literal["token", "step"]] = "token"
    lossless: ClassVar[bool]
    needs_draft_logits: ClassVar[bool] = False  # the draft's probabilities; else ids, and the draft writes greedily
    speculates: ClassVar[bool] = True  # False: the target writes alone
    draft_tokens: ClassVar[int] = 8  # length of a draft where nobody says one

    @abstractmethod
    def verify(self, drafts: DraftBatch) -> Decisions: ...

    def layout(self, draft: list[int]) -> list[int]:
        """The tokens to score for a draft. It must begin with the draft; what follows is scored and thrown away."""
        return draft

    def min_draft_tokens(self) -> int:
        """The shortest draft that it judges as it means to. Nobody who may choose makes a shorter one."""
        return 1

    def default_draft_tokens(self) -> int:
        """The length of a draft where nobody says one."""
        return max(self.draft_tokens, self.min_draft_tokens())

    def request(
        self, max_tokens: int, sampling: Sampling, round: int, stop: frozenset[int] = frozenset()
    ) -> DraftRequest:
        """What this rule wants of a draft in this round of a sequence with this sampling."""
        # A rule that compares distributions needs tokens drawn from the one it is told; others get the best guess.
        sampled = self.needs_draft_logits or self.samples_drafts
        return DraftRequest(
            max_tokens,
            sampling if sampled else GREEDY,
            noise.stream(noise.DRAFT, round),
            self.keeps_draft_logits,
            self.draft_layers,
            self.min_draft_tokens(),
            stop,
        )

    @property
    def samples_drafts(self) -> bool:
        """Whether the draft draws its tokens as the request says, though nobody asks how likely they were."""
        return False

    @property
    def keeps_draft_logits(self) -> bool:
        """Whether it is shown the draft's logits: if it needs them, or would like to see how sure the draft was."""
        return self.needs_draft_logits

    @property
    def layers(self) -> tuple[int, ...]:
        """Whose hidden states it wants from the target."""
        return ()

    @property
    def draft_layers(self) -> tuple[int, ...]:
        """Whose hidden states it wants from the draft model."""
        return ()

    def bind(self, pair: RuleResources) -> Rule:
        """This rule for the pair it is going to judge. Rules that need words or probes get theirs here."""
        return self

    def reason(self, evidence: Sequence[float]) -> str:
        """Why a relaxed token stands, in a few words, from the numbers that `judge` returned for it."""
        return ""


def accepted_prefix(ok: Tensor, exists: Tensor) -> Tensor:
    """[B, K] -> [B] how many draft tokens stand before the first that does not."""
    return (ok & exists).long().cumprod(-1).sum(-1)


def collate(judges: Sequence[VerifyRequest]) -> DraftBatch:
    """Lay several sequences' drafts side by side. They share rule and protected tokens; draft logits: all or none.

    A draft of several steps is as many drafts, one behind the other: the row that predicts a step's first token is the
    bonus row of the step before. `join_segments` puts together again what a rule says of them."""
    device = judges[0].rows.logits.device
    rows = [j.rows.logits.shape[0] for j in judges]
    longest = max(end - begin for j in judges for begin, end in j.draft.segments)
    table = []  # one host tensor, one copy: ids, count, first row, first draft row, seed, position, round, whole, valid
    row = draft_row = 0
    for j, height in zip(judges, rows, strict=True):
        for i, (begin, end) in enumerate(j.draft.segments):
            padded = j.draft.tokens[begin:end] + [-1] * (longest - (end - begin))
            place = [end - begin, row + begin, draft_row + begin, j.sampling.seed, j.position + begin, j.round]
            table.append([*padded, *place, i < len(j.draft.step_ends), any(j.draft.valid[i : i + 1])])
        row, draft_row = row + height, draft_row + len(j.draft.tokens)
    columns = torch.tensor(table).to(device, non_blocking=True)
    draft_logits = None
    if judges[0].draft.logits is not None:
        draft_logits = torch.cat([j.draft.logits.to(device) for j in judges if j.draft.logits is not None])
    return DraftBatch(
        ids=columns[:, :longest],
        counts=columns[:, longest],
        target_logits=torch.cat([j.rows.logits for j in judges]),
        first_row=columns[:, longest + 1],
        draft_logits=draft_logits,
        first_draft=columns[:, longest + 2],
        target_sampling=SamplingRows.of([j.sampling for j in judges], rows, device),
        seed=columns[:, longest + 3],
        position=columns[:, longest + 4],
        round=columns[:, longest + 5],
        state=torch.stack([j.state for j in judges if j.state is not None]) if judges[0].state is not None else None,
        protected=judges[0].protected,
        hidden=_join([j.rows.hidden for j in judges], device),
        draft_hidden=_join([j.draft.hidden for j in judges], device),
        whole=columns[:, longest + 6] > 0,
        valid=columns[:, longest + 7] > 0,
    )


def _join(parts: Sequence[dict[int, Tensor]], device: torch.device) -> dict[int, Tensor] | None:
    return {layer: torch.cat([p[layer].to(device) for p in parts]) for layer in parts[0]} or None


def join_segments(parts: Sequence[Verdict], judges: Sequence[VerifyRequest]) -> list[Verdict]:
    """From what was decided about pieces of drafts to what that means for each draft."""
    whole, taken = [], 0
    for j in judges:
        lengths = [end - begin for begin, end in j.draft.segments]
        whole.append(Verdict.join(parts[taken : taken + len(lengths)], lengths))
        taken += len(lengths)
    return whole


def verdicts(decisions: Decisions) -> list[Verdict]:
    """Bring decisions to the host: the one copy of a step. Evidence travels as the bits of its numbers."""
    d = decisions
    nothing = d.accepted.new_empty(len(d.accepted), 0)
    parts = [
        torch.stack([d.accepted, d.next], 1),
        nothing if d.relaxed is None else d.relaxed.long(),
        nothing if d.target_tokens is None else d.target_tokens,
        nothing if d.evidence is None else d.evidence.contiguous().view(torch.int32).long().flatten(1),
    ]
    table = torch.cat(parts, 1).cpu()
    heads, marks, instead, bits = table.split([part.shape[1] for part in parts], 1)
    evidence = None if d.evidence is None else bits.int().view(torch.float32).view(d.evidence.shape).tolist()
    answers = []
    for b, ((accepted, follows), row, own) in enumerate(
        zip(heads.tolist(), marks.tolist(), instead.tolist(), strict=True)
    ):
        at = tuple(i for i, mark in enumerate(row[:accepted]) if mark)
        answers.append(
            Verdict(
                accepted,
                follows,
                relaxed=at,
                target_tokens=tuple(own[i] for i in at) if own else (),
                evidence=tuple(tuple(evidence[b][i]) for i in at) if evidence else (),
                state=None if d.state is None else d.state[b],
            )
        )
    return answers
