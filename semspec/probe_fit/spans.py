"""Which problems a probe knows, in few words: numbered names that follow one another are one span, ["p/", 3, 7]."""

from __future__ import annotations

import re
from collections.abc import Iterable
from itertools import pairwise

Span = str | list[str | int]  # a name, or what names begin with and their first and last numbers
_NUMBERED = re.compile(r"(.*?)(0|[1-9][0-9]*)\Z", re.DOTALL)


def spans(names: Iterable[str]) -> list[Span]:
    """The same names, sorted, those that follow one another together."""
    found = {name: _numbered(name) for name in names}
    numbers = sorted({number for number in found.values() if number is not None})
    breaks = [i for i, ((stem, a), (other, b)) in enumerate(pairwise(numbers), 1) if (stem, a + 1) != (other, b)]
    runs = [numbers[begin:end] for begin, end in pairwise([0, *breaks, len(numbers)]) if begin < end]
    others = sorted(name for name, number in found.items() if number is None)
    return [*others, *(list[str | int]((stem, first, run[-1][1])) for run in runs for stem, first in run[:1])]


def among(known: Iterable[Span], names: Iterable[str]) -> list[str]:
    """Those of the names that spans cover, sorted."""
    single, wide = set[str](), dict[str, list[tuple[int, int]]]()
    for span in known:
        if isinstance(span, str):
            single.add(span)
        else:
            wide.setdefault(str(span[0]), []).append((int(span[1]), int(span[2])))

    def covered(name: str) -> bool:
        number = _numbered(name)
        return name in single or (number is not None and any(a <= number[1] <= b for a, b in wide.get(number[0], ())))

    return sorted({name for name in names if covered(name)})


def _numbered(name: str) -> tuple[str, int] | None:
    """What a name begins with, and the number it ends in; a number has no leading zeros."""
    found = _NUMBERED.match(name)
    return (found[1], int(found[2])) if found else None
