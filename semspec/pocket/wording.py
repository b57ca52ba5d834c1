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
    "opener_first": ("", "First, ", "To start, ", "Okay, ", "To begin with, ", "Right, "),
    "opener_next": (
        "",
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
    "frame": ("", "we see that ", "I find that ", "we know that ", "it follows that ", "clearly "),
    # a sentence (is), a sentence with its reason behind (since), a fragment (dash), the computation before (then),
    # or the computation as a phrase (phrase)
    "form": ("is", "since", "dash", "then", "phrase"),
    "verb": (" is ", " equals ", " comes to ", " must be ", " works out to ", " amounts to "),
    "hedge": ("", "simply ", "exactly ", "just ", "therefore ", "thus "),
    "dash": (": ", " = ", " -> ", " - "),
    "reason": (", since ", ", because ", ", as ", " from ", ": "),
    "order": ("as told", "turned"),
    "equals": (" = ", ", which is ", ", so ", ", that is ", ", making ", "; that gives "),
    "add": (" + ", " plus ", " and ", " added to ", " together with "),
    "sub": (" - ", " minus ", " less ", " take away ", " without "),
    "mul": (" * ", " times ", " x ", " multiplied by ", " by "),
    "div": (" / ", " divided by ", " over ", " split by ", " shared by "),
    "phrase_add": ("adding {a} and {b}", "the sum of {a} and {b}", "putting {a} and {b} together"),
    "phrase_sub": ("taking {b} from {a}", "the difference of {a} and {b}", "reducing {a} by {b}"),
    "phrase_mul": ("multiplying {a} by {b}", "the product of {a} and {b}", "taking {a} times {b}"),
    "phrase_div": ("dividing {a} by {b}", "the quotient of {a} and {b}", "splitting {a} by {b}"),
    "gives": (" gives ", " makes ", " yields ", " is ", " leads to "),
    "assign": (" for ", ", so that is ", ", and this is ", ", which settles ", " as "),
    "tail": ("", " in all", " altogether", " then", " here", " as needed"),
    "stop": (".", "!", ". Good.", ". Fine.", ", done."),
    "answer": (
        "The answer is {v}.",
        "Answer: {v}.",
        "So the answer is {v}.",
        "It is {v}.",
        "The result is {v}.",
    ),
}
for _theme in THEMES:
    CHOICES[f"name_{_theme.key}"] = _theme.names

SYMMETRIC = ("add", "mul")

Weights = Mapping[str, tuple[float, ...]]


@dataclass(frozen=True)
class Habits:
    """A way of writing: for each choice the probability of each option, and which ready step is taken up first.

    `step_decay` weighs ready steps by their place in the story: 1 has no preference, below 1 prefers early ones."""

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


def make_habits(divergence: float, decided: float, agree: float, seed: int = 9) -> tuple[Habits, Habits]:
    """A pair of habits (target, draft) over the same wordings.

    In a share `agree` of the choices both like the same option best, but one is decided (gives its favourite the
    weight `decided`) and the other nearly indifferent: sampled text differs there, greedy text does not, so that
    stretches of agreement follow a difference. In the other choices both are decided, for different options.
    `divergence` 1 leaves this as it is and 0 makes both equal to their mean. Every option keeps half a percent."""
    rng = Random(seed)
    names = list(CHOICES)
    alike = set(rng.sample(names, round(agree * len(names))))
    pair: tuple[dict[str, tuple[float, ...]], dict[str, tuple[float, ...]]] = ({}, {})
    for name, options in CHOICES.items():
        count = len(options)
        best = int(rng.random() * count)
        other = best if name in alike else (best + 1 + int(rng.random() * (count - 1))) % count
        tops = [_peaked(count, best, decided, rng), _peaked(count, other, decided, rng)]
        if name in alike:
            tops[int(rng.random() * 2)] = _peaked(count, best, 1.6 / (count + 0.6), rng)
        for side, own in zip(pair, tops, strict=True):
            mixed = [
                (1 - divergence) * (first + second) / 2 + divergence * mine
                for first, second, mine in zip(*tops, own, strict=True)
            ]
            side[name] = tuple(0.005 + (1 - 0.005 * count) * weight for weight in mixed)
    return Habits(pair[0], step_decay=0.8), Habits(pair[1], step_decay=1.15)


