"""Controls, not methods: baselines for lossy rules. Lossy.

`accept-all` accepts every draft token that is not protected: the draft's text at the target's cost. `random` accepts a
mismatch with a fixed probability: a lossy rule that is no better at the same rate of relaxed tokens has learnt nothing
about meaning.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from semspec.sampling.noise import ACCEPT
from semspec.verify.base import Rule
from semspec.verify.batch import Decisions, DraftBatch
from semspec.verify.lossy import conclude


@dataclass(frozen=True)
class AcceptAll(Rule):
    """Every draft token is accepted: the draft's text at the target's price."""

    name = "accept-all"
    title = "Accept all"
    control = True
    lossless = False

    def verify(self, drafts: DraftBatch) -> Decisions:
        return conclude(drafts, drafts.exists)

    def reason(self, evidence: Sequence[float]) -> str:
        return "every draft token is accepted"


@dataclass(frozen=True)
class Random(Rule):
    """A mismatch is accepted at random."""

    name = "random"
    title = "Random acceptance"
    control = True
    lossless = False

    rate: float = field(
        default=0.3, metadata={"label": "share of mismatches accepted", "main": True, "min": 0, "max": 1}
    )

    def verify(self, drafts: DraftBatch) -> Decisions:
        u = drafts.uniform(ACCEPT)[:, :-1]
        return conclude(drafts, u < self.rate, evidence=(u,))

    def reason(self, evidence: Sequence[float]) -> str:
        return f"random number {evidence[0]:.2f} < {self.rate:g}"
