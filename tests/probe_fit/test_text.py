"""Collecting with models of different tokenizers: each reads steps in its own tokens, and sees what it would anyway."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import semspec
from recipes.pocket.rename import rename
from semspec import BadRequest
from semspec.pocket.shipped import SHIPPED
from semspec.probe_fit.collect import collect
from semspec.probe_fit.config import Config
from semspec.probe_fit.data import Folder
from semspec.probe_fit.sampler import Sampler
from semspec.text.steps import StepDelimiters

HOW = {"device": "cpu", "slots": 4, "context": 512}
CONFIG = Config(
    task="pocket", n=2, per_problem=1, samples=2, max_step_tokens=40, max_new_tokens=60, draft_layers=(2, -1)
)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Folder]:
    """The same problems with the pocket pair, and with its draft under other names."""
    place = tmp_path_factory.mktemp("text")
    drafts = [None, rename(SHIPPED["pocket-draft"], place / "draft")]
    return [collect(CONFIG, place / str(i), semspec.load("pocket", draft, **HOW)) for i, draft in enumerate(drafts)]


def test_steps_of_the_target_look_the_same_to_a_draft_with_other_tokens(folders: list[Folder]) -> None:
    same, other = (f.read_samples(0) for f in folders)
    states, others = (f.read_states(0) for f in folders)
    checked = 0
    for i, (one, two) in enumerate(zip(same, other, strict=True)):
        assert (one.prefix, one.model) == (two.prefix, two.model)
        if one.model == "target":
            assert one.tokens == two.tokens
        if one.tokens != two.tokens:
            continue
        checked += 1
        for name in states:
            torch.testing.assert_close(others[name][i], states[name][i], atol=2e-3, rtol=2e-3, msg=name)
    assert checked >= sum(s.model == "target" for s in same) > 0


def test_steps_of_the_draft_are_whole_steps_in_the_targets_tokens(folders: list[Folder]) -> None:
    pair = semspec.load("pocket", **HOW)
    written = [s for s in folders[1].read_samples(0) if s.model == "draft"]
    assert len(written) == len([s for s in folders[0].read_samples(0) if s.model == "draft"])
    for sample in written:
        assert max(sample.tokens) < len(pair.tokenizer) and "thinking>" not in sample.text
        assert sample.end != "blank line" or sample.text.endswith("\n\n")


def test_states_of_single_tokens_are_refused(tmp_path: Path) -> None:
    pair = semspec.load("pocket", rename(SHIPPED["pocket-draft"], tmp_path / "draft"), **HOW)
    with pytest.raises(BadRequest, match="cannot be kept of models with different tokenizers"):
        Sampler(pair, Config(token_states=True), StepDelimiters.of(pair.tokenizer, pair.eos))