def _peaked(count: int, best: int, top: float, rng: Random) -> list[float]:
    """Weights that sum to 1, `top` on the option `best` and the rest unevenly on the others, none above it."""
    rest = [0.75 + 0.5 * rng.random() for _ in range(count)]
    rest[best] = 0
    share = (1 - top) / sum(rest)
    return [top if place == best else share * weight for place, weight in enumerate(rest)]


DIVERGENCE, DECIDED, AGREE = 0.9, 0.8, 0.65
TARGET_HABITS, DRAFT_HABITS = make_habits(DIVERGENCE, DECIDED, AGREE)

Trace = list[tuple[str, int, int]]
"""(choice, option taken, where in the text it shows): what a wording decided, for calibration."""


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
    parts: list[str] = []
    choose = habits.choose

    def take(name: str) -> str:
        option = choose(name, rng)
        if trace is not None:
            trace.append((name, option, sum(map(len, parts))))
        return CHOICES[name][option]

    op = quantity.op
    assert op is not None
    a, b = quantity.operands
    opener = take("opener_first" if first else "opener_next")
    parts.append(opener)
    form = take("form")

    def name() -> None:
        parts.append(take(f"name_{theme_key}").replace("{x}", quantity.person).replace("{item}", item))

    def equation() -> None:
        left, right = a, b
        if op in SYMMETRIC and a != b and take("order") == "turned":
            left, right = b, a
        parts.append(str(left))
        parts.append(take(op))
        parts.append(str(right))
        parts.append(take("equals"))
        parts.append(str(quantity.value))

    if form == "is":
        parts.append(take("frame"))
        name()
        parts.append(take("verb"))
        parts.append(take("hedge"))
        equation()
    elif form == "since":
        parts.append(take("frame"))
        name()
        parts.append(take("verb"))
        parts.append(take("hedge"))
        parts.append(str(quantity.value))
        parts.append(take("reason"))
        equation()
    elif form == "dash":
        name()
        parts.append(take("dash"))
        equation()
    elif form == "then":
        equation()
        parts.append(take("assign"))
        name()
    else:
        parts.append(take(f"phrase_{op}").replace("{a}", str(a)).replace("{b}", str(b)))
        parts.append(take("gives"))
        parts.append(str(quantity.value))
        parts.append(take("assign"))
        name()
    parts.append(take("tail"))
    parts.append(take("stop"))
    text = "".join(parts)
    return text if opener else text[0].upper() + text[1:]


def ready(task: Problem, done: set[int]) -> list[int]:
    """The needed quantities that can be computed now and have not been, in story order."""
    return [
        place
        for place, quantity in enumerate(task.quantities)
        if quantity.needed
        and quantity.op is not None
        and place not in done
        and all(parent in done or task.quantities[parent].op is None for parent in quantity.parents)
    ]


def write_steps(task: Problem, habits: Habits, rng: Random) -> list[str]:
    """A whole solution as steps, in one of its legal orders."""
    done: set[int] = set()
    steps: list[str] = []
    decay = habits.step_decay
    while options := ready(task, done):
        place = options[0]
        if len(options) > 1:
            sums = list(accumulate(decay**rank for rank in range(len(options))))
            place = options[min(bisect(sums, rng.random() * sums[-1]), len(options) - 1)]
        steps.append(write_step(task.quantities[place], task.theme.key, task.item, not steps, habits, rng))
        done.add(place)
    return steps


def write_solution(task: Problem, habits: Habits, rng: Random) -> str:
    """The text a reasoning model should write: thoughts, a blank line between steps, then the answer."""
    answer = CHOICES["answer"][habits.choose("answer", rng)].replace("{v}", str(task.answer))
    thoughts = "\n\n".join(write_steps(task, habits, rng))
    return f"<think>\n{thoughts}\n\n</think>\n\n{answer}"


def example(
    seed: int, habits: Habits, split: str = "train", steps: int | None = None, long: bool = False
) -> tuple[Problem, str]:
    """A problem and one worded solution, both fixed by the seed."""
    task = problem(seed, steps, split, long=long)
    return task, write_solution(task, habits, Random(seed * 2_654_435_761 + 12_345))
