"""The shipped pair against its card."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import semspec
from recipes.pocket.card import card
from semspec import Options, pocket
from semspec.pocket.shipped import SHIPPED
from semspec.statistics import Share
from semspec.tasks.pocket import Pocket

MODELS = Path(SHIPPED["pocket"]).parent
MEASURES = json.loads((MODELS / "measures.json").read_text())
LOGS = {role: json.loads((MODELS / role / "training_log.json").read_text()) for role in ("target", "draft")}
PROBLEMS, SEED = 100, 7  # others than those the card was measured on


@pytest.fixture(scope="module")
def pair() -> semspec.Pair:
    return semspec.load("pocket", device="cpu", slots=25, context=1024)


@pytest.mark.parametrize("role", ["target", "draft"])
def test_the_cards_accuracy_is_found_again(pair: semspec.Pair, role: str) -> None:
    task = Pocket(split="test")
    problems = task.problems(PROBLEMS, SEED)
    writer = pair if role == "target" else semspec.Pair(pair.draft, pair.tokenizer, eos=pair.eos)
    options = [Options(verifier="none", temperature=0.6, seed=i, max_new_tokens=640) for i in range(PROBLEMS)]
    results = writer.generate([problem.prompt for problem in problems], options)
    right = sum(task.score(problem, r.text) for problem, r in zip(problems, results, strict=True))
    measured = MEASURES["figures"][f"{role} T 0.6"]["correct"]
    found = Share(right, PROBLEMS).as_dict()
    assert found["low"] <= measured["high"] and measured["low"] <= found["high"], (found, measured)
    steps = [ok for p, r in zip(problems, results, strict=True) for ok in pocket.judge_steps(r.text, task.story(p))]
    assert len(steps) > 3 * PROBLEMS and sum(steps) > 0.3 * len(steps), "its steps are understood"


def test_the_card_says_what_was_measured() -> None:
    """The README is made from the figures beside it, and all weights together stay small."""
    text = (MODELS / "README.md").read_text()
    title = text.splitlines()[0].removeprefix("# The pocket pair, ")
    note = text.split(f"seed {LOGS['draft']['seed']}\n")[-1].split("\nMeasured on")[0]
    assert card(MEASURES, LOGS, title, note) == text
    assert sum(path.stat().st_size for path in MODELS.rglob("*.safetensors")) <= 48e6


def test_only_its_thoughts_are_relaxed_where_that_is_asked_for(pair: semspec.Pair) -> None:
    begin, end = (pair.tokenizer.convert_tokens_to_ids(marker) for marker in ("<think>", "</think>"))
    prompts = [problem.prompt for problem in Pocket(split="test").problems(4, SEED)]

    def relaxed(span: str) -> tuple[int, int]:
        """Relaxed tokens inside of thinking, and outside."""
        common = {"verifier": "random:rate=0.9", "relax_span": span, "temperature": 1.2, "ignore_eos": True}
        options = [Options(max_new_tokens=280, seed=i, **common) for i in range(len(prompts))]
        inside = outside = 0
        for result in pair.generate(prompts, options):
            thinking, origins = False, [o for event in result.events for o in event.origins]
            for token, origin in zip(result.tokens, origins, strict=True):
                thinking = token == begin or (thinking and token != end)
                inside += thinking and origin == "relaxed"
                outside += not thinking and origin == "relaxed"
        return inside, outside

    assert min(relaxed("all")) > 5, "there is something to relax in both"
    inside, outside = relaxed("thinking")
    assert inside > 5 and outside == 0
