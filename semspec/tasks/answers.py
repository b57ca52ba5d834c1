"""Finding the answer in what a model wrote, and comparing it with the right one.

An answer counts where it is marked (`\\boxed{...}`, `#### ...`), else where it is stated ("the answer is ..."), else
the last number or formula. Thoughts (`<think>...</think>`) are read only when nothing behind them answers, and then
only for a marked answer: a number that a cut-off thought happens to end with is not an answer.
All functions are pure.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Iterator
from fractions import Fraction

from semspec.tasks.latex import LONGEST, equal, plain, unnamed, value

THINK, END_THINK = "<think>", "</think>"
_FAR = 1000  # characters; an answer is shorter, and a model that repeats itself must not cost quadratic time


# --- where the answer stands


def visible(text: str) -> str:
    """What a reader is meant to see: the text without its thoughts; nothing if it never left them."""
    if END_THINK in text:
        return text.rsplit(END_THINK, 1)[1].strip("\r\n")
    return text.split(THINK, 1)[0].strip("\r\n")  # spaces stay: in code they indent


_BRACE = re.compile(r"(\\(?:boxed|fbox|framebox)\s*\{)|[{}]")
_SHORT_BOX = re.compile(r"\\boxed\s+([^\s{}$]+)")
_HASHES = re.compile(rf"####[ \t]*(\S[^\n]{{,{_FAR}}})")
_HEADING = re.compile(r"\**(?:\d+[.)]\s*\**\s*[A-Za-z]|(?:step|part|case)\b)", re.IGNORECASE)  # "#### Step 3"


def marked(text: str) -> str | None:
    """The last answer that is marked as such: in a box, or behind four hashes (those of a heading aside)."""
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


_PROSE_NUMBER = re.compile(
    r"""(?<![\w.]) (?P<minus>(?<![)\]}%])[-\u2212](?=[\d.$\\]))? (?:\\?\$(?P<minus2>-)?)?
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


def _number(found: re.Match[str]) -> Fraction | None:
    """The value of one number found in prose; None for one so long that only a loop writes it."""
    if len(found[0]) > LONGEST:
        return None
    if found["top"]:
        result = Fraction(int(found["top"]), int(found["bottom"]))
    else:
        result = Fraction(re.sub(r"[^\d]", "", found["whole"] or "0") + (found["part"] or ""))
        result *= Fraction(10) ** int(found["e"] or found["ten"] or 0)
        result /= int(found["over"] or 1)
        result += Fraction(int(found["up"] or found["up2"] or 0), int(found["down"] or found["down2"] or 1))
    return -result if found["minus"] or found["minus2"] else result


def last_number(text: str) -> Fraction | None:
    """The last number in a text: -$1,234.50, 3/4, 1 1/2, \\frac{1}{2}, 1.2e3, 5 \\times 10^{3}, 50% (which is 50)."""
    found = _last(text)
    return _number(found) if found else None


def _last(text: str) -> re.Match[str] | None:
    return next(iter(deque(_PROSE_NUMBER.finditer(text), maxlen=1)), None)


def first_number(text: str) -> Fraction | None:
    """The first number in a text: "18 dollars for 3 days" is 18."""
    found = _PROSE_NUMBER.search(text)
    return _number(found) if found else None


def number(answer: str) -> Fraction | None:
    """The number that a marked or stated answer gives, words and an equation before it aside: "9 * 2 = $18 a day"."""
    exact = value(plain(answer))
    return exact if isinstance(exact, Fraction) else first_number(answer.rsplit("=", 1)[-1])


def final_number(text: str) -> Fraction | None:
    """The number that a whole output answers with."""
    shown = visible(text)
    for place in (marked(shown), stated(shown)):
        if place is not None and (found := number(place)) is not None:
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
    found = _last(line)
    return found[0] if found else None


def same_math(text: str, reference: str) -> bool:
    """Whether an output answers with a formula that is the reference, whatever its looks."""
    found = final_math(text)
    return found is not None and equivalent(found, reference)


def equivalent(a: str, b: str) -> bool:
    """Whether two answers are one: as numbers where both have a value, part by part where both have parts
    (tuples, intervals, unions, matrices, lists in any order), else as strings of one form."""
    letter = choice(b)
    if letter is not None and choice(a) == letter:
        return True
    a, b = plain(a), plain(b)
    return _same(a, b) or _same(a, re.sub(r"(?<=\d)_\{?\d+\}?$", "", b))  # 52 for 52_8, where the question says base 8


def _same(a: str, b: str) -> bool:
    if max(len(a), len(b)) > LONGEST:
        return canonical(a) == canonical(b)  # too long to be taken apart
    one, other = value(a), value(b)
    if one is not None and other is not None:
        return equal(one, other)
    for parts, ordered in ((_union, False), (_matrix, True), (_enclosed, True), (_list, False)):
        first, second = parts(a), parts(b)
        if first or second:
            return _all_same(first, second, ordered)
    return canonical(a) == canonical(b)


