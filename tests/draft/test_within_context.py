"""A draft model with a shorter context than the target's."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

import semspec
from tests.checkpoints import make_model, save

PROMPT = "the quick brown fox jumps over the lazy dog and the quick brown fox"
LENGTH = {"max_new_tokens": 120, "ignore_eos": True, "num_draft_tokens": 4, "seed": 3}


@pytest.fixture(scope="module")
def short(target_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> semspec.Pair:
    draft = save(make_model("llama3", max_position_embeddings=64), tmp_path_factory.mktemp("short"))
    return semspec.load(target_folder, draft, device="cpu", slots=2)


@pytest.mark.parametrize("options", [{"verifier": "exact"}, {"verifier": "sampling", "temperature": 0.1}, {}])
def test_beyond_it_drafts_are_looked_up_and_it_is_said_once(
    short: semspec.Pair, options: dict, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        result = short.generate(PROMPT, **LENGTH, **options)
    assert caplog.text.count("the draft model's context of 64 tokens is full") == 1
    at, late = result.prompt_tokens, 0
    for event in result.events:
        late += event.drafted if at > 64 else 0
        at += len(event.tokens)
    assert at > 100 and late > 0, "it goes on drafting"
    if "temperature" not in options:
        assert result.tokens == short.generate(PROMPT, **LENGTH | {"verifier": "none"}).tokens


def test_a_rule_that_needs_the_drafts_distribution_goes_on_without_drafts(short: semspec.Pair) -> None:
    result = short.generate(PROMPT, **LENGTH, verifier="ensemble", temperature=0.5)
    at = result.prompt_tokens
    for event in result.events:
        assert at <= 64 or not event.drafted
        at += len(event.tokens)


def test_a_prompt_that_is_too_long_for_the_draft_model_is_no_error(short: semspec.Pair) -> None:
    result = short.generate(PROMPT * 4, **LENGTH)
    assert result.prompt_tokens > 64 and result.tokens == short.generate(PROMPT * 4, **LENGTH, verifier="none").tokens
