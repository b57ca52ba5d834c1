"""Which steps mean the same? Ways to sort texts by meaning, by name: canonical, nli, embedding, judge.

Adding one is one class: derive from `Clusterer` (or from `Pairwise`, if it compares two texts) and list it below.
Texts that differ in white space only mean the same to all of them.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, ClassVar

from semspec.errors import BadRequest
from semspec.registry import Registry

if TYPE_CHECKING:
    from semspec.pair import Pair


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
    needs_pair: ClassVar[bool] = False

    source: Source

    @abstractmethod
    def cluster(self, texts: Sequence[str]) -> list[int]:
        """The number of each text's cluster; clusters are numbered as they first appear."""


@dataclass
class Canonical(Clusterer):
    """The task's own parser says what a step means; steps that it cannot read are told apart by their words."""

    name = "canonical"

    def __post_init__(self) -> None:
        if self.source.parse is None:
            raise BadRequest("this task has no parser of meanings; cluster with nli, embedding or judge instead")

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
    """Each text in turn joins the first cluster whose first text it is the same as, or begins one."""

    def cluster(self, texts: Sequence[str]) -> list[int]:
        distinct = list(dict.fromkeys(plain(text) for text in texts))
        self.prepare(distinct)
        heads: list[str] = []
        numbers: dict[str, int] = {}
        for text in distinct:
            same = self.same(text, heads) if heads else []
            numbers[text] = next((i for i, yes in enumerate(same) if yes), len(heads))
            if numbers[text] == len(heads):
                heads.append(text)
        return [numbers[plain(text)] for text in texts]

    def prepare(self, texts: Sequence[str]) -> None:
        """Called with all distinct texts before any two are compared."""

    @abstractmethod
    def same(self, text: str, others: Sequence[str]) -> list[bool]:
        """Whether `text` means what each of the others means."""


def plain(text: str) -> str:
    return " ".join(text.split())


def numbers_in(text: str) -> frozenset[float]:
    """The numbers of a text; how often each is said does not matter."""
    found = re.findall(r"\d+(?:,\d{3})*(?:\.\d+)?", text)
    return frozenset(float(number.replace(",", "")) for number in found)


def make(spec: str, source: Source) -> Clusterer:
    return registry().make(spec, source=source)


@cache
def registry() -> Registry[Clusterer]:
    """Filled when first asked for, since two of these bring models."""
    from semspec.probe_fit.compare import Embedding, Judge, Nli

    found = Registry("clusterer", "semspec.clusterers", Clusterer)  # type: ignore[type-abstract]
    for kind in (Canonical, Nli, Embedding, Judge):
        found.register(kind)
    return found


def register(kind: type[Clusterer]) -> type[Clusterer]:
    """Make a clusterer available by its name."""
    return registry().register(kind)
