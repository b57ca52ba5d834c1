"""Whether two answers of mathematics are equal, whatever they look like. math-verify decides (see `math_worker`).

Own code is only what math-verify gets wrong on our test cases; docs/math-answers.md lists them. All functions are
safe to call from any thread, with any text.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from fractions import Fraction

from semspec.tasks import math_worker
from semspec.tasks.numerals import MAX_CHARS, exact

_SIGNS = {  # math-verify does not read them
    ord(sign): new
    for new, signs in {
        "-": "\u2212\u2013",
        " ": "\u00a0\u202f\u2009\u00b0",
        "*": "\u00d7\u00b7",
        "/": "\u00f7",
        "^2": "\u00b2",
        "^3": "\u00b3",
        "\\pi ": "\u03c0",
        "\\pm ": "\u00b1",
        "\\in ": "\u2208",
        "\\cup ": "\u222a",
        "\\sqrt ": "\u221a",
        "\\infty ": "\u221e",
    }.items()
    for sign in signs
}
_UNITS = r"(?:mm|cm|km|kg|mg|mph|ft|lbs?|oz|deg|hrs?|min|sec|cents?|dollars?|degrees?|units?)"
_CLEANUPS: tuple[tuple[re.Pattern[str], str | Callable[[re.Match[str]], str]], ...] = tuple(
    (re.compile(pattern), new)
    for pattern, new in (
        (r"(?<!\\)\\[()\[\]]|\*\*", " "),  # math and Markdown delimiters; "\\\\[" after a row of a matrix is none
        (r",\\!\s*|\{,\}", ","),  # thousands: 10,\!080 and 10{,}080
        (r"(?<!\\)\\[!,;:> ]|\\q?quad(?![A-Za-z])|~", " "),
        (r"\\(?:mbox|textbf|textit|textrm|textsf|mathrm|operatorname|hbox)\s*\{", r"\\text{"),
        (r"\\text\{\s*(?:and|or)\s*\}", ","),  # or it is taken for a unit
        (r"\^\s*\{?\s*\\circ(?![A-Za-z])\s*\}?|\\degree(?![A-Za-z])|\\?[%$]", ""),  # 12.5% is 12.5
        (r"(?<![\\A-Za-z])pi(?![A-Za-z])", r"\\pi"),
        (r"\\?(?<![A-Za-z])sqrt\s*\(([^()]*)\)|\\sqrt\s*(\d+)", r"\\sqrt{\1\2}"),  # \sqrt49 is not \sqrt{4}9
        (r"(?<![\d.^_}/])(\d+)\s+(\d+)\s*/\s*(\d+)", r"\1\\frac{\2}{\3}"),  # 1 1/2 is not 1
        (r"^\s*\\text\{([^{}]*)\}\s*$", r"\1"),
        (r"(?<=\S)\s*\\text\{[^{}]*\}(?:\s*\^\s*\{?\d+\}?)?", ""),  # units, as text and as words
        (rf"(?<=[\d)}}])(?:\s*{_UNITS}|\s+[A-Za-z]{{2,}}\.?)(?:\s+[A-Za-z]{{2,}}\.?)*(?:\^\{{?\d\}}?)?\s*$", ""),
        (r"(?:(?<==)|^)\s*([-+]?\d{1,3}(?:[, ]\d{3})+(?:\.\d+)?)\s*$", lambda found: re.sub("[, ]", "", found[1])),
    )
)


def plain(text: str) -> str:
    """The answer without what only concerns its looks, and without units: `$1,\\!080$ cm` is `1080`."""
    text = text.translate(_SIGNS).strip().rstrip(".,;:")
    for pattern, new in _CLEANUPS:
        text = pattern.sub(new, text)
    return text.strip().rstrip(".")


def choice(answer: str) -> str | None:
    """The letter of a multiple-choice answer: "C", "(C)", "\\text{(C)}", "(C) 42"."""
    answer = re.sub(r"\\text[a-z]*\{([^{}]*)\}", r"\1", answer[: 2 * MAX_CHARS])
    found = re.match(r"\(([A-J])\)(?!\w)|([A-J])(?:[.):](?:\s|$)|$)", plain(answer))
    return (found[1] or found[2]) if found else None


_BASE = re.compile(r"(?<=\d)_\{?(\d+)\}?$")


def equivalent(given: str, reference: str) -> bool:
    """Whether a given answer equals the reference. math-verify knows no letters of choices and no number bases."""
    letter = choice(reference)
    if letter is not None and choice(given) == letter:
        return True
    given, reference = plain(given), plain(reference)
    bases = _BASE.search(given), _BASE.search(reference)
    if bases[1] and (not bases[0] or bases[0][1] == bases[1][1]):  # 52 for 52_8, where the question says base 8
        given, reference = _BASE.sub("", given), _BASE.sub("", reference)
    elif bases[0]:
        return False
    if _letters(given) == _letters(reference):
        return True
    numbers = exact(given), exact(reference)
    if numbers[0] is not None and numbers[1] is not None:
        return numbers[0] == numbers[1]
    return _readable(given) and _readable(reference) and math_worker.equal(given, reference)


def _letters(text: str) -> str:
    """The signs that an answer consists of. Case says nothing in a word; in formulas r and R are two."""
    text = re.sub(r"(?<!\d)\s+|\s+(?!\d)", "", text)
    return text.casefold() if text.isalpha() else text


def _readable(text: str) -> bool:
    return 0 < len(text) <= MAX_CHARS and text.count("{") == text.count("}")


_CLOSED = re.compile(r"(?:\\(?:[dtc]?frac|sqrt|cdot|times|div)|[\d\s.+*/^(){}\[\]-])+", re.ASCII)


def rational(text: str) -> Fraction | None:
    """The value of a closed expression such as `3^2 + 9`; None where it has none, or it is not rational."""
    text = plain(text)
    if (number := exact(text)) is not None:
        return number
    if not (_readable(text) and _CLOSED.fullmatch(text)) or re.search(r"\d\s+\d", text):
        return None  # two numbers side by side are no product
    return math_worker.rational(text)
