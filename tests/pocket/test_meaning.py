"""`meaning` inverts every wording, and no corrupted number passes `valid`."""

from __future__ import annotations

import re
from random import Random
from typing import ClassVar

from hypothesis import given, settings
from hypothesis import strategies as st

from semspec.pocket import Habits, Problem, answer_of, meaning, problem, score, valid
from semspec.pocket.meaning import expected
from semspec.pocket.wording import CHOICES, DRAFT_HABITS, TARGET_HABITS, example, ready, write_step
from semspec.pocket.world import TEMPLATES

EVEN = Habits({name: (1 / len(options),) * len(options) for name, options in CHOICES.items()})
SEEDS = st.integers(0, 2**40)
TASKS = st.builds(lambda seed, template: problem(seed, template=template), SEEDS, st.sampled_from(TEMPLATES))


def word(task: Problem, index: int, rng: Random, first: bool = False) -> str:
    return write_step(task.quantities[index], task.theme.key, task.item, first, EVEN, rng)


def in_some_order(task: Problem, rng: Random) -> list[int]:
    done: list[int] = []
    while options := ready(task, set(done)):
        done.append(rng.choice(options))
    return done


class Fixed(Habits):
    """Habits that take the drawn option of every choice, so that hypothesis can reach every wording."""

    drawn: ClassVar[dict[str, int]] = {}

    def choose(self, name: str, rng: Random) -> int:
        return self.drawn[name]


CHOICE_VECTORS = st.fixed_dictionaries({name: st.integers(0, len(options) - 1) for name, options in CHOICES.items()})


@settings(max_examples=400)
@given(TASKS, CHOICE_VECTORS, st.booleans())
def test_meaning_inverts_any_choice_vector(task: Problem, vector: dict[str, int], first: bool) -> None:
    habits = Fixed(EVEN.weights)
    Fixed.drawn = vector
    for index, quantity in enumerate(task.quantities):
        if quantity.op is None:
            continue
        step = write_step(quantity, task.theme.key, task.item, first, habits, Random(0))
        assert meaning(step) == expected(task, index), step
        assert meaning(f"<think>\n{step}\n\n") == meaning(step), "as the first step of a text has it"
        assert meaning(f"{step} <think>") is None and meaning(f"<think><think>{step}") is None


def test_meaning_inverts_every_option_at_least_once() -> None:
    """A walk over all pairs (choice, option), in every theme and form, so that no rare wording is left to luck."""
    rng = Random(1)
    seen: set[tuple[str, int]] = set()
    for seed in range(400):
        task = problem(seed)
        for index in in_some_order(task, rng):
            trace: list[tuple[str, int, int]] = []
            quantity = task.quantities[index]
            step = write_step(quantity, task.theme.key, task.item, seed % 2 == 0, EVEN, rng, trace)
            assert meaning(step) == expected(task, index), step
            seen |= {(name, option) for name, option, _ in trace}
    wanted = {(name, option) for name, options in CHOICES.items() for option in range(len(options)) if name != "answer"}
    assert seen == wanted


@settings(max_examples=200)
@given(TASKS, st.integers(0, 2**32))
def test_valid_accepts_any_legal_order_and_nothing_twice(task: Problem, seed: int) -> None:
    rng = Random(seed)
    order = in_some_order(task, rng)
    steps = [word(task, index, rng, not number) for number, index in enumerate(order)]
    for number, step in enumerate(steps):
        assert valid(step, task, steps[:number]), step
        assert not valid(word(task, order[number], rng), task, steps[: number + 1]), "already known"
    for number, index in enumerate(order):
        needs_a_step = any(task.quantities[parent].op is not None for parent in task.quantities[index].parents)
        assert valid(steps[number], task, []) != needs_a_step, "not yet computable"


@settings(max_examples=100)
@given(TASKS, st.integers(0, 2**32))
def test_valid_rejects_unneeded_and_foreign_steps(task: Problem, seed: int) -> None:
    rng = Random(seed)
    history = [word(task, index, rng) for index in in_some_order(task, rng)]
    for index, quantity in enumerate(task.quantities):
        if quantity.op is not None and not quantity.needed:
            assert not valid(word(task, index, rng), task, history)
    other = problem(seed)
    if other.theme is not task.theme:
        assert not valid(word(other, in_some_order(other, rng)[0], rng), task, [])


@settings(max_examples=200)
@given(TASKS, st.integers(0, 2**32))
def test_no_altered_number_is_ever_valid(task: Problem, seed: int) -> None:
    """Change, drop or double any digit of any step: the step must not pass."""
    rng = Random(seed)
    history: list[str] = []
    for index in in_some_order(task, rng):
        step = word(task, index, rng)
        for found in re.finditer(r"\d", step):
            at, digit = found.start(), found.group()
            changed = rng.choice([other for other in "0123456789" if other != digit])
            before, after = step[:at], step[at + 1 :]
            for corrupted in (before + changed + after, before + after, before + digit + digit + after):
                assert not valid(corrupted, task, history), corrupted
                assert meaning(corrupted) != expected(task, index) or corrupted == step, corrupted
        history.append(step)


@settings(max_examples=100)
@given(TASKS, st.integers(0, 2**32))
def test_a_number_in_other_hands_is_never_valid(task: Problem, seed: int) -> None:
    rng = Random(seed)
    history: list[str] = []
    for index in in_some_order(task, rng):
        step = word(task, index, rng)
        for found in re.finditer(r"([A-Z][a-z]+)'s (?=\d)", step):
            others = [one.person for one in task.quantities if one.person != found.group(1)]
            for owner in (f"{rng.choice(others)}'s ", ""):
                changed = step[: found.start()] + owner + step[found.end() :]
                assert not valid(changed, task, history), changed
        history.append(step)


@given(st.text())
def test_garbage_means_nothing(text: str) -> None:
    assert meaning(text) is None


@given(TASKS, st.integers(0, 2**32))
def test_broken_steps_mean_nothing(task: Problem, seed: int) -> None:
    rng = Random(seed)
    step = word(task, in_some_order(task, rng)[0], rng)
    words = step.split(" ")
    for length in range(len(words) - 1):
        cut = " ".join(words[:length])
        assert cut.endswith((".", "!")) or meaning(cut) is None, cut
    assert meaning(step + " " + step) is None
    assert meaning(step.replace(task.quantities[0].person, "Nobody").replace(" ", "  ")) is None


def test_wrong_arithmetic_is_understood_but_unsound() -> None:
    wrong = meaning("So 3 + 4 gives Mia's age: 8.")
    assert wrong is not None and not wrong.sound
    twice = meaning("So since 3 + 4 = 7, Mia's age is 8.")
    assert twice is not None and not twice.sound
    assert meaning("So because 4 plus 3, so 7, Mia's age is 7!") == meaning("Well, 3 + 4 for how old Mia is = 7.")
    assert meaning("So 03 + 4 gives Mia's age: 7.") is None


@given(SEEDS)
def test_answer(seed: int) -> None:
    for habits in (TARGET_HABITS, DRAFT_HABITS, EVEN):
        task, text = example(seed, habits)
        assert answer_of(text) == task.answer and score(text + "<|end|>", task)
        assert not score(text.rsplit("</think>", 1)[0], task)
        assert answer_of(text + " Or not.") is None


def test_every_option_has_weight_in_both_habits() -> None:
    for habits in (TARGET_HABITS, DRAFT_HABITS):
        assert all(min(weights) >= 0.005 and abs(sum(weights) - 1) < 1e-9 for weights in habits.weights.values())
