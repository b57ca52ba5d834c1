"""Answers as people and models write them, brought to one form; and the value of those that have one.

`plain` takes away what only concerns looks (spacing, \\left, dollar signs, units). `value` computes closed expressions,
rational ones exactly, so that 0.5, 1/2 and \\frac12 are one number and \\frac{1}{\\sqrt3} is \\frac{\\sqrt{3}}{3}.
"""

from __future__ import annotations

import cmath
import math
import re
from fractions import Fraction

Number = Fraction | complex
LONGEST = 300  # characters; what is longer is no closed expression but a text, or a model that repeats itself
_BIGGEST = 20_000  # bits of an exact power

_SIGNS = str.maketrans(
    {
        "\u2212": "-",
        "\u2013": "-",
        "\u00d7": "*",
        "\u00b7": "*",
        "\u00f7": "/",
        "\u00b0": " ",
        "\u00a0": " ",
        "\u202f": " ",
        "\u2009": " ",
        "\u03c0": "\\pi ",
        "\u221e": "\\infty ",
        "\u221a": "\\sqrt ",
        "\u222a": "\\cup ",
        "\u2208": "\\in ",
        "\u00b1": "\\pm ",
        "\u00b2": "^2",
        "\u00b3": "^3",
    }
)
_UNITS = r"(?:mm|cm|km|kg|mg|mph|ft|lbs?|oz|deg|hrs?|min|sec|cents?|dollars?|degrees?|units?)"
_LOOKS: tuple[tuple[re.Pattern[str], str], ...] = tuple(
    (re.compile(pattern), new)
    for pattern, new in (
        (r"(?<!\\)\\[()\[\]]", " "),  # maths signs; "\\\\[" after a row of a matrix is none
        (r"\\[dtc]frac(?![A-Za-z])", r"\\frac"),
        (r"\\(?:mbox|textbf|textit|textrm|textsf|mathrm|mathbf|mathit|operatorname|hbox)\s*\{", r"\\text{"),
        (r"\\(?:left|right|[bB]igg?[lrm]?|displaystyle)(?![A-Za-z])", ""),
        (r",\\!\s*|\{,\}", ""),  # thousands: 10,\!080 and 10{,}080
        (r"(?<!\\)\\[!,;:> ]|\\q?quad(?![A-Za-z])|~", " "),
        (r"\^\s*\{?\s*\\circ(?![A-Za-z])\s*\}?|\\degree(?![A-Za-z])|\\?[%$]", ""),
        (r"\\(?:cdot|times|ast)(?![A-Za-z])", "*"),
        (r"\\div(?![A-Za-z])", "/"),
        (r"(?<![\\A-Za-z])pi(?![A-Za-z])", r"\\pi"),
        (r"(?<![\\A-Za-z])sqrt\s*\(([^()]*)\)", r"\\sqrt{\1}"),
        (r"\s*(?:\\text\{\s*(?:and|or)\s*\}|(?<=\s)(?:and|or)(?=\s))\s*", ","),
    )
)
_ALL_WORDS = re.compile(r"\\text\{([^{}]*)\}")
_TEXT_UNIT = re.compile(r"(?<=\S)\s*\\text\{[^{}]*\}(?:\s*\^\s*\{?\d+\}?)?")
_WORD_UNIT = re.compile(rf"(?<=[\d)}}])(?:\s*{_UNITS}|\s+[A-Za-z]{{2,}}\.?)(?:\s+[A-Za-z]{{2,}}\.?)*(?:\^\{{?\d\}}?)?$")
_NAME = re.compile(r"^\s*[A-Za-z](?:\([A-Za-z]\))?\s*(?:=|\\in(?![A-Za-z]))\s*(?=\S)")


def plain(text: str) -> str:
    """The answer without its looks: `\\left( 3, \\dfrac{\\pi}{2} \\right)` is `( 3, \\frac{\\pi}{2} )`."""
    text = text.translate(_SIGNS).strip().rstrip(".,;:").replace("**", "")
    for pattern, new in _LOOKS:
        text = pattern.sub(new, text)
    text = text.strip().rstrip(".")
    whole = _ALL_WORDS.fullmatch(text)
    text = whole[1] if whole else _TEXT_UNIT.sub("", text)
    text = _WORD_UNIT.sub("", text)
    return unnamed(text).strip()


def unnamed(text: str) -> str:
    """Without the name that an answer is given: `x = 5` is `5`, `x \\in [-2,7]` is `[-2,7]`."""
    return text if text.count("=") > 1 else _NAME.sub("", text)


