"""What a round adds to a sequence, as whoever reads the answer sees it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from torch import Tensor

Origin = Literal["draft", "relaxed", "target"]
FinishReason = Literal["stop", "length", "thinking", "cancelled"]  # thinking: the length ended inside it
StepOutcome = Literal["accepted", "rejected", "handed over"]


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """The target's own log-probability (temperature 1, unfiltered) of a committed token and of the most likely ones."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    rank: int = 1  # among all tokens


@dataclass(frozen=True, slots=True)
class Relaxed:
    """Why a token was accepted that is not the target's own choice."""

    reason: str  # from Rule.reason; may be empty
    target_token: int | None = None  # the target's own choice


@dataclass(frozen=True, slots=True)
class DraftedStep:
    """A whole reasoning step that the draft proposed, and its outcome."""

    outcome: StepOutcome
    tokens: list[int]  # all of it, accepted or not, including a beginning that was committed before
    start: int  # new tokens before it
    evidence: Tensor | None = None  # what was seen of it, where that cannot be computed again: behind servers
    candidate: int = 0  # which of several it was, from 0: the accepted one, or the first if all were rejected
    candidates: int = 1  # that were judged


@dataclass(slots=True)
class Event:
    """What one round added to a sequence. The last event of a sequence carries its finish reason."""

    tokens: list[int]
    origins: list[Origin]
    relaxed: dict[int, Relaxed] = field(default_factory=dict)  # index in `tokens` -> why
    drafted: int = 0
    accepted: int = 0
    drafted_steps: list[DraftedStep] = field(default_factory=list)  # in the draft, up to the first rejected
    logprobs: list[TokenLogprob] | None = None
    prompt_logprobs: list[TokenLogprob | None] | None = None  # with the first event; a text's first token has none
    finish_reason: FinishReason | None = None
    spans: list[tuple[str, Origin]] = field(default_factory=list)  # the text that became final, by origin
    span_tokens: list[int] = field(default_factory=list)  # index in the answer of the token each span belongs to

    @property
    def text(self) -> str:
        return "".join(text for text, _ in self.spans)
