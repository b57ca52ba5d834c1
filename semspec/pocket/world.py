"""Problems of the pocket world: a small web of quantities, told as a story, with one question.

Every problem is made from a *template* (a theme and a shape) and a seed, and nothing else, so the same call gives the
same problem everywhere. Eight templates are never used for training: they ask whether a model learnt the world or the
plots.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random

from .lexicon import PEOPLE, idle_fact
from .shapes import FEWEST_STEPS, GIVEN, MOST_STEPS, SHAPES, shape
from .themes import THEME_BY_KEY, THEMES, Theme

HIGHEST = 999
_COMFORT = 250  # values stay below this where a story allows, so that arithmetic stays modest

TEMPLATES: tuple[str, ...] = tuple(f"{theme.key}/{name}" for theme in THEMES for name in SHAPES)
HELD_OUT_TEMPLATES: tuple[str, ...] = tuple(
    f"{theme.key}/{tuple(SHAPES)[(3 * index + 1) % len(SHAPES)]}" for index, theme in enumerate(THEMES)
)
TRAIN_TEMPLATES: tuple[str, ...] = tuple(name for name in TEMPLATES if name not in HELD_OUT_TEMPLATES)

SPLITS = {"train": 0x51, "test": 0xA7, "templates": 0xE3, "probe": 0x2D}
"""What a seed means depends on the split, so a training seed never repeats a test problem.
train, probe: training templates; test: the same templates, other numbers; templates: the held-out ones."""


@dataclass(slots=True)
class Quantity:
    """A named number. `op` is None where the prompt states it; `operands` are the numbers of its equation, `owners` the
    people whose quantities those are ("" for a number of the fact itself)."""

    name: str
    person: str
    value: int
    op: str | None = None
    operands: tuple[int, ...] = ()
    owners: tuple[str, ...] = ()
    parents: tuple[int, ...] = ()  # indices into Problem.quantities
    fact: str = ""
    needed: bool = False


@dataclass(slots=True)
class Problem:
    """A story (`text`), its quantities in the order it tells them (they can be computed in it), and the one asked."""

    template: str
    theme: Theme
    item: str
    text: str
    quantities: list[Quantity]
    asked: int
    answer: int
    steps: int
    _by_name: dict[str, int] = field(default_factory=dict, repr=False)

    def index(self, name: str) -> int | None:
        """The index of the quantity with this canonical name, or None."""
        if not self._by_name:
            self._by_name.update({quantity.name: index for index, quantity in enumerate(self.quantities)})
        return self._by_name.get(name)


def _between(rng: Random, low: int, high: int) -> int:
    return low + int(rng.random() * (high - low + 1))


def _pick(rng: Random, options: tuple[str, ...]) -> str:
    return options[int(rng.random() * len(options))] if len(options) > 1 else options[0]


def problem(
    seed: int, steps: int | None = None, split: str = "train", template: str | None = None, long: bool = False
) -> Problem:
    """The problem with this seed. `steps` fixes the number of needed derivations; `long` buries it in idle facts."""
    if split not in SPLITS:
        raise ValueError(f"unknown split {split!r}; choose one of {', '.join(SPLITS)}")
    if steps is not None and not FEWEST_STEPS <= steps <= MOST_STEPS:
        raise ValueError(f"a problem has {FEWEST_STEPS} to {MOST_STEPS} steps, not {steps}")
    rng = Random((seed << 8) | SPLITS[split])
    if template is None:
        templates = HELD_OUT_TEMPLATES if split == "templates" else TRAIN_TEMPLATES
        template = _pick(rng, templates)
        if template.endswith(("/chain", "/diamond")):  # thrown again once: there the next step is seldom open
            template = _pick(rng, templates)
        while steps is not None and SHAPES[template.split("/")[1]][0] > steps:
            template = _pick(rng, templates)
    elif template not in TEMPLATES:
        raise ValueError(f"unknown template {template!r}; see semspec.pocket.world.TEMPLATES")
    theme_key, shape_name = template.split("/")
    if steps is None:  # the smaller of two throws: short problems are the common ones
        fewest = SHAPES[shape_name][0]
        steps = min(_between(rng, fewest, MOST_STEPS), _between(rng, fewest, MOST_STEPS))
    return _build(rng, template, THEME_BY_KEY[theme_key], shape(shape_name, steps, rng), steps, long)


def _build(rng: Random, template: str, theme: Theme, plan: list[tuple[int, ...]], steps: int, long: bool) -> Problem:
    item = _pick(rng, theme.items)
    people = iter(rng.sample(PEOPLE, 27))
    quantities: list[Quantity] = []
    index_of: list[int] = []  # step number -> index in quantities
    for parents in plan:
        indices: list[int] = []
        for parent in parents:
            if parent == GIVEN:
                quantities.append(_given(rng, theme, item, next(people)))
                indices.append(len(quantities) - 1)
            else:
                indices.append(index_of[parent])
        quantities.append(_derived(rng, theme, item, next(people), quantities, indices))
        index_of.append(len(quantities) - 1)
    asked = len(quantities) - 1
    for quantity in quantities:
        quantity.needed = True
    for _ in range(int(rng.random() * 3)):  # facts beside or beyond the question, which tempt but are not needed
        if rng.random() < 0.3:
            quantities.append(_given(rng, theme, item, next(people)))
        else:
            base = asked if rng.random() < 0.3 else int(rng.random() * len(quantities))
            quantities.append(_derived(rng, theme, item, next(people), quantities, [base]))
    quantities, asked = _told(rng, quantities, asked)
    facts = [quantity.fact for quantity in quantities]
    if rng.random() < 0.5:
        facts.insert(int(rng.random() * (len(facts) + 1)), idle_fact(rng, next(people)))
    question = _pick(rng, theme.ask).replace("{x}", quantities[asked].person).replace("{item}", item)
    text = " ".join(facts) + " " + question
    if long:
        text = _bury(rng, facts, question)
    return Problem(template, theme, item, text, quantities, asked, quantities[asked].value, steps)


def _named(theme: Theme, item: str, person: str) -> str:
    return theme.names[0].replace("{x}", person).replace("{item}", item)


def _given(rng: Random, theme: Theme, item: str, person: str) -> Quantity:
    value = _between(rng, 4, 60)
    fact = _pick(rng, theme.given).format(x=person, c=value, item=item)
    return Quantity(_named(theme, item, person), person, value, fact=fact)


FUNCTIONS = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul": lambda a, b: a * b,
    "div": lambda a, b: a // b if b and a % b == 0 else -1,
}


def compute(op: str, operands: tuple[int, ...]) -> int:
    """The value of an operation; -1 where a division has no whole result."""
    return FUNCTIONS[op](*operands)


def _derived(rng: Random, theme: Theme, item: str, person: str, known: list[Quantity], indices: list[int]) -> Quantity:
    """A new quantity computed from none, one or two known ones, by an operation that suits their values."""
    owners = ("", "")
    if not indices:
        source = theme.sources[int(rng.random() * len(theme.sources))]
        a, b = _between(rng, *source.a), _between(rng, *source.b)
        op, fact = source.op, _pick(rng, source.text).format(x=person, a=a, b=b, item=item)
    elif len(indices) == 1:
        parent = known[indices[0]]
        a, owners = parent.value, (parent.person, "")
        kind, b = _unary(rng, a)
        op = {"more": "add", "fewer": "sub", "times": "mul", "share": "div"}[kind]
        fact = _pick(rng, getattr(theme, kind)).format(x=person, p=parent.person, c=b, item=item)
    else:
        first, second = known[indices[0]], known[indices[1]]
        total, apart = first.value + second.value, abs(first.value - second.value)
        gap_fits = apart >= 2
        if (gap_fits and (total > _COMFORT or rng.random() < 0.3)) or total > HIGHEST:
            if first.value < second.value:
                first, second, indices = second, first, [indices[1], indices[0]]
            op, texts = "sub", theme.gap
        else:
            op, texts = "add", theme.both
        a, b, owners = first.value, second.value, (first.person, second.person)
        fact = _pick(rng, texts).format(x=person, p=first.person, q=second.person, item=item)
    value = compute(op, (a, b))
    return Quantity(_named(theme, item, person), person, value, op, (a, b), owners, tuple(indices), fact)


def _unary(rng: Random, value: int) -> tuple[str, int]:
    """How to go on from one value: which comparison, and by how much."""
    for _ in range(8):
        roll = rng.random()
        if roll < 0.3:
            change = _between(rng, 2, 30)
            if value + change <= max(_COMFORT, value):
                return "more", change
        elif roll < 0.6:
            if value > 4:
                return "fewer", _between(rng, 2, min(30, value - 2))
        elif roll < 0.8:
            factor = _between(rng, 2, 5)
            if 2 <= value * factor <= _COMFORT:
                return "times", factor
        else:
            parts = _between(rng, 2, 6)
            if value % parts == 0 and value // parts >= 2:
                return "share", parts
    return ("fewer", 2) if value > _COMFORT else ("more", 2)


def _told(rng: Random, quantities: list[Quantity], asked: int) -> tuple[list[Quantity], int]:
    """The quantities in the order the story tells them, and where the one asked for is then: any order in which
    nobody is mentioned before being introduced."""
    told: dict[int, int] = {}  # old index -> new index
    waiting = list(range(len(quantities)))
    while waiting:
        # Mostly the oldest waiting fact, sometimes the second or third: stories wander, but not much.
        start = int(rng.random() ** 2 * min(4, len(waiting)))
        for index in waiting[start:] + waiting[:start]:
            if all(parent in told for parent in quantities[index].parents):
                break
        told[index] = len(told)
        waiting.remove(index)
    for quantity in quantities:
        quantity.parents = tuple(told[parent] for parent in quantity.parents)
    return [quantities[index] for index in told], told[asked]


def _bury(rng: Random, facts: list[str], question: str) -> str:
    """The same story spread over 2,000 to 4,000 tokens of idle facts (an idle fact is about 7 tokens)."""
    count = _between(rng, 300, 530)
    slots = sorted(int(rng.random() * (count + 1)) for _ in facts)
    out: list[str] = []
    told = 0
    for index in range(count + 1):
        while told < len(facts) and slots[told] == index:
            out.append(facts[told])
            told += 1
        if index < count:
            out.append(idle_fact(rng, PEOPLE[int(rng.random() * len(PEOPLE))]))
    return " ".join(out) + " " + question
