"""How a step of a solution is worded: many small choices, each with its own preferences.

A wording is a walk through named choices (opener, frame, form, name, verb, ...). A *habit* gives each choice a weight
per option; two habits over the same options are two model families that mean the same and write differently. Texts
and options live in the tables here and in `themes`; `meaning` builds its parser from these same tables.
"""

from __future__ import annotations

from bisect import bisect
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import accumulate
from random import Random

from .themes import THEMES
from .world import Problem, Quantity, problem

CHOICES: dict[str, tuple[str, ...]] = {
    # The options of a choice start with different tokens, so that unpopular options do not add up to a favourite.
    # Every step has an opener, so a name never starts a paragraph: each name stays one token, with its space.
    "opener_first": ("Well, ", "First, ", "To start, ", "Okay, ", "At first, ", "Right, "),
    "opener_next": (
        "Well, ",
        "So ",
        "Next, ",
        "Now ",
        "Then ",
        "After that, ",
        "Also, ",
        "And ",
        "With that, ",
        "Okay, ",
    ),
    "frame": ("", "we see that ", "I find that ", "surely ", "it follows that ", "clearly "),
    # The computation first, as a clause of a sentence (since), as an equation (then) or as a phrase (phrase); after it
    # the name, and after the name its value: wherever a number follows a name, it is that person's number.
    "form": ("since", "then", "phrase"),
    "verb": (" is ", " equals ", " comes to ", " must be ", " works out to ", " amounts to "),
    "hedge": ("", "simply ", "exactly ", "just ", "therefore ", "thus "),
    "dash": (": ", " = ", " -> ", " - "),
    "reason": ("since ", "because ", "as ", "given that ", "knowing that "),
    "order": ("as told", "turned"),
    "equals": (" = ", " is ", ", so ", " makes ", " gives ", "; that is "),
    "add": (" + ", " plus ", " and ", " added to ", " together with "),
    "sub": (" - ", " minus ", " less ", " take away ", " without "),
    "mul": (" * ", " times ", " x ", " multiplied by ", " by "),
    "div": (" / ", " divided by ", " over ", " split by ", " shared by "),
    "phrase_add": ("adding {a} and {b}", "the sum of {a} and {b}", "putting {a} and {b} together"),
    "phrase_sub": ("taking {b} from {a}", "the difference of {a} and {b}", "reducing {a} by {b}"),
    "phrase_mul": ("multiplying {a} by {b}", "the product of {a} and {b}", "taking {a} times {b}"),
    "phrase_div": ("dividing {a} by {b}", "the quotient of {a} and {b}", "splitting {a} by {b}"),
    "gives": (" gives ", " makes ", " yields ", " is ", " leads to "),
    "assign": (" for ", ", hence ", " gives ", "; this settles ", " as "),
    "tail": ("", " in all", " altogether", " then", " here", " as needed"),
    "stop": (".", "!", ". Good.", "; fine.", ", done."),
    "answer": (
        "The answer is {v}.",
        "Answer: {v}.",
        "So the answer is {v}.",
        "It is {v}.",
        "Result: {v}.",
    ),
}
for _theme in THEMES:
    CHOICES[f"name_{_theme.key}"] = _theme.names

SYMMETRIC = ("add", "mul")

Weights = Mapping[str, tuple[float, ...]]


@dataclass(frozen=True)
class Habits:
    """A way of writing: for each choice the probability of each option, and which ready step is taken up first.

    `step_decay` weighs ready steps by their position in the story: 1 has no preference, below 1 prefers early ones."""

    weights: Weights
    step_decay: float = 1.0
    _sums: dict[str, list[float]] = field(default_factory=dict, repr=False, compare=False)

    def __post_init__(self) -> None:
        for name, options in CHOICES.items():
            if len(self.weights.get(name, ())) != len(options):
                raise ValueError(f"habits need {len(options)} weights for the choice {name!r}")
            self._sums[name] = list(accumulate(self.weights[name]))[:-1]

    def choose(self, name: str, rng: Random) -> int:
        """The option taken, at random by weight."""
        return bisect(self._sums[name], rng.random())


FORMS = {"target": (0.25, 0.5, 0.25), "draft": (0.25, 0.25, 0.5)}
"""How often each form is written."""
DIFFER = ("assign", "name_shop", "name_stay")
"""Choices whose favourites differ, besides the form. Six tokens or more lie between one and the next, but for names."""


def make_habits(decided: float, level: float, seed: int, differ: tuple[str, ...] = DIFFER) -> tuple[Habits, Habits]:
    """A pair of habits (target, draft) over the same wordings.

    In most choices both like the same option best, but one is decided (gives its favourite the weight `decided`) and
    the other nearly indifferent (its favourite is `level` times as likely as another): sampled text differs there,
    greedy text does not, so that stretches of agreement follow a difference. In the choices `differ`, and in the
    form, both are decided, for different options. Both take up ready steps in story order rather than not, so the
    favourite step is the same; the draft insists on it more. Every option keeps half a percent."""
    rng = Random(seed)
    pair: tuple[dict[str, tuple[float, ...]], dict[str, tuple[float, ...]]] = ({}, {})
    for name, options in CHOICES.items():
        count = len(options)
        best = int(rng.random() * count)
        other = (best + 1 + int(rng.random() * (count - 1))) % count if name in differ else best
        tops = [_peaked(count, best, decided, rng), _peaked(count, other, decided, rng)]
        if name not in differ:
            tops[int(rng.random() * 2)] = _peaked(count, best, level / (count - 1 + level), rng)
        for side, own in zip(pair, tops, strict=True):
            side[name] = tuple(0.005 + (1 - 0.005 * count) * weight for weight in own)
    pair[0]["form"], pair[1]["form"] = FORMS["target"], FORMS["draft"]
    return Habits(pair[0], step_decay=0.97), Habits(pair[1], step_decay=0.7)


