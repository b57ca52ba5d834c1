"""What step rules share: the draft is one whole step of reasoning, and it stands or falls as one.

A step rule only says of each step whether it stands. Here the rest is settled: what the target adds behind a step that
stands (the bonus token), what it writes first in place of one that falls, and that no step brings in a special,
control or end-of-thinking token, or leaves out one, against the target's choice. All step rules are lossy: nothing
makes up for the difference between the models' distributions over steps.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from semspec import noise
from semspec.errors import BadRequest
from semspec.sampling import pick
from semspec.steps import MAX_STEP_TOKENS
from semspec.verify.base import Decisions, Drafts, Rule, accepted_prefix


@dataclass(frozen=True)
class StepRule(Rule):
    """A rule whose unit is a step of reasoning. See `stepwise` for the loop around it."""

    unit = "step"
    lossless = False
    samples_drafts = True
    refereed: ClassVar[bool] = False  # the loop asks a referee first, see `oracle`

    lead: int = 1  # steps that the target writes before the draft may
    max_step_tokens: int = MAX_STEP_TOKENS
    hand_over: bool = True  # once the draft wants to end the thinking, the target writes the rest alone
    keep: bool = False  # of a step that falls, keep the beginning that the target would have written as well
    rewrite: str = ""  # the token rule by which the draft helps the target with what it writes; "": not at all
    rewrite_tokens: int = 4  # how far the draft then writes ahead
    bonus: float = 0.1  # temperature of the token the target adds to a step that stands, if the request's is not lower

    def __post_init__(self) -> None:
        if self.lead < 0:
            raise BadRequest(f"{self.name}'s lead is {self.lead}; give the number of steps the target writes first")
        if self.max_step_tokens < 1:
            raise BadRequest(f"{self.name}'s max_step_tokens is {self.max_step_tokens}; give 1 or more")
        if self.rewrite_tokens < 1:
            raise BadRequest(f"{self.name}'s rewrite_tokens is {self.rewrite_tokens}; give 1 or more")
        if self.bonus <= 0:
            raise BadRequest(f"{self.name}'s bonus is {self.bonus}; give a temperature above 0")

    def conclude(self, drafts: Drafts, stands: Tensor, evidence: tuple[Tensor, ...] = ()) -> Decisions:
        """Decisions from which steps stand [B]; evidence [B] each is the whole step's."""
        choice = drafts.target_choice()  # [B, K + 1]
        differs = (drafts.ids != choice[:, :-1]) & drafts.exists
        if drafts.protected is not None:
            special = drafts.protected[drafts.safe_ids] | drafts.protected[choice[:, :-1]]
            stands = stands & ~(special & differs).any(-1)
        same = accepted_prefix(~differs, drafts.exists) if self.keep else torch.zeros_like(drafts.counts)
        accepted = torch.where(stands, drafts.counts, same)
        own = choice.gather(1, same[:, None])[:, 0]
        follows = torch.where(stands & (drafts.counts > 0), self._bonus(drafts, choice), own)
        whole = [e.float()[:, None].expand(drafts.ids.shape) for e in evidence]
        return Decisions(
            accepted,
            follows,
            relaxed=differs & stands[:, None],
            instead=choice[:, :-1],
            evidence=torch.stack(whole, -1) if whole else None,
        )

    def _bonus(self, drafts: Drafts, choice: Tensor) -> Tensor:
        """[B] the target's token behind the step"""
        usual = choice.gather(1, drafts.counts[:, None])[:, 0]
        if drafts.target_sampling.all_greedy:
            return usual
        row = drafts.rows.gather(1, drafts.counts[:, None])[:, 0]
        noises = drafts.uniform(noise.TARGET).gather(1, drafts.counts[:, None])[:, 0]
        cool = pick((drafts.target_logits[row].float() / self.bonus).softmax(-1), noises)
        return torch.where(drafts.target_sampling.temperature[row] > self.bonus, cool, usual)
