"""Kinds of drafters by name, for `drafter=` of a request. A kind builds one drafter per sequence."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, ClassVar, Protocol

from semspec.draft.cascade import CascadeDrafter
from semspec.draft.early_exit import EarlyExit
from semspec.draft.head import HeadDrafter
from semspec.draft.model import ModelDrafter
from semspec.draft.ngram import NgramDrafter
from semspec.draft.tree import CHAIN, TOP, TreeOptions
from semspec.errors import BadRequest
from semspec.registry import Registry, check_limits
from semspec.tree import MAX_TREE
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
        check_limits(self.name, self)

    def bind(self, pair: DrafterResources, target: Runner) -> DrafterKind:
        """This kind with what it needs of a pair whose target is run by this runner."""
        return self

    @property
    def looks_up(self) -> bool:
        return not (self.needs_model or self.reads_target)

    @property
    def tree_options(self) -> TreeOptions:
        return CHAIN

    @abstractmethod
    def build(self, draft: Runner | None, early_exit: EarlyExit) -> Drafter: ...


@dataclass(frozen=True)
class TreeKind(DrafterKind):
    """Kinds that can draft trees."""

    tree: int = field(
        default=0,
        metadata={"label": "tokens of a tree draft; 0: drafts are chains", "min": 0, "max": MAX_TREE},
    )
    depth: int = field(
        default=0, metadata={"label": "tokens on a path; 0: the draft length", "min": 0, "note": "with tree"}
    )
    top: int = field(
        default=TOP, metadata={"label": "branches per token", "min": 1, "max": MAX_TREE, "note": "with tree"}
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        _ = self.tree_options  # refuses those that do not belong together

    @property
    def tree_options(self) -> TreeOptions:
        return TreeOptions(self.tree, self.depth, self.top)


@dataclass(frozen=True)
class Lookup(DrafterKind):
    """What kinds that look drafts up in the text share."""

    longest: int = field(default=4, metadata={"label": "longest n-gram to look up", "min": 1, "max": MAX_NGRAM})
    shortest: int = field(default=1, metadata={"label": "shortest n-gram to look up", "min": 1, "max": "longest"})
    earliest: bool = field(default=False, metadata={"label": "take the earliest occurrence, not the latest"})

    def lookup(self) -> NgramDrafter:
        return NgramDrafter(self.longest, self.shortest, self.earliest, self.tree_options)


@dataclass(frozen=True)
class Ngram(TreeKind, Lookup):
    """Looks up in the text what followed the same tokens before."""

    name = "ngram"

    def build(self, draft: Runner | None, early_exit: EarlyExit) -> Drafter:
        return self.lookup()


@dataclass(frozen=True)
class Model(TreeKind):
    """The draft model proposes token by token."""

    name = "model"
    needs_model = True

    def build(self, draft: Runner | None, early_exit: EarlyExit) -> Drafter:
        assert draft is not None
        return ModelDrafter(draft, early_exit, self.tree_options)


@dataclass(frozen=True)
class Cascade(Lookup):
    """The draft model proposes, and verifies guesses that are looked up in the text. The lookup of FLy's released code
    is earliest=true; which tokens are drafted does not depend on it."""

    name = "cascade"
    needs_model = True

    ahead: int = field(default=6, metadata={"label": "tokens to look up at a time", "min": 1})

    def build(self, draft: Runner | None, early_exit: EarlyExit) -> Drafter:
        assert draft is not None
        return CascadeDrafter(draft, self.lookup(), self.ahead, early_exit)


@dataclass(frozen=True)
class HeadKind(DrafterKind):
    """What kinds that draft with a head for this target share."""

    reads_target = True
    main_option = "path"
    comes_with_target: ClassVar[bool] = False  # a folder need not be named

    path: str = field(default="", metadata={"label": "the head's folder"})
    threshold: float = field(
        default=0.1,
        metadata={"label": "refuse a head whose first guess is right less often", "was": "least", "min": 0, "max": 1},
    )
    head: StateRunner | None = field(default=None, compare=False, repr=False, metadata={"option": False})

    def __post_init__(self) -> None:
        if not self.path and not self.comes_with_target:
            name = self.name
            raise BadRequest(
                f"drafter {name!r} needs the folder of a head that was trained for the target: {name}:PATH"
            )
        super().__post_init__()

    def bind(self, pair: DrafterResources, target: Runner) -> DrafterKind:
        return replace(self, head=pair.head(self.name, self.path, self.threshold, target))

    def build(self, draft: Runner | None, early_exit: EarlyExit) -> Drafter:
        assert self.head is not None, "build comes after bind"
        return HeadDrafter(self.head, early_exit, self.tree_options)


@dataclass(frozen=True)
class Eagle(TreeKind, HeadKind):
    """An EAGLE-3 head drafts from the target's hidden states."""

    name = "eagle"


@dataclass(frozen=True)
class Dflash(TreeKind, HeadKind):
    """A DFlash block head proposes a whole draft in one pass, or a tree of the likeliest paths through it (DDTree)."""

    name = "dflash"


@dataclass(frozen=True)
class Mtp(HeadKind):
    """The target's own layer for multi-token prediction drafts, of models that are published with one."""

    name = "mtp"
    comes_with_target = True


REGISTRY = Registry("drafter", "semspec.drafters", DrafterKind)  # type: ignore[type-abstract]
register = REGISTRY.register
for _kind in (Cascade, Dflash, Eagle, Model, Mtp, Ngram):
    register(_kind)
