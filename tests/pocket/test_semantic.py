"""`semantic` and `semantic+` through the whole loop, with the shipped pair and its probes."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

import semspec
from semspec import Options, Pair
from semspec.tasks.pocket import Pocket

RULES = ["semantic", "semantic:steps=3,ahead=0.2", "semantic+", "semantic:candidates=2", "semantic+:candidates=3"]
PROBLEMS = 2  # for each rule


@pytest.fixture(scope="module")
def pair() -> Pair:
    return semspec.load("pocket", device="cpu", dtype="float32", slots=PROBLEMS * len(RULES), context=512)


@pytest.fixture(scope="module")
def prompts() -> list[Any]:
    return [problem.prompt for problem in Pocket(split="test").problems(PROBLEMS, 1)]


@pytest.mark.parametrize("rule", ["semantic", "semantic+", "semantic+:candidates=3"])
def test_the_same_seed_gives_the_same_text(pair: Pair, prompts: list[Any], rule: str) -> None:
    options = Options(verifier=rule, temperature=1.0, max_new_tokens=40)
    one, again, other = (pair.generate(prompts[0], options, seed=seed).tokens for seed in (1, 1, 2))
    assert one == again
    assert one != other, "the seed is no matter"


def test_a_batch_in_different_phases_equals_singles(pair: Pair, prompts: list[Any]) -> None:
    """`semantic` begins with the target's step and `semantic+` with the draft's; lengths and temperatures differ as
    well, so some of the batch are judged or rewritten while others draft, and some have ended."""
    asked = [
        (prompt, Options(verifier=rule, temperature=1.0 - i, seed=r, max_new_tokens=56 - 16 * i + 4 * r))
        for i, prompt in enumerate(prompts)
        for r, rule in enumerate(RULES)
    ]
    together = pair.generate([prompt for prompt, _ in asked], [options for _, options in asked])
    outcomes: Counter[str] = Counter()
    for (prompt, options), result in zip(asked, together, strict=True):
        alone = pair.generate(prompt, options)
        assert (result.tokens, result.stats.step_outcomes) == (alone.tokens, alone.stats.step_outcomes), (
            options.verifier
        )
        assert [e.origins for e in result.events] == [e.origins for e in alone.events]
        outcomes += result.stats.step_outcomes
        assert result.stats.candidates == alone.stats.candidates
        assert bool(result.stats.candidates) == ("candidates" in str(options.verifier))
    assert outcomes["accepted"] and outcomes["rejected"] and outcomes["target"], outcomes
    assert pair.target.free == len(asked), "every slot was given back"
