"""Kinds of drafters by name, for `drafter=` of a request. A kind builds one drafter per sequence."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, ClassVar, Protocol

from semspec.draft.cascade import CascadeDrafter
from semspec.draft.early_exit import EarlyExit
from semspec.draft.growing import CHAIN, TOP, TreeOptions
from semspec.draft.head import HeadDrafter
from semspec.draft.model import ModelDrafter
from semspec.draft.ngram import NgramDrafter
from semspec.errors import BadRequest
from semspec.registry import Registry
from semspec.types import Drafter, Runner

if TYPE_CHECKING:
    from semspec.model.heads.runner import StateRunner

MAX_NGRAM = 32  # each sequence has an index of all n-grams up to this size


class DrafterResources(Protocol):
    """What a kind of drafter may get from a pair."""

    def head(self, kind: str, path: str, threshold: float, target: Runner) -> StateRunner:
        """The draft head in this folder, as it fits the target; loaded once."""
        ...


class DrafterKind(ABC):
    """Subclasses are frozen dataclasses: their fields are the options."""

    name: ClassVar[str]
    needs_model: ClassVar[bool] = False  # the pair's draft model
    reads_target: ClassVar[bool] = False  # it has weights of its own, which read the target's hidden states
    main_option: ClassVar[str] = ""  # that may be given without its name

    def __post_init__(self) -> None:
        """Refuses options that are wrong."""
        return

    def bind(self, pair: DrafterResources, target: Runner) -> DrafterKind:
        """This kind with what it needs of a pair whose target is run by this runner."""
        return self

    @property
    def looks_up(self) -> bool:
        return not (self.needs_model or self.reads_target)

    @property
    def branches(self) -> TreeOptions:
        return CHAIN

    @abstractmethod
    def build(self, draft: Runner | None, early_exit: EarlyExit) -> Drafter: ...


@dataclass(frozen=True)
class Branching(DrafterKind):
    """Kinds whose drafts may branch."""

    tree: int = 0  # tokens of a draft; 0: drafts are chains
    depth: int = 0  # tokens on a path; 0: the draft length
    top: int = TOP  # branches of a token

    def __post_init__(self) -> None:
        _ = self.branches  # refuses what is wrong
        super().__post_init__()

    @property
    def branches(self) -> TreeOptions:
        return TreeOptions(self.tree, self.depth, self.top)


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
        return NgramDrafter(self.longest, self.shortest, self.earliest, self.branches)


@dataclass(frozen=True)
class Ngram(Branching, Lookup):
    name = "ngram"

    def build(self, draft: Runner | None, early_exit: EarlyExit) -> Drafter:
        return self.lookup()


@dataclass(frozen=True)
class Model(Branching):
    name = "model"
    needs_model = True

    def build(self, draft: Runner | None, early_exit: EarlyExit) -> Drafter:
        assert draft is not None
        return ModelDrafter(draft, early_exit, self.branches)


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


@dataclass(frozen=True)
class Head(DrafterKind):
    """What kinds that draft with a head for this target share."""

    reads_target = True
    main_option = "path"

    path: str = ""
    # Share of the target's tokens that it has to guess right when it is loaded.
    threshold: float = field(default=0.1, metadata={"was": "least"})
    head: StateRunner | None = field(default=None, compare=False, repr=False, metadata={"option": False})

    def __post_init__(self) -> None:
        if not self.path:
            name = self.name
            raise BadRequest(
                f"drafter {name!r} needs the folder of a head that was trained for the target: {name}:PATH"
            )
        if not 0.0 <= self.threshold <= 1.0:
            raise BadRequest(f"{self.name}'s threshold is {self.threshold}; give a share from 0 (any head) to 1")

    def bind(self, pair: DrafterResources, target: Runner) -> DrafterKind:
        return replace(self, head=pair.head(self.name, self.path, self.threshold, target))

    def build(self, draft: Runner | None, early_exit: EarlyExit) -> Drafter:
        assert self.head is not None, "build comes after bind"
        return HeadDrafter(self.head, early_exit, self.branches)


@dataclass(frozen=True)
class Eagle(Branching, Head):
    """An EAGLE-3 head."""

    name = "eagle"


@dataclass(frozen=True)
class Dflash(Head):
    """A block head in the layout of DFlash: one pass proposes a whole draft."""

    name = "dflash"


REGISTRY = Registry("drafter", "semspec.drafters", DrafterKind)  # type: ignore[type-abstract]
register = REGISTRY.register
for _kind in (Cascade, Dflash, Eagle, Model, Ngram):
    register(_kind)
