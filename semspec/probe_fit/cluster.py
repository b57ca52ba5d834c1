"""Which steps mean the same? Ways to sort texts by meaning, by name: canonical, nli, embedding, target.

Adding one is one class: derive from `Clusterer` (or from `Pairwise`, if it compares two texts) and list it below.
Texts that differ in white space only mean the same to all of them.
"""

from __future__ import annotations

import re
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, ClassVar

from semspec.errors import OLD_NAME, BadRequest
from semspec.registry import Registry

if TYPE_CHECKING:
    from semspec.pair import Pair

ORDERS = ("first", "released")
SENTENCES = ("Adding 12 and 30 gives 42 apples.", "There are 7 boats on the lake.")


@dataclass
class Source:
    """What clusterers may draw on."""

    parse: Callable[[str], Hashable | None] | None = None  # a task's own reading of a step; None: it means nothing
    pair: Pair | None = None
    device: str = "auto"


@dataclass
class Clusterer(ABC):
    """Fields, but for `source`, are options: "embedding:threshold=0.9" sets the field `threshold`."""

    name: ClassVar[str]

    source: Source

    @abstractmethod
    def cluster(self, texts: Sequence[str]) -> list[int]:
        """The number of each text's cluster; clusters are numbered as they first appear."""

    def try_out(self) -> None:
        """Sort two sentences: what cannot work is to fail before anything is sampled."""
        self.cluster(SENTENCES)


@dataclass
class Canonical(Clusterer):
    """The task's own parser says what a step means; steps that it cannot read are told apart by their words."""

    name = "canonical"

    def __post_init__(self) -> None:
        if self.source.parse is None:
            raise BadRequest("this task has no parser of meanings; cluster with nli, embedding or target instead")

    def cluster(self, texts: Sequence[str]) -> list[int]:
        assert self.source.parse is not None
        numbers: dict[Hashable, int] = {}
        found = []
        for text in texts:
            meaning = self.source.parse(text.strip())
            key = ("words", plain(text)) if meaning is None else ("meaning", meaning)
            found.append(numbers.setdefault(key, len(numbers)))
        return found


@dataclass
class Pairwise(Clusterer):
    """Compares two texts at a time. Which clusters come of it depends on the order, unless it is an equivalence:

    first     each text joins the first cluster whose first text it is the same as, or begins one
    released  a text that is in no cluster begins one and takes in all later texts that are the same, also those that an
              earlier cluster has: the released code of SemanticSpec
    """

    order: str = "first"
    _known: set[str] = field(default_factory=set, init=False, repr=False, metadata={"option": False})
    _said: dict[tuple[str, str], bool] = field(default_factory=dict, init=False, repr=False, metadata={"option": False})

    def __post_init__(self) -> None:
        if self.order not in ORDERS:
            raise BadRequest(f"clusterer {self.name!r} has no order {self.order!r}; give {' or '.join(ORDERS)}")

    def cluster(self, texts: Sequence[str]) -> list[int]:
        texts = [plain(text) for text in texts]
        distinct = list(dict.fromkeys(texts))
        if not self._known.issuperset(distinct):  # else what was found of them holds
            self._known = set(distinct)
            self._said.clear()
            self.prepare(distinct)
        if self.order == "released":
            return self._released(texts)
        numbers = self._first(distinct)
        return [numbers[text] for text in texts]

    def _first(self, texts: list[str]) -> dict[str, int]:
        heads: list[str] = []
        numbers: dict[str, int] = {}
        for text in texts:
            numbers[text] = next((i for i, yes in enumerate(self._same(text, heads)) if yes), len(heads))
            if numbers[text] == len(heads):
                heads.append(text)
        return numbers

    def _released(self, texts: list[str]) -> list[int]:
        """Equal texts may end in different clusters, if one is before and one after the text that begins the later."""
        numbers = [-1] * len(texts)
        clusters = 0
        for i, text in enumerate(texts):
            if numbers[i] < 0:
                others = list(dict.fromkeys(other for other in texts[i + 1 :] if other != text))
                same = {text, *(other for other, yes in zip(others, self._same(text, others), strict=True) if yes)}
                for j in range(i, len(texts)):
                    numbers[j] = clusters if texts[j] in same else numbers[j]
                clusters += 1
        return numbers

    def _same(self, text: str, others: Sequence[str]) -> list[bool]:
        """As `same`, asking once about each pair of the texts that were clustered last."""
        unknown = [other for other in others if (text, other) not in self._said]
        if unknown:
            self._said |= zip(((text, other) for other in unknown), self.same(text, unknown), strict=True)
        return [self._said[text, other] for other in others]

    def prepare(self, texts: Sequence[str]) -> None:
        """Called with all distinct texts before any two are compared."""

    @abstractmethod
    def same(self, text: str, others: Sequence[str]) -> list[bool]:
        """Whether `text` means what each of the others means."""


def plain(text: str) -> str:
    return " ".join(text.split())


def numbers_in(text: str) -> frozenset[float]:
    """The numbers of a text; how often each occurs does not matter."""
    found = re.findall(r"\d+(?:,\d{3})*(?:\.\d+)?", text)
    return frozenset(float(number.replace(",", "")) for number in found)


def make(spec: str, source: Source) -> Clusterer:
    return registry().make(_named(spec), source=source)


def asks_target(spec: str) -> bool:
    """Whether it needs the pair to be loaded."""
    return _named(spec).partition(":")[0] == "target"


def _named(spec: str) -> str:
    name, colon, options = spec.partition(":")
    if name == "judge":
        text = f"clusterer 'judge' is now called 'target'; {OLD_NAME}"
        warnings.warn(text, DeprecationWarning, stacklevel=2)
        return f"target{colon}{options}"
    return spec


@cache
def registry() -> Registry[Clusterer]:
    """Filled when first asked for, since two of these bring models."""
    from semspec.probe_fit.compare import AskTarget, Embedding, Nli

    found = Registry("clusterer", "semspec.clusterers", Clusterer)  # type: ignore[type-abstract]
    for kind in (Canonical, Nli, Embedding, AskTarget):
        found.register(kind)
    return found


def register(kind: type[Clusterer]) -> type[Clusterer]:
    """Make a clusterer available by its name."""
    return registry().register(kind)
