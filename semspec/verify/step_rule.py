"""What step rules share: the draft is one or more whole reasoning steps, and each is accepted or rejected as a whole.

A step rule only decides which steps are accepted. `conclude` does the rest: the target's token after an accepted step
(the bonus token), its first token instead of a rejected one, and protected tokens (special, control, end of thinking),
which no step may add or leave out against the target's choice, unless `protect` is off. All step rules are lossy:
nothing corrects for the difference between the models' distributions over steps.

A part of a step (the draft stopped inside) is verified token by token: it is accepted as far as the target chooses the
same tokens. So is the beginning of a rejected step, with `keep`. These choices are the target's own draws, not the test
of `sampling`: once a rule has selected among steps, their tokens are no sample of the draft's distribution, and the
test would accept a wrong digit with probability p/q instead of p.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar

import torch
from torch import Tensor

from semspec.errors import BadRequest
from semspec.probe.evidence import FAR, at_one
from semspec.probe.probe import Probe
from semspec.sampling import noise
from semspec.sampling.draw import choose, process
from semspec.text.steps import DELIMITERS, MAX_STEP_TOKENS
from semspec.types import COLDEST, Draft, Sampling
from semspec.verify.base import Rule
from semspec.verify.batch import Decisions, DraftBatch, accepted_prefix

ONE_STEP = {"min": 1, "max": 1, "note": "since it asks about one step at a time"}  # limits in such rules
FIRST_CHOICE = {"min": 1, "max": 1, "note": "since it goes by what the draft writes first"}
MAX_CANDIDATES = 8  # each costs a draft, and a tree has room for a few steps only


@dataclass(frozen=True)
class StepRule(Rule):
    """A rule whose unit is a reasoning step. Its loop is loop/step_decoder.py."""

    unit = "step"
    lossless = False
    refereed: ClassVar[bool] = False  # the loop asks a referee first, see `oracle`
    glimpses: ClassVar[bool] = False  # the loop asks `begins` before the draft writes a step
    asks_draft: ClassVar[bool] = False  # the draft model reads `layout`'s tokens after its own step: `rate_by_draft`

    published: ClassVar[Mapping[str, Any]] = {}  # what an option `paper` sets, where nothing else is given

    # What each is in full: docs/methods.md.
    lead: int = field(default=1, metadata={"label": "steps the target writes first", "min": 0})
    max_step_tokens: int = field(default=MAX_STEP_TOKENS, metadata={"label": "longest step, in tokens", "min": 1})
    steps: int = field(default=1, metadata={"label": "steps drafted ahead, at most", "main": True, "min": 1})
    ahead: float = field(
        default=0.5,
        metadata={"label": "confidence from which one more step is drafted", "min": 0, "max": 1},
    )
    candidates: int = field(
        default=1,
        metadata={"label": "candidates for a step, at most", "min": 1, "max": MAX_CANDIDATES, "note": "with steps=1"},
    )
    hand_over: bool = field(default=True, metadata={"label": "target writes all after the draft's thinking ends"})
    keep: bool = field(default=False, metadata={"label": "accept a rejected step's prefix if target agrees"})
    rewrite: str = field(default="", metadata={"label": "token rule for what the target writes"})
    rewrite_tokens: int = field(default=4, metadata={"label": "draft length for `rewrite`", "min": 1})
    sample: bool = field(default=True, metadata={"label": "the draft samples its steps"})
    bonus_temperature: float = field(
        default=0.1, metadata={"label": "highest temperature of the token after a step", "min": COLDEST, "was": "bonus"}
    )
    delimiters: str = field(default="all", metadata={"label": "what ends a step", "choices": DELIMITERS})
    end_tokens: int = field(default=0, metadata={"label": "most tokens after the thinking; 0: any", "min": 0})
    protect: bool = field(default=True, metadata={"label": "special tokens are never relaxed"})

    def __post_init__(self) -> None:
        for option in fields(self) if getattr(self, "paper", False) else ():
            if option.name in self.published and getattr(self, option.name) == option.default:
                object.__setattr__(self, option.name, self.published[option.name])
        super().__post_init__()
        if self.candidates > 1 and self.steps > 1:
            raise BadRequest(
                f"{self.name} is to judge {self.candidates} candidates for a step and {self.steps} steps ahead, and a "
                "draft has the one or the other; leave out candidates or steps"
            )

    @property
    def samples_drafts(self) -> bool:
        return self.sample

    @property
    def policy(self) -> dict[str, Any]:
        """What decides which steps it verifies, for collections of them: its options, and the digests of its probes."""
        # Nothing is collected with several candidates.
        named = [f.name for f in fields(self) if not f.metadata.get("path") and f.name != "candidates"]
        own = {name: getattr(self, name) for name in named}
        options = {name: value for name, value in own.items() if isinstance(value, bool | int | float | str)}
        probes = {name: value.digest for name, value in own.items() if isinstance(value, Probe)}
        return {"rule": self.name, "samples_drafts": self.samples_drafts, **options, **probes}

    @property
    def keeps_draft_logits(self) -> bool:
        return self.steps > 1

    def takeover_tokens(self) -> int:
        """How many tokens the target writes in place of a rejected step before the draft goes on; 0: the whole step."""
        return 0

    def prolong(self, tokens: Sequence[int]) -> int:
        """How many more, once it has written these."""
        return 0

    def begins(self, first: Draft, sampling: Sampling) -> bool:
        """Whether the draft is to write this step, of which it has proposed one token, with logits."""
        return True

    def rate_by_draft(self, answer: Tensor) -> float:
        """The draft's rating of its own step, from 0 to 1, from its logits [V] after the question."""
        return 0.0

    def confidence(self, draft: Draft, sampling: Sampling) -> float:
        """The draft's confidence in the step it has just written, from 0 to 1: by default the geometric mean of its
        tokens' probabilities."""
        return math.exp(self.draft_logprobs(draft, sampling).mean().item())

    def draft_logprobs(self, draft: Draft, sampling: Sampling) -> Tensor:
        """[K] the draft's log-probabilities of its own tokens, at temperature 1"""
        logits = self.draft_logits(draft, sampling)
        ids = torch.tensor(draft.own_tokens, device=logits.device)
        return logits.log_softmax(-1).gather(1, ids[:, None])[:, 0].clamp_min(FAR)

    def draft_logits(self, draft: Draft, sampling: Sampling) -> Tensor:
        """[K, V] the draft's logits at temperature 1"""
        assert draft.logits is not None
        applied = sampling.temperature if self.samples_drafts else 0.0
        return at_one(draft.logits, torch.full((1,), applied, device=draft.logits.device)).float()

    def conclude(
        self,
        drafts: DraftBatch,
        passes: Tensor,
        evidence: tuple[Tensor, ...] = (),
        part: Tensor | None = None,
        worth: Tensor | None = None,
    ) -> Decisions:
        """Decisions from which steps pass [B]; evidence [B] each is the whole step's. Of a rejected step, a `part` [B]
        of so many tokens may be accepted all the same. Of several candidates that pass, the one with the highest
        `worth` [B] is taken; by default, with the highest first evidence."""
        choice = drafts.target_choice()  # [B, K + 1]
        differs = (drafts.ids != choice[:, :-1]) & drafts.exists
        if self.protect and drafts.protected is not None:
            special = differs & (drafts.protected[drafts.safe_ids] | drafts.protected[choice[:, :-1]])
            passes = passes & ~special.any(-1)
            part = None if part is None else torch.minimum(part, accepted_prefix(~special, drafts.exists))
        same = torch.zeros_like(drafts.counts)
        if self.keep or drafts.whole is not None:
            same = accepted_prefix(~differs, drafts.exists)
        if drafts.whole is not None:
            passes = passes & drafts.whole
            same = same if self.keep else torch.where(drafts.whole, 0, same)
            part = None if part is None else torch.where(drafts.whole, part, 0)
        same = same if part is None else torch.maximum(same, part)
        accepted = torch.where(passes, drafts.counts, same)
        own = choice.gather(1, same[:, None])[:, 0]
        follows = torch.where(passes & (drafts.counts > 0), self._bonus(drafts, choice), own)
        whole = [e.float()[:, None].expand(drafts.ids.shape) for e in evidence]
        if worth is None and self.candidates > 1:
            worth = evidence[0] if evidence else torch.zeros_like(passes)
        return Decisions(
            accepted,
            follows,
            relaxed=differs & (drafts.positions[:-1] < accepted[:, None]),
            target_tokens=choice[:, :-1],
            evidence=torch.stack(whole, -1) if whole else None,
            worth=torch.where(passes, worth.float(), -math.inf) if worth is not None and self.candidates > 1 else None,
        )

    def _bonus(self, drafts: DraftBatch, choice: Tensor) -> Tensor:
        """[B] the target's token after the step: its own choice, at a temperature of at most `bonus_temperature`"""
        own = choice.gather(1, drafts.counts[:, None])[:, 0]
        if drafts.target_sampling.all_greedy:
            return own
        row = drafts.rows.gather(1, drafts.counts[:, None])[:, 0]
        asked = drafts.target_sampling.temperature[row]
        cooled = process(
            drafts.target_logits[row], drafts.target_sampling.at(row, asked.clamp_max(self.bonus_temperature))
        )
        return choose(cooled, drafts.key(noise.TARGET).gather(1, drafts.counts[:, None])[:, 0])
