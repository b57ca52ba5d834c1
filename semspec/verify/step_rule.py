"""What step rules share: the draft is a whole step of reasoning, or several, and each stands or falls as one.

A step rule only says of each step whether it stands. Here the rest is settled: what the target adds behind a step that
stands (the bonus token), what it writes first in place of one that falls, and that no step brings in a special,
control or end-of-thinking token, or leaves out one, against the target's choice. All step rules are lossy: nothing
makes up for the difference between the models' distributions over steps.

What is no whole step (the draft stopped inside) is not asked about: it stands as far as the target would have written
it too. So does the beginning of a step that falls, with `keep`. "Would have written" means the target's own draws: the
draft's are no sample of the draft's distribution any more once a judge has picked among them, so the trial of
`sampling` would give a wrong digit the chance p/q, where the target's own draw gives it p.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Any, ClassVar

import torch
from torch import Tensor

from semspec.errors import BadRequest
from semspec.probe.evidence import FAR, at_one
from semspec.probe.head import Probe
from semspec.sampling import noise
from semspec.sampling.draw import choose, process
from semspec.text.steps import MAX_STEP_TOKENS
from semspec.types import Draft, Sampling
from semspec.verify.base import Decisions, DraftBatch, Rule, accepted_prefix


@dataclass(frozen=True)
class StepRule(Rule):
    """A rule whose unit is a step of reasoning. See `stepwise` for the loop around it."""

    unit = "step"
    lossless = False
    refereed: ClassVar[bool] = False  # the loop asks a referee first, see `oracle`
    several: ClassVar[bool] = True  # it can judge more than one step in one pass

    lead: int = 1  # steps that the target writes before the draft may
    max_step_tokens: int = MAX_STEP_TOKENS  # the longest step; no draft of several is longer either
    steps: int = 1  # how many the draft may write ahead, for one pass of the target to check
    ahead: float = 0.5  # how sure the draft must be of a step to write another behind it, see `sure`
    hand_over: bool = True  # once the draft wants to end the thinking, the target writes the rest alone
    keep: bool = False  # of a step that falls, keep the beginning that the target would have written as well
    rewrite: str = ""  # the token rule by which the draft helps the target with what it writes; "": not at all
    rewrite_tokens: int = 4  # how far the draft then writes ahead
    sample: bool = True  # the draft draws its steps as the request says; off: it writes what it finds best
    bonus: float = 0.1  # temperature of the token the target adds to a step that stands, if the request's is not lower

    def __post_init__(self) -> None:
        if self.lead < 0:
            raise BadRequest(f"{self.name}'s lead is {self.lead}; give the number of steps the target writes first")
        if self.max_step_tokens < 1:
            raise BadRequest(f"{self.name}'s max_step_tokens is {self.max_step_tokens}; give 1 or more")
        if self.steps < 1 or not (self.several or self.steps == 1):
            give = "1 or more" if self.several else "1: it asks about one step at a time"
            raise BadRequest(f"{self.name}'s steps is {self.steps}; give {give}")
        if not 0 <= self.ahead <= 1:
            raise BadRequest(f"{self.name}'s ahead is {self.ahead}; give a probability from 0 to 1")
        if self.rewrite_tokens < 1:
            raise BadRequest(f"{self.name}'s rewrite_tokens is {self.rewrite_tokens}; give 1 or more")
        if self.bonus <= 0:
            raise BadRequest(f"{self.name}'s bonus is {self.bonus}; give a temperature above 0")

    @property
    def samples_drafts(self) -> bool:
        return self.sample

    @property
    def policy(self) -> dict[str, Any]:
        """What decides which steps it meets, for those who keep some: its options, and its probes by their digests."""
        # Under their former names, as collections and cards on disk have them.
        own = {f.metadata.get("was", f.name): getattr(self, f.name) for f in fields(self) if not f.metadata.get("path")}
        options = {name: value for name, value in own.items() if isinstance(value, bool | int | float | str)}
        probes = {name: value.digest for name, value in own.items() if isinstance(value, Probe)}
        return {"rule": self.name, "drawn": self.samples_drafts, **options, **probes}

    @property
    def keeps_draft_logits(self) -> bool:
        return self.steps > 1

    def confidence(self, draft: Draft, sampling: Sampling) -> float:
        """How sure the draft is of the step that it has just written, from 0 to 1: the geometric mean of its tokens'
        probabilities. Rules that know the draft better say it better."""
        return math.exp(self.draft_logprobs(draft, sampling).mean().item())

    def draft_logprobs(self, draft: Draft, sampling: Sampling) -> Tensor:
        """[K] the draft's log-probabilities of its own tokens, at temperature 1"""
        assert draft.logits is not None
        applied = sampling.temperature if self.samples_drafts else 0.0
        logits = at_one(draft.logits, torch.full((1,), applied, device=draft.logits.device))
        ids = torch.tensor(draft.tokens, device=logits.device)
        return logits.float().log_softmax(-1).gather(1, ids[:, None])[:, 0].clamp_min(FAR)

    def conclude(
        self, drafts: DraftBatch, stands: Tensor, evidence: tuple[Tensor, ...] = (), part: Tensor | None = None
    ) -> Decisions:
        """Decisions from which steps stand [B]; evidence [B] each is the whole step's. Of one that falls, a part [B] of
        so many tokens may stand all the same."""
        choice = drafts.target_choice()  # [B, K + 1]
        differs = (drafts.ids != choice[:, :-1]) & drafts.exists
        if drafts.protected is not None:
            special = differs & (drafts.protected[drafts.safe_ids] | drafts.protected[choice[:, :-1]])
            stands = stands & ~special.any(-1)
            part = None if part is None else torch.minimum(part, accepted_prefix(~special, drafts.exists))
        same = torch.zeros_like(drafts.counts)
        if self.keep or drafts.whole is not None:
            same = accepted_prefix(~differs, drafts.exists)
        if drafts.whole is not None:
            stands = stands & drafts.whole
            same = same if self.keep else torch.where(drafts.whole, 0, same)
            part = None if part is None else torch.where(drafts.whole, part, 0)
        same = same if part is None else torch.maximum(same, part)
        accepted = torch.where(stands, drafts.counts, same)
        own = choice.gather(1, same[:, None])[:, 0]
        follows = torch.where(stands & (drafts.counts > 0), self._bonus(drafts, choice), own)
        whole = [e.float()[:, None].expand(drafts.ids.shape) for e in evidence]
        return Decisions(
            accepted,
            follows,
            relaxed=differs & (drafts.positions[:-1] < accepted[:, None]),
            target_tokens=choice[:, :-1],
            evidence=torch.stack(whole, -1) if whole else None,
        )

    def _bonus(self, drafts: DraftBatch, choice: Tensor) -> Tensor:
        """[B] the target's token after the step: its own choice, at a temperature of at most `bonus`"""
        own = choice.gather(1, drafts.counts[:, None])[:, 0]
        if drafts.target_sampling.all_greedy:
            return own
        row = drafts.rows.gather(1, drafts.counts[:, None])[:, 0]
        asked = drafts.target_sampling.temperature[row]
        cooled = process(drafts.target_logits[row], drafts.target_sampling.at(row, asked.clamp_max(self.bonus)))
        return choose(cooled, drafts.key(noise.TARGET).gather(1, drafts.counts[:, None])[:, 0])
