"""The head that is shipped with the pocket pair: it loads by name, is often right, and changes no text."""

from __future__ import annotations

import pytest

import semspec
from semspec.pocket.shipped import HEADS
from semspec.tasks import make

LARGEST = 5 << 20  # bytes of its weights: it lies in the package


@pytest.fixture(scope="module")
def pair() -> semspec.Pair:
    return semspec.load("pocket", device="cpu", slots=3, context=768)


def test_it_drafts_out_of_the_box_and_the_text_is_the_targets(pair: semspec.Pair) -> None:
    prompts = [problem.prompt for problem in make("pocket").problems(3, 11)]
    options = {"max_new_tokens": 60, "num_draft_tokens": 4}
    alone = [result.text for result in pair.generate(prompts, verifier="none", max_new_tokens=60)]
    taus = {}
    for drafter in ("eagle:pocket", "eagle:pocket,tree=16"):
        results = pair.generate(prompts, verifier="exact", drafter=drafter, **options)
        assert [result.text for result in results] == alone
        taus[drafter] = sum(r.stats.tokens for r in results) / sum(r.stats.rounds for r in results)
    assert taus["eagle:pocket"] > 1.6, taus
    assert taus["eagle:pocket,tree=16"] > taus["eagle:pocket"], taus


def test_it_is_small_and_has_a_card() -> None:
    folder = HEADS["pocket"]
    assert (folder / "model.safetensors").stat().st_size < LARGEST
    card = (folder / "README.md").read_text()
    assert "# EAGLE-3 head for pocket" in card and "held-out" in card
