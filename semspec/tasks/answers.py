"""Finding the answer in what a model wrote, and comparing it with the right one.

A marked answer counts (`\\boxed{...}`, `#### ...`), else a stated one ("the answer is ..."), else the last number or
formula. Reasoning (`<think>...</think>`) is read only if nothing after it answers, and then only for a marked answer: a
number that truncated reasoning happens to end with is not an answer.

Own code, not math-verify's extraction: that one takes numbers from reasoning, knows no `####`, and takes
quadratic time on repetitive text.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from fractions import Fraction

from semspec.tasks.equivalence import choice, equivalent, rational
from semspec.tasks.numerals import first_number, last_number, last_numeral
from semspec.tasks.scripts import LETTER

THINK, END_THINK = "<think>", "</think>"
_FAR = 1000  # characters; an answer is shorter, and a model that repeats itself must not cost quadratic time


# --- finding the answer


def visible(text: str) -> str:
    """The text without its reasoning; nothing if that never ended."""
    if END_THINK in text:
        return text.rsplit(END_THINK, 1)[1].strip("\r\n")
    return text.split(THINK, 1)[0].strip("\r\n")  # spaces stay: in code they indent


_BRACE = re.compile(r"(\\(?:boxed|fbox|framebox)\s*\{)|[{}]")
_SHORT_BOX = re.compile(r"\\boxed\s+([^\s{}$]+)")
_HASHES = re.compile(rf"####[ \t]*(\S[^\n]{{,{_FAR}}})")
_HEADING = re.compile(r"\**(?:\d+[.)]\s*\**\s*[A-Za-z]|(?:step|part|case)\b)", re.IGNORECASE)  # "#### Step 3"


def marked(text: str) -> str | None:
    """The last answer that is marked as such: in a box, or after four hashes that are no heading."""
    found = [*_boxes(text), *((hit.start(), hit[1].rstrip(".,")) for hit in _SHORT_BOX.finditer(text))]
    hashes = [(hit.start(), hit[1]) for hit in _HASHES.finditer(text) if not _HEADING.match(hit[1])]
    if found:  # beside a box, hashes before mere words are a heading
        hashes = [(start, answer) for start, answer in hashes if re.search(r"\d", answer)]
    found += hashes
    return max(found)[1].strip() or None if found else None


def _boxes(text: str) -> Iterator[tuple[int, str]]:
    """Where each closed box starts, and what is in it, braces within braces included."""
    opened: list[re.Match[str]] = []
    for brace in _BRACE.finditer(text):
        if brace[0] != "}":
            opened.append(brace)
        elif opened:
            start = opened.pop()
            if start[1] and brace.start() - start.end() <= _FAR:
                yield start.start(), text[start.end() : brace.start()]


_STATED = re.compile(
    rf"\banswer\b(?:[^\S\n]*\([^()\n]{{,60}}\))?[\s*]*(?:is\b|are\b|:|=)[\s*:]*([^\n]{{1,{_FAR}}})", re.IGNORECASE
)


def stated(text: str) -> str | None:
    """What the last "answer is ..." or "answer: ..." says, up to the end of its sentence."""
    found = _STATED.findall(text)
    return re.split(r"\.(?:\s|$)", found[-1], maxsplit=1)[0].strip().strip("*") or None if found else None


# --- numbers


def number(answer: str) -> Fraction | None:
    """The number that a marked or stated answer gives, words and an equation before it aside: "9 * 2 = $18 a day"."""
    side = answer.rsplit("=", 1)[-1]
    exact = rational(side)
    return exact if exact is not None else first_number(side)


def final_number(text: str) -> Fraction | None:
    """The number that a whole output answers with."""
    shown = visible(text)
    for answer in (marked(shown), stated(shown)):
        if answer is not None and (found := number(answer)) is not None:
            return found
    found = last_number(shown)
    if found is None and (thought := marked(text)) is not None:
        return number(thought)
    return found


def same_number(text: str, reference: str | float | Fraction) -> bool:
    """Whether an output answers with this number, exactly."""
    right = number(reference) if isinstance(reference, str) else Fraction(str(reference))
    return right is not None and final_number(text) == right


# --- formulas


_FORMULA = re.compile(r"\$+((?:\\.|[^$\\])+)\$+|\\\((.+?)\\\)|\\\[(.+?)\\\]", re.DOTALL)
_WORDS = re.compile(r"(?<![\\A-Za-z{])[A-Za-z]{2,}")


def final_math(text: str) -> str | None:
    """The formula, number or word that a whole output answers with, as written."""
    shown = visible(text)
    return marked(shown) or stated(shown) or _bare(shown) or marked(text)


def _bare(shown: str) -> str | None:
    """An answer without any mark: a last line that is all answer, else the last formula or number in it."""
    line = shown.strip().rsplit("\n", 1)[-1][-_FAR:]
    if len(_WORDS.findall(line)) < 3:
        return line or None
    formulas = _FORMULA.findall(line)
    if formulas:
        return next(filter(None, formulas[-1]))
    return last_numeral(line)


def same_math(text: str, reference: str) -> bool:
    """Whether an output answers with a formula that equals the reference."""
    found = final_math(text)
    return found is not None and equivalent(found, reference)


# --- choices and words


def same_choice(text: str, reference: str) -> bool:
    """Whether an output chooses this letter; unmarked, the last letter in brackets or by itself counts."""
    shown, right = visible(text), choice(reference)
    for answer in (marked(shown), stated(shown), shown):
        if answer is not None and (found := choice(answer)) is not None:
            return found == right
    letters = re.findall(r"\(([A-J])\)|\b([B-HJ])\b", shown)  # A and I are words too
    return bool(letters) and (letters[-1][0] or letters[-1][1]) == right


def _words(text: str) -> str:
    return " ".join(text.casefold().split())


def same_text(text: str, reference: str) -> bool:
    """Whether an output is the reference, or marks or states it; case and spacing aside."""
    shown = visible(text)
    right = _words(reference).rstrip(".")
    return any(
        answer is not None and _words(answer).rstrip(".") == right for answer in (shown, marked(shown), stated(shown))
    )


def contains(text: str, reference: str) -> bool:
    """Whether an output has the reference in it as whole words, outside reasoning; case and spacing aside."""
    right = re.escape(_words(reference))
    return bool(right) and re.search(rf"(?<!{LETTER}){right}(?!{LETTER})", _words(visible(text))) is not None
