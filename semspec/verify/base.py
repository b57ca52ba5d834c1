"""What a verifier is: a pure, vectorised function of tensors.

A rule gets the target's logits for the drafts of many sequences and decides, for each, how many draft tokens are
accepted and which token follows. It has no model, no cache, no I/O and no host synchronisation: every shape is known
on the host before the call, so the same function serves the Executor, vLLM and transformers.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar, Literal, Protocol

from torch import Tensor

from semspec.registry import check_limits
from semspec.sampling import noise
from semspec.types import GREEDY, DraftRequest, Sampling
from semspec.verify.batch import Decisions, DraftBatch
from semspec.verify.paths import by_paths

if TYPE_CHECKING:
    from semspec.probe.probe import Probe


class RuleResources(Protocol):
    """What a rule may get from the pair of models it verifies for."""

    def tokens_of(self, text: str) -> list[int]: ...

    def next_turn(self, question: str) -> list[int]:
        """What ends the answer so far, puts a question and begins the reply to it, in tokens."""
        ...

    def tokens_with(self, word: str) -> Tensor:
        """[V] which tokens contain this word, in whatever case."""
        ...

    def probes(self, folder: str) -> tuple[Probe, Probe]:
        """The target's and the draft's probe in this folder; "" for the pair's own."""
        ...

    def judge_probe(self, folder: str) -> Probe:
        """The probe that scores whole reasoning steps, see `semantic+`."""
        ...

    def numbers(self) -> Tensor:
        """[V] which tokens contain a digit."""
        ...

    def draft_numbers(self) -> Tensor | None:
        """The same of a draft model with another tokenizer; None: it has the target's."""
        ...


class Rule(ABC):
    """Decides which draft tokens are accepted. Subclasses are frozen dataclasses; their fields are the options.

    A field's metadata may have limits ("min" or, exclusive, "above"; "max"; "choices"), which are checked, and for
    forms a "label", "main" (one of the options to show first), and "unset": what its default means in words. A class
    that overrides a field keeps what it does not set anew."""

    name: ClassVar[str]
    title: ClassVar[str] = ""  # a name for people, where they choose a rule
    control: ClassVar[bool] = False  # no method, but a baseline to compare methods with
    unit: ClassVar[Literal["token", "step"]] = "token"
    lossless: ClassVar[bool]
    needs_draft_logits: ClassVar[bool] = False  # False: draft ids suffice, and the draft is greedy
    same_text: ClassVar[bool] = False  # whatever is drafted, so lengths may be learnt from time (`auto`)
    speculates: ClassVar[bool] = True  # False: target only, no drafts
    captured: ClassVar[bool] = True  # on a GPU into graphs; False: `verify` has effects, or mixes sequences
    draft_tokens: ClassVar[int] = 8  # default draft length

    def __post_init__(self) -> None:
        check_limits(self.name, self)

    @abstractmethod
    def verify(self, drafts: DraftBatch) -> Decisions: ...

    def verify_tree(self, drafts: DraftBatch) -> Decisions:
        """Tree drafts, where `supports_trees`; see verify/paths.py."""
        return by_paths(drafts, self.verify)

    @property
    def supports_trees(self) -> bool:
        """A rule that compares distributions has to know how siblings were drawn: it overrides both of these."""
        tokens_only = not (self.needs_draft_logits or self.keeps_draft_logits or self.draft_layers)
        return self.unit == "token" and tokens_only and type(self).layout is Rule.layout

    def layout(self, draft: list[int]) -> list[int]:
        """The tokens to score: the draft first, then any others whose rows the rule needs; those are dropped again."""
        return draft

    def min_draft_tokens(self) -> int:
        """The shortest draft on which the rule works as intended; automatic lengths and early exits respect it."""
        return 1

    def default_draft_tokens(self) -> int:
        """The draft length of a request that names none."""
        return max(self.draft_tokens, self.min_draft_tokens())

    def for_draft_length(self, tokens: int) -> Rule:
        """This rule where drafts of so many tokens are asked for; single drafts may be shorter."""
        return self

    def request(
        self, max_tokens: int, sampling: Sampling, round: int, stop: frozenset[int] = frozenset()
    ) -> DraftRequest:
        """What this rule wants of a draft in this round of a sequence with this sampling."""
        # A rule that compares distributions needs tokens drawn from the draft's; others get the most likely ones.
        sampled = self.needs_draft_logits or self.samples_drafts or self.couples_draft
        return DraftRequest(
            max_tokens,
            sampling if sampled else GREEDY,
            noise.TARGET if self.couples_draft else noise.stream(noise.DRAFT, round),
            self.keeps_draft_logits,
            self.needs_draft_logits,
            self.draft_layers,
            self.min_draft_tokens(),
            stop,
        )

    @property
    def samples_drafts(self) -> bool:
        """Whether drafts are sampled as the request says although the rule does not need their probabilities."""
        return False

    @property
    def couples_draft(self) -> bool:
        """Whether the draft draws with the target's noise: models that agree then draw the same token."""
        return False

    @property
    def keeps_draft_logits(self) -> bool:
        """Whether it gets the draft's logits: because it needs them, or to see how confident the draft was."""
        return self.needs_draft_logits

    @property
    def layers(self) -> tuple[int, ...]:
        """Target layers whose hidden states it needs."""
        return ()

    @property
    def draft_layers(self) -> tuple[int, ...]:
        """Draft model layers whose hidden states it needs."""
        return ()

    def bind(self, pair: RuleResources) -> Rule:
        """This rule with what it needs of a pair of models: tokens, probes."""
        return self

    def reason(self, evidence: Sequence[float]) -> str:
        """Why a relaxed token was accepted, in a few words, from the evidence that `verify` returned for it."""
        return ""