def _all_same(first: list[str], second: list[str], ordered: bool) -> bool:
    if len(first) != len(second):
        return False
    if ordered:
        return all(_same(one, other) for one, other in zip(first, second, strict=True))
    left = list(second)
    for one in first:
        match = next((place for place, other in enumerate(left) if _same(one, other)), None)
        if match is None:
            return False
        del left[match]
    return True


def _union(text: str) -> list[str]:
    return text.split("\\cup") if "\\cup" in text else []


_MATRIX = re.compile(r"\\begin\{[pbvBV]?matrix\}(.*)\\end\{[pbvBV]?matrix\}", re.DOTALL)


def _matrix(text: str) -> list[str]:
    """Every entry of a matrix, with the number of rows and columns before them."""
    found = _MATRIX.fullmatch(text)
    if not found:
        return []
    rows = [row.split("&") for row in re.split(r"\\\\", found[1]) if row.strip()]
    return [str(len(rows)), *(str(len(row)) for row in rows), *(cell.strip() for row in rows for cell in row)]


def _enclosed(text: str) -> list[str]:
    """The parts of a tuple or interval, its brackets among them: they say which ends belong to it."""
    if text[:1] not in ("(", "[") or text[-1:] not in (")", "]") or len(_split(text)) > 1:
        return []
    parts = _split(text[1:-1])
    return [f"left {text[0]}", *parts, f"right {text[-1]}"] if len(parts) > 1 else []


def _list(text: str) -> list[str]:
    """The members of a set or list. Order says nothing, and `1 \\pm x` is two members."""
    inner = re.fullmatch(r"\\?\{(.*?)\\?\}", text, re.DOTALL) if not text.startswith("{}") else None
    parts = _split(inner[1] if inner else text)
    members = [part.replace("\\pm", sign) for part in parts for sign in ("+-" if "\\pm" in part else "+")]
    return members if len(members) > 1 else []


def _split(text: str) -> list[str]:
    """At the commas that stand in no bracket."""
    parts, depth = [""], 0
    for sign in text:
        depth += (sign in "([{") - (sign in ")]}")
        if sign == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += sign
    return [unnamed(part).strip() for part in parts]


_ATOM = r"(\w|\{[^{}]*\})"
_FORMS: tuple[tuple[re.Pattern[str], str | Callable[[re.Match[str]], str]], ...] = (
    (re.compile(r"\\text\{([^{}]*)\}"), r"\1"),
    (re.compile(r"\\sqrt\s*(\d+|\w)"), r"\\sqrt{\1}"),
    (re.compile(rf"\\frac\s*{_ATOM}\s*{_ATOM}"), lambda found: f"{_group(found[1])}/{_group(found[2])}"),
    (re.compile(r"\\(?:le|leq|leqslant)(?![A-Za-z])"), "<="),
    (re.compile(r"\\(?:ge|geq|geqslant)(?![A-Za-z])"), ">="),
    (re.compile(r"([_^])\{(\w+)\}"), r"\1\2"),
    (re.compile(r"[\s*]+"), ""),
)


def _group(braced: str) -> str:
    inner = braced.strip("{}").strip()
    return inner if inner.isalnum() else f"({inner})"


def canonical(text: str) -> str:
    """A formula as one string: no spaces, \\frac as a slash, sums in one order, the sides of an equation too."""
    for pattern, new in _FORMS:
        text = pattern.sub(new, text)
    if text.isalpha():
        return text.casefold()  # a word; in formulas r and R are two
    return "=".join(sorted(_sorted_sum(side) for side in text.split("=")))


def _sorted_sum(text: str) -> str:
    terms, depth = [""], 0
    for place, sign in enumerate(text):
        depth += (sign in "([{") - (sign in ")]}")
        if sign in "+-" and depth == 0 and place and text[place - 1] not in "+-*/^_(<>":
            terms.append("")
        terms[-1] += sign
    return "".join(sorted(term if term[:1] in ("+", "-") else f"+{term}" for term in terms))


# --- choices and words


def choice(answer: str) -> str | None:
    """The letter of a multiple-choice answer: "C", "(C)", "\\text{(C)}", "(C) 42"."""
    answer = re.sub(r"\\text[a-z]*\{([^{}]*)\}", r"\1", answer[:_FAR])
    found = re.match(r"\(([A-J])\)(?!\w)|([A-J])(?:[.):](?:\s|$)|$)", plain(answer))
    return (found[1] or found[2]) if found else None


def same_choice(text: str, reference: str) -> bool:
    """Whether an output chooses this letter; unmarked, the last letter in brackets or alone counts."""
    shown, right = visible(text), choice(reference)
    for place in (marked(shown), stated(shown), shown):
        if place is not None and (found := choice(place)) is not None:
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
        place is not None and _words(place).rstrip(".") == right for place in (shown, marked(shown), stated(shown))
    )


def contains(text: str, reference: str) -> bool:
    """Whether an output has the reference in it as whole words, thoughts aside; case and spacing aside."""
    right = re.escape(_words(reference))
    return bool(right) and re.search(rf"(?<!\w){right}(?!\w)", _words(visible(text))) is not None
