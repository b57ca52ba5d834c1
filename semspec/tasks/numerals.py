"""Numbers as people and models write them in prose, read exactly.

Own code, not math-verify's: that one finds 1 in "1 1/2", 1/2 in "2\\frac{1}{2}", 10 in "7 \\times 10^{-5}" and
nothing in "-$3.50".
"""

from __future__ import annotations

import re
from collections import deque
from fractions import Fraction

from semspec.tasks.scripts import LETTER

MAX_CHARS = 300  # a longer number or formula comes from a model that repeats itself

_NUMERAL = re.compile(
    rf"(?<!{LETTER})(?<!\.)"
    r"""(?P<minus>(?<![)\]}%])[-\u2212](?=[\d.$\\]))? (?:\\?\$(?P<minus2>-)?)?
    (?: \\[dtc]?frac\s*\{(?P<top>\d+)\}\s*\{(?P<bottom>0*[1-9]\d*)\}
      | (?P<whole>\d{1,3}(?:(?:,(?:\\!\ ?)?|\{,\})\d{3})+(?!\d)|\d+)? (?P<part>\.\d+)? (?(whole)|(?(part)|(?!)))
        (?: [eE](?P<e>[-+]?\d{1,3})(?!\w)
          | \s*(?:\\times|\\cdot|\u00d7|\*)\s*10\s*\^\s*\{?\s*(?P<ten>[-+]?\d{1,3})\}?
          | \s*/\s*(?P<over>0*[1-9]\d*)(?![\d/])
          | \ (?P<up>\d+)/(?P<down>0*[1-9]\d*)(?![\d/])
          | \s*\\[dtc]?frac\s*\{(?P<up2>\d+)\}\s*\{(?P<down2>0*[1-9]\d*)\}
        )?
    )""",
    re.VERBOSE,
)


def _value(found: re.Match[str] | None) -> Fraction | None:
    if found is None or len(found[0]) > MAX_CHARS:
        return None
    if found["top"]:
        result = Fraction(int(found["top"]), int(found["bottom"]))
    else:
        result = Fraction(re.sub(r"[^\d]", "", found["whole"] or "0") + (found["part"] or ""))
        result *= Fraction(10) ** int(found["e"] or found["ten"] or 0)
        result /= int(found["over"] or 1)
        result += Fraction(int(found["up"] or found["up2"] or 0), int(found["down"] or found["down2"] or 1))
    return -result if found["minus"] or found["minus2"] else result


def exact(text: str) -> Fraction | None:
    """The value of a text that is one number and nothing else."""
    return _value(_NUMERAL.fullmatch(text))


def first_number(text: str) -> Fraction | None:
    """The first number in a text: "18 dollars for 3 days" is 18."""
    return _value(_NUMERAL.search(text))


def last_number(text: str) -> Fraction | None:
    """The last number in a text: -$1,234.50, 3/4, 1 1/2, \\frac{1}{2}, 1.2e3, 5 \\times 10^{3}, 50% (which is 50)."""
    return _value(_last(text))


def last_numeral(text: str) -> str | None:
    """The last number in a text as it is written."""
    found = _last(text)
    return found[0] if found else None


def _last(text: str) -> re.Match[str] | None:
    return next(iter(deque(_NUMERAL.finditer(text), maxlen=1)), None)
