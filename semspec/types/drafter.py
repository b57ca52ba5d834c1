"""What a draft should be, and who proposes it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from semspec.types.requests import Handover, ProposalGenerator, Runner
from semspec.types.sampling import Sampling

if TYPE_CHECKING:
    from semspec.sampling.processors import Processors


@dataclass(frozen=True, slots=True)
class DraftRequest:
    """What one draft should be: all that a drafter knows about the rule that will verify it (`Rule.request`)."""

    max_tokens: int
    sampling: Sampling = field(default_factory=Sampling)  # of the draft; mostly greedy
    stream: int = 0  # which noise to draw from, see noise.py
    keep_logits: bool = False  # return what each token was drawn from
    comparable: bool = False  # with the target's distributions: every token is drawn by itself, from tokens both have
    layers: tuple[int, ...] = ()  # whose hidden states to return
    min_tokens: int = 1  # an early exit does not make the draft shorter than this
    stop: frozenset[int] = frozenset()  # the draft ends with the first of these
    processors: Processors | None = None  # that change the logits of the sequence, in the target's tokens
    threshold: float = 0.0  # of tree drafts: tokens less likely to be accepted are not worth a place
    handover: Handover | None = None  # for a decode that writes the whole draft


class Drafter(Protocol):
    """Proposes for one sequence. `propose` is a generator, so that draft models are batched."""

    runners: list[Runner]  # each needs one slot, given to `begin` in this order

    def begin(self, slots: list[int]) -> None: ...

    def propose(self, context: list[int], request: DraftRequest) -> ProposalGenerator:
        """Tokens that may follow `context`."""

    def accept(self, length: int) -> None:
        """The first `length` tokens of the last context + draft are accepted; the rest of the draft is rejected."""

    def close(self) -> None: ...
