"""The world is deterministic, in bounds, and its held-out parts stay held out."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from recipes.pocket.tokenizer import PIECES
from semspec.pocket import HELD_OUT_TEMPLATES, TEMPLATES, TRAIN_TEMPLATES, judge_steps, problem, score
from semspec.pocket.wording import DRAFT_HABITS, TARGET_HABITS, example, ready
from semspec.pocket.world import compute

SEEDS = st.integers(0, 2**40)
SPLITS = st.sampled_from(["train", "test", "templates", "probe"])


@given(SEEDS, SPLITS)
def test_same_seed_same_problem(seed: int, split: str) -> None:
    assert problem(seed, split=split) == problem(seed, split=split)
    assert example(seed, TARGET_HABITS, split) == example(seed, TARGET_HABITS, split)


@given(SEEDS, SPLITS)
def test_values_and_sums_are_in_bounds(seed: int, split: str) -> None:
    task = problem(seed, split=split)
    for quantity in task.quantities:
        assert 0 <= quantity.value <= 999
        if quantity.op is not None:
            assert quantity.value == compute(quantity.op, quantity.operands)
            inputs = [task.quantities[parent].value for parent in quantity.parents]
            assert list(quantity.operands)[: len(inputs)] == inputs
    assert len({quantity.name for quantity in task.quantities}) == len(task.quantities)


@given(SEEDS, st.integers(3, 10), SPLITS)
def test_number_of_steps(seed: int, steps: int, split: str) -> None:
    task, text = example(seed, DRAFT_HABITS, split, steps)
    assert task.steps == steps
    verdicts = judge_steps(text, task)
    assert len(verdicts) == steps and all(verdicts)
    assert score(text, task)


def test_templates_are_many_and_held_out_ones_disjoint() -> None:
    assert len(TEMPLATES) >= 20
    assert not set(HELD_OUT_TEMPLATES) & set(TRAIN_TEMPLATES)
    assert set(HELD_OUT_TEMPLATES) | set(TRAIN_TEMPLATES) == set(TEMPLATES)
    assert {problem(seed).template for seed in range(2000)} == set(TRAIN_TEMPLATES)
    assert {problem(seed, split="templates").template for seed in range(300)} == set(HELD_OUT_TEMPLATES)


def test_splits_share_no_problem() -> None:
    train = {problem(seed).text for seed in range(2000)}
    test = {problem(seed, split="test").text for seed in range(2000)}
    assert len(train) == len(test) == 2000 and not train & test


def test_open_next_steps_are_common() -> None:
    """Where several steps are ready the next meaning is open; probes need that at three prefixes in ten."""
    several = total = 0
    for seed in range(200):
        task = problem(seed, split="test")
        done: set[int] = set()
        while options := ready(task, done):
            several += len(options) > 1
            total += 1
            done.add(options[0])
    assert several / total > 0.33


def test_long_variant() -> None:
    for seed in range(20):
        task, text = example(seed, TARGET_HABITS, long=True)
        assert 2000 <= len(PIECES.findall(task.text)) <= 4000
        assert all(judge_steps(text, task))


def test_bad_arguments_say_what_to_do() -> None:
    for bad in ({"split": "validation"}, {"steps": 2}, {"template": "no/such"}):
        with pytest.raises(ValueError):
            problem(1, **bad)
