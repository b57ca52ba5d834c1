"""Kinds of drafters by name, for `drafter=` of a request. A kind builds one drafter per sequence."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

from semspec.draft.cascade import CascadeDrafter
from semspec.draft.early_exit import EarlyExit
from semspec.draft.model import ModelDrafter
from semspec.draft.ngram import NgramDrafter
from semspec.errors import BadRequest
from semspec.registry import Registry
from semspec.types import Drafter, Runner

MAX_NGRAM = 32  # each sequence has an index of all n-grams up to this size


class DrafterKind(ABC):
    """Subclasses are frozen dataclasses: their fields are the options."""

    name: ClassVar[str]
    needs_model: ClassVar[bool] = False  # the pair's draft model

    @abstractmethod
    def build(self, draft: Runner | None, early_exit: EarlyExit) -> Drafter: ...


@dataclass(frozen=True)
class Lookup(DrafterKind):
    """What kinds that look drafts up in the text share."""

    longest: int = 4
    shortest: int = 1
    earliest: bool = False

    def __post_init__(self) -> None:
        if not 1 <= self.shortest <= self.longest <= MAX_NGRAM:
            raise BadRequest(
                f"n-gram lengths {self.shortest} to {self.longest}: the shortest must be 1 or more and not above "
                f"the longest, the longest at most {MAX_NGRAM}"
            )

    def lookup(self) -> NgramDrafter:
        return NgramDrafter(self.longest, self.shortest, self.earliest)


@dataclass(frozen=True)
class Ngram(Lookup):
    name = "ngram"

    def build(self, draft: Runner | None, early_exit: EarlyExit) -> Drafter:
        return self.lookup()


@dataclass(frozen=True)
class Model(DrafterKind):
    name = "model"
    needs_model = True

    def build(self, draft: Runner | None, early_exit: EarlyExit) -> Drafter:
        assert draft is not None
        return ModelDrafter(draft, early_exit)


@dataclass(frozen=True)
class Cascade(Lookup):
    """The lookup of FLy's released code is earliest=true; which tokens are drafted does not depend on it."""

    name = "cascade"
    needs_model = True

    ahead: int = 6  # tokens that the n-gram lookup guesses at a time

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.ahead < 1:
            raise BadRequest(f"cascade's ahead is {self.ahead}; give 1 or more tokens to look up at a time")

    def build(self, draft: Runner | None, early_exit: EarlyExit) -> Drafter:
        assert draft is not None
        return CascadeDrafter(draft, self.lookup(), self.ahead, early_exit)


REGISTRY = Registry("drafter", "semspec.drafters", DrafterKind)  # type: ignore[type-abstract]
register = REGISTRY.register
for _kind in (Cascade, Model, Ngram):
    register(_kind)
