"""What is asked of the loop."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from torch import Tensor

from semspec.loop.draft_length import DraftLengthPolicy
from semspec.loop.repetition import RepetitionGuard
from semspec.loop.thinking import Thinking
from semspec.sampling.processors import Processors
from semspec.text.steps import StepDelimiters
from semspec.types import Sampling
from semspec.verify.base import Rule


@dataclass(slots=True)
class Job:
    """One sequence to decode, in tokens. Of text only the ends of steps are known here."""

    prompt: list[int]
    rule: Rule
    num_draft_tokens: int | DraftLengthPolicy
    max_new_tokens: int
    sampling: Sampling = field(default_factory=Sampling)
    stop: frozenset[int] = frozenset()
    halt: Callable[[list[int]], int | None] | None = None  # new tokens -> how many to keep, if the text ends there
    protected: Tensor | None = None  # [V] tokens that no rule may relax
    thinking: Thinking | None = None  # None: the model has no markers of thinking
    count_entropy: bool = False  # of the target at verified tokens, for the stats
    logprobs: int | None = None  # how many top logprobs to report with each token's own; None: no logprobs
    prompt_logprobs: int | None = None  # the same for the prompt's tokens
    prompt_logprobs_last: int | None = None  # for so many of its last ones; None: for all
    processors: Processors | None = None  # what changes its logits; None: nothing
    salt: str = ""  # whose prompts it shares a cache with
    draft_prompt: list[int] | None = None  # in the draft model's tokens, where these are others
    steps: StepDelimiters | None = None  # where reasoning steps end, for step rules
    referee: Referee | None = None  # for rules that need one
    rewriter: Rule | None = None  # token rule for speculation on what the target writes, with step rules
    repetition_guard: RepetitionGuard = field(default_factory=RepetitionGuard)
    text_of: Callable[[list[int]], str] = str  # for messages


Referee = Callable[[list[int], list[int]], bool]
"""Whether a reasoning step is valid: (new tokens so far, the step's tokens) -> bool."""
