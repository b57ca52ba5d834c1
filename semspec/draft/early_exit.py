"""When a draft model should stop: where it is not confident, the target is likely to disagree.

The decision depends on distributions, never on the tokens drawn from them: otherwise the draft would not have the
distribution that lossless rules rely on. It is made per chunk, so that the host waits for the device once for several
tokens; what a chunk holds after its first unconfident token is dropped.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from semspec.errors import BadRequest
from semspec.sampling.draw import entropy

CHUNK = 4  # tokens between two checks


@dataclass(frozen=True, slots=True)
class EarlyExit:
    """A draft ends before a token whose top probability is below `min_p` or entropy above `max_entropy` nats."""

    min_p: float = 0.0
    max_entropy: float | None = None

    def __post_init__(self) -> None:
        if not 0.0 <= self.min_p <= 1.0:
            raise BadRequest(f"draft_min_p is {self.min_p}; give a probability from 0 (off) to 1")
        if self.max_entropy is not None and not self.max_entropy >= 0.0:
            raise BadRequest(f"draft_max_entropy is {self.max_entropy}; give a number of nats, 0 or more")

    @property
    def enabled(self) -> bool:
        return self.min_p > 0.0 or self.max_entropy is not None

    def confident_prefix(self, logits: Tensor) -> int:
        """How many tokens come before the first unconfident one. [n, V]"""
        probs = logits.float().softmax(-1)
        unsure = probs.amax(-1) < self.min_p
        if self.max_entropy is not None:
            unsure |= entropy(probs) > self.max_entropy
        return int((~unsure).long().cumprod(0).sum())
