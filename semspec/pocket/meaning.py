"""What a step means, whatever its wording; and whether it is a correct and useful next step.

The parser is built from the writer's own tables (`wording.CHOICES`, `themes.THEMES`), so a wording cannot be written
that is not understood, and what is not in the tables is garbage and means nothing (None).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache

from .lexicon import PEOPLE
from .themes import THEMES
from .wording import CHOICES, SYMMETRIC
from .world import Problem, compute

THINK, END_THINK = "<think>", "</think>"


@dataclass(frozen=True)
class Meaning:
    """What quantity is found, by which operation on which numbers, with what result.

    `quantity` is the canonical name; `owners` says whose numbers the operands are ("": no one's). Operands of add and
    mul are sorted, since their order says nothing. `sound` is False where the step contradicts itself: wrong
    arithmetic, or two different results."""

    quantity: str
    op: str
    operands: tuple[int, ...]
    owners: tuple[str, ...]
    value: int
    sound: bool = True


_NUMBER = r"(?:0|[1-9]\d*)"
_PEOPLE = frozenset(PEOPLE)


def _any(choice: str) -> str:
    """A pattern for any option of a choice, longest first so that no option is hidden by a prefix of it."""
    return "(?:" + "|".join(re.escape(text) for text in sorted(CHOICES[choice], key=len, reverse=True)) + ")"


def _filled(template: str, slots: dict[str, str]) -> str:
    """A table entry as a pattern: its text taken literally, each {slot} replaced by that slot's pattern."""
    pieces = re.split(r"(\{\w+\})", template)
    return "".join(slots[piece[1:-1]] if piece.startswith("{") else re.escape(piece) for piece in pieces)


_OP_OF = {text: op for op in ("add", "sub", "mul", "div") for text in CHOICES[op]}
assert len(_OP_OF) == sum(len(CHOICES[op]) for op in ("add", "sub", "mul", "div")), "an operator word has two meanings"

_NAME_SLOTS = {"x": "[A-Z][a-z]+", "item": "[a-z]+"}
_NAME_GROUPS = {"x": "(?P<x>[A-Z][a-z]+)", "item": "(?P<item>[a-z]+)"}
_NAME = "(?P<name>" + "|".join(_filled(name, _NAME_SLOTS) for theme in THEMES for name in theme.names) + ")"
_NAME_PATTERNS = tuple((theme, re.compile(_filled(name, _NAME_GROUPS))) for theme in THEMES for name in theme.names)

_OPERATOR = "(?P<op>" + "|".join(re.escape(text) for text in sorted(_OP_OF, key=len, reverse=True)) + ")"
_A, _B = (f"(?:(?P<owner_{slot}>[A-Z][a-z]+)'s )?(?P<{slot}>{_NUMBER})" for slot in "ab")
_SUM = f"{_A}{_OPERATOR}{_B}"
_START = f"(?:{_any('opener_first')}|{_any('opener_next')})"
_END = _any("tail") + _any("stop")
_VALUE = f"{_NAME}{_any('dash')}(?P<v>{_NUMBER})"
_BODIES: tuple[tuple[str | None, str], ...] = (
    (
        None,
        f"{_any('reason')}{_SUM}{_any('equals')}(?P<v>{_NUMBER}), "
        f"{_any('frame')}{_NAME}{_any('verb')}{_any('hedge')}(?P<v0>{_NUMBER})",
    ),
    (None, f"{_SUM}{_any('assign')}{_VALUE}"),
    *(
        (op, f"{_filled(text, {'a': _A, 'b': _B})}{_any('gives')}{_VALUE}")
        for op in ("add", "sub", "mul", "div")
        for text in CHOICES[f"phrase_{op}"]
    ),
)
_PATTERNS = tuple((op, re.compile(f"{_START}{body}{_END}")) for op, body in _BODIES)


@lru_cache(maxsize=65536)
def canonical_name(text: str) -> str | None:
    """The canonical name of a quantity from any of its paraphrases, or None."""
    for theme, pattern in _NAME_PATTERNS:
        found = pattern.fullmatch(text)
        if found is None:
            continue
        slots = found.groupdict()
        item = slots.get("item")
        if slots["x"] in _PEOPLE and (item is None or item in theme.items):
            return theme.names[0].replace("{x}", slots["x"]).replace("{item}", item or "")
    return None


def meaning(step_text: str) -> Meaning | None:
    """The canonical meaning of a step in any wording the world knows; None for anything else.

    The first step of a text comes with the mark that opens the thoughts, which means nothing."""
    text = step_text.strip().removeprefix(THINK).strip()
    if not text or len(text) > 400:
        return None
    for op, pattern in _PATTERNS:
        found = pattern.fullmatch(text)
        if found is not None:
            parsed = _read(found, op)
            if parsed is not None:
                return parsed
    return None


def _read(found: re.Match[str], op: str | None) -> Meaning | None:
    slots = found.groupdict()
    quantity = canonical_name(slots["name"])
    if quantity is None:
        return None
    op = op or _OP_OF[slots["op"]]
    operands = (int(slots["a"]), int(slots["b"]))
    owners = (slots["owner_a"] or "", slots["owner_b"] or "")
    if not _PEOPLE.issuperset(filter(None, owners)):
        return None
    stated = [int(slots[key]) for key in ("v0", "v") if slots.get(key) is not None]
    sound = all(value == compute(op, operands) for value in stated)
    return Meaning(quantity, op, *_in_order(op, operands, owners), stated[0], sound)


def _in_order(op: str, operands: tuple[int, ...], owners: tuple[str, ...]) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """Operands with their owners, sorted where their order says nothing."""
    if op not in SYMMETRIC:
        return operands, owners
    pairs = sorted(zip(operands, owners, strict=True))
    return tuple(number for number, _ in pairs), tuple(owner for _, owner in pairs)


def expected(task: Problem, index: int) -> Meaning:
    """The meaning that a correct step for this quantity has."""
    quantity = task.quantities[index]
    assert quantity.op is not None, "a stated quantity has no step"
    return Meaning(
        quantity.name, quantity.op, *_in_order(quantity.op, quantity.operands, quantity.owners), quantity.value
    )


def _derives(step: str | Meaning | None, task: Problem) -> int | None:
    """The index of the quantity that this step derives correctly (numbers and all), or None."""
    parsed = meaning(step) if isinstance(step, str) else step
    if parsed is None or not parsed.sound:
        return None
    index = task.index(parsed.quantity)
    if index is None or task.quantities[index].op is None:
        return None
    return index if parsed == expected(task, index) else None


def valid(step: str | Meaning | None, problem: Problem, history: Iterable[str | Meaning | None] = ()) -> bool:
    """Whether `step` is a correct, useful next step after `history`, whatever its wording and order.

    Useful: the question needs it, it is not known yet, and what it is computed from is known. Steps of the history
    that are themselves wrong make nothing known, so a later correct derivation of the same quantity is valid."""
    index = _derives(step, problem)
    if index is None or not problem.quantities[index].needed:
        return False
    known = {_derives(past, problem) for past in history}
    if index in known:
        return False
    return all(parent in known or problem.quantities[parent].op is None for parent in problem.quantities[index].parents)


def steps_of(text: str) -> list[str]:
    """The steps inside the thoughts of a solution; an unfinished last step counts as one."""
    thoughts = text.split(THINK, 1)[-1].split(END_THINK, 1)[0]
    return [step.strip() for step in thoughts.split("\n\n") if step.strip()]


def judge_steps(text: str | Sequence[str], problem: Problem) -> list[bool]:
    """`valid` for each step of a solution, given those before it."""
    steps = steps_of(text) if isinstance(text, str) else list(text)
    meanings = [meaning(step) for step in steps]
    return [valid(parsed, problem, meanings[:index]) for index, parsed in enumerate(meanings)]


_ANSWERS = re.compile("|".join(_filled(text, {"v": f"({_NUMBER})"}) for text in CHOICES["answer"]))


def answer_of(text: str) -> int | None:
    """The final answer after the thoughts, or None where there is none or it is not in the format."""
    if END_THINK not in text:
        return None
    last = text.rsplit(END_THINK, 1)[1].replace("<|end|>", "").strip()
    found = _ANSWERS.fullmatch(last)
    return next(int(group) for group in found.groups() if group is not None) if found else None


def score(text: str, problem: Problem) -> bool:
    """Whether the solution ends in the right answer."""
    return answer_of(text) == problem.answer