def _peaked(count: int, best: int, top: float, rng: Random) -> list[float]:
    """Weights that sum to 1, `top` on the option `best` and the rest unevenly on the others, none above it."""
    rest = [0.75 + 0.5 * rng.random() for _ in range(count)]
    rest[best] = 0
    share = (1 - top) / sum(rest)
    return [top if index == best else share * weight for index, weight in enumerate(rest)]


DECIDED, LEVEL, HABIT_SEED = 0.85, 1.6, 49
TARGET_HABITS, DRAFT_HABITS = make_habits(DECIDED, LEVEL, HABIT_SEED)

Trace = list[tuple[str, int, int]]
"""(choice, option taken, where in the text it shows): what a wording decided."""
Script = tuple[str, ...]
"""A step still to be written: plain text, and choices as "?name"."""


def script(first: bool) -> Script:
    """A step of which nothing has been decided yet."""
    return ("?opener_first" if first else "?opener_next", "?form", "?tail", "?stop")


def decide(name: str, option: int, quantity: Quantity, theme_key: str, item: str) -> Script:
    """What this option of a choice expands to."""
    text = CHOICES[name][option]
    op = quantity.op
    assert op is not None
    # A number that somebody owns is named with its owner: "Mia's 12". What a step is about, whose number it takes and
    # which number that is are then three lookups at three positions, each easy to learn, not one that is not.
    a, b = (f"{owner}'s {n}" if owner else str(n) for owner, n in zip(quantity.owners, quantity.operands, strict=True))
    if name == "form":
        named, value = f"?name_{theme_key}", str(quantity.value)
        sum_: Script = ("?order",) if op in SYMMETRIC and a != b else (a, f"?{op}", b)
        return {
            "since": ("?reason", *sum_, "?equals", value, ", ", "?frame", named, "?verb", "?hedge", value),
            "then": (*sum_, "?assign", named, "?dash", value),
            "phrase": (f"?phrase_{op}", "?gives", named, "?dash", value),
        }[text]
    if name == "order":
        return (b, f"?{op}", a) if text == "turned" else (a, f"?{op}", b)
    if "{" in text:
        text = text.replace("{x}", quantity.person).replace("{item}", item)
        text = text.replace("{a}", a).replace("{b}", b)
    return (text,)


def write_step(
    quantity: Quantity,
    theme_key: str,
    item: str,
    first: bool,
    habits: Habits,
    rng: Random,
    trace: Trace | None = None,
) -> str:
    """One worded step that derives `quantity`, without the blank line that ends it."""
    text = ""
    rest = list(reversed(script(first)))
    while rest:
        part = rest.pop()
        if part[:1] == "?":
            option = habits.choose(part[1:], rng)
            if trace is not None:
                trace.append((part[1:], option, len(text)))
            rest.extend(reversed(decide(part[1:], option, quantity, theme_key, item)))
        else:
            text += part
    return text


def ready(task: Problem, done: set[int]) -> list[int]:
    """The needed quantities that can be computed now and have not been, in story order."""
    return [
        index
        for index, quantity in enumerate(task.quantities)
        if quantity.needed
        and quantity.op is not None
        and index not in done
        and all(parent in done or task.quantities[parent].op is None for parent in quantity.parents)
    ]


def write_steps(task: Problem, habits: Habits, rng: Random, trace: Trace | None = None) -> list[str]:
    """A whole solution as steps, in one of its legal orders. `trace` counts letters as if they were joined by blank
    lines."""
    done: set[int] = set()
    steps: list[str] = []
    decay, start = habits.step_decay, 0
    while options := ready(task, done):
        index = options[0]
        if len(options) > 1:
            sums = list(accumulate(decay**rank for rank in range(len(options))))
            index = options[min(bisect(sums, rng.random() * sums[-1]), len(options) - 1)]
        mine: Trace | None = None if trace is None else []
        steps.append(write_step(task.quantities[index], task.theme.key, task.item, not steps, habits, rng, mine))
        if trace is not None and mine is not None:
            trace += [(name, option, start + at) for name, option, at in mine]
        start += len(steps[-1]) + 2
        done.add(index)
    return steps


def write_solution(task: Problem, habits: Habits, rng: Random, trace: Trace | None = None) -> str:
    """The text a reasoning model should write: thoughts, a blank line between steps, then the answer."""
    option = habits.choose("answer", rng)
    answer = CHOICES["answer"][option].replace("{v}", str(task.answer))
    mine: Trace | None = None if trace is None else []
    thoughts = "<think>\n" + "\n\n".join(write_steps(task, habits, rng, mine)) + "\n\n</think>\n\n"
    if trace is not None and mine is not None:
        trace += [(name, option, len("<think>\n") + at) for name, option, at in mine]
        trace.append(("answer", option, len(thoughts)))
    return thoughts + answer


def example(
    seed: int,
    habits: Habits,
    split: str = "train",
    steps: int | None = None,
    long: bool = False,
    trace: Trace | None = None,
) -> tuple[Problem, str]:
    """A problem and one worded solution, both fixed by the seed."""
    task = problem(seed, steps, split, long=long)
    return task, write_solution(task, habits, Random(seed * 2_654_435_761 + 12_345), trace)