_THOUSANDS = re.compile(r"[-+]?\s*\d{1,3}(?:,\d{3})+(?:\.\d+)?")
_MIXED = (
    re.compile(r"(?<![\d.^_}/])(\d+)\s*\\frac\s*\{\s*(\d+)\s*\}\s*\{\s*(\d+)\s*\}"),
    re.compile(r"(?<![\d.^_}/])(\d+)\s*\\frac\s*(\d)\s*(\d)"),
    re.compile(r"(?<![\d.^_}/])(\d+)\s+(\d+)\s*/\s*(\d+)"),
)
_TOKEN = re.compile(r"\s*(?:(\d+(?:\.\d+)?(?:[eE][-+]?\d{1,3}(?!\w))?|\.\d+)|(\\[A-Za-z]+)|(\S))")
_CLOSING = {"(": ")", "{": "}", "[": "]"}


def value(text: str) -> Number | None:
    """The value of a closed expression (already `plain`): exact where it is rational, None where it has no value.

    Known are decimals, thousands, fractions, mixed numbers, powers, roots, pi and the imaginary unit. Percent signs
    and units were dropped before, so 50% is 50.
    """
    if not text or len(text) > LONGEST:
        return None
    if _THOUSANDS.fullmatch(text):
        text = text.replace(",", "")
    for mixed in _MIXED:
        text = mixed.sub(r"(\1+\2/\3)", text)
    try:
        reader = _Reader(text)
        result = reader.sum()
        return result if reader.at_end() else None
    except (ValueError, ArithmeticError, IndexError, RecursionError):
        return None


def equal(a: Number, b: Number) -> bool:
    """Rational numbers must agree exactly, others to nine digits, which no rounded answer reaches by chance."""
    if isinstance(a, Fraction) and isinstance(b, Fraction):
        return a == b
    try:
        one, other = complex(a), complex(b)
        return abs(one - other) <= 1e-9 * max(abs(one), abs(other))
    except OverflowError:
        return False


class _Reader:
    """Recursive descent: sum -> product -> power -> atom. Whatever it does not know raises ValueError."""

    def __init__(self, text: str) -> None:
        self.tokens = [found[0].strip() for found in _TOKEN.finditer(text)]
        self.place = 0

    def at_end(self) -> bool:
        return self.place == len(self.tokens)

    def peek(self) -> str:
        return "" if self.at_end() else self.tokens[self.place]

    def take(self, wanted: str = "") -> str:
        token = self.tokens[self.place]
        if wanted and token != wanted:
            raise ValueError(token)
        self.place += 1
        return token

    def sum(self) -> Number:
        total: Number = Fraction(0)
        sign = self.sign()
        while True:
            term = self.product()
            total = total + term if sign > 0 else total - term
            if self.peek() not in ("+", "-"):
                return total
            sign = self.sign()

    def sign(self) -> int:
        sign = 1
        while self.peek() in ("+", "-") and self.peek():
            sign = -sign if self.take() == "-" else sign
        return sign

    def product(self) -> Number:
        result = self.power()
        while self.peek() and self.peek() not in "+-)}]":
            if self.peek() == "/":
                self.take()
                result = result / (self.sign() * self.power())
            else:
                if self.peek() == "*":
                    self.take()
                    result = result * self.sign()
                elif self.peek()[0] in ".0123456789":
                    raise ValueError("two numbers side by side are no product")
                result = result * self.power()
        return result

    def power(self) -> Number:
        base = self.atom()
        if self.peek() != "^":
            return base
        self.take()
        sign = self.sign()
        return _power(base, sign * self.atom())

    def argument(self) -> Number:
        """What \\frac applies to: a group, or a single digit, so that \\frac43 is four thirds."""
        token = self.peek()
        if len(token) > 1 and token.isdigit():
            self.tokens[self.place] = token[1:]
            return Fraction(token[0])
        return self.atom()

    def atom(self) -> Number:
        token = self.take()
        if token[0].isdigit() or (token[0] == "." and len(token) > 1):
            return Fraction(token)
        if token in _CLOSING:
            inner = self.sum()
            self.take(_CLOSING[token])
            return inner
        if token == "\\frac":
            top = self.argument()
            return top / self.argument()
        if token == "\\sqrt":
            degree: Number = Fraction(2)
            if self.peek() == "[":
                degree = self.atom()
            return _root(self.atom(), degree)
        if token == "\\pi":
            return complex(math.pi)
        if token == "i":
            return 1j
        raise ValueError(token)


def _power(base: Number, exponent: Number) -> Number:
    if isinstance(base, Fraction) and isinstance(exponent, Fraction) and exponent.denominator == 1:
        bits = max(base.numerator.bit_length(), base.denominator.bit_length())
        if bits * abs(exponent.numerator) > _BIGGEST:
            raise OverflowError
        return base**exponent.numerator
    return complex(base) ** complex(exponent)


def _root(of: Number, degree: Number) -> Number:
    if degree == 2 and isinstance(of, Fraction) and of >= 0:
        top, bottom = math.isqrt(of.numerator), math.isqrt(of.denominator)
        if top * top == of.numerator and bottom * bottom == of.denominator:
            return Fraction(top, bottom)
    return cmath.sqrt(complex(of)) if degree == 2 else _power(of, 1 / degree)
