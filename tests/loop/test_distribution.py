"""The whole path (loop, drafter, Executor, collate, rule) generates text distributed as the target's, over many rounds.

Rules by themselves are tested in tests/verify with 100,000 draws; here a mistake of the loop would show, such as noise
that is used twice.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from itertools import product

import pytest
import torch

from semspec import verify
from semspec.draft import EarlyExit, ModelDrafter, tree
from semspec.draft.tree import CHAIN, TreeOptions
from semspec.loop.decoder import Decoder, Job
from semspec.loop.draft_length import DraftLengthPolicy, Round, Situation
from semspec.loop.executor import Executor
from semspec.loop.stats import Stats
from semspec.types import DecodeOutput, Draft, Sampling
from tests.chi import chi_square
from tests.fakes import FakeRunner, Logits, chain

VOCAB, LENGTH, DRAWS = 3, 4, 6000


def remembered(language: Logits) -> Logits:
    cached = cache(lambda context: language(list(context)))
    return lambda context: cached(tuple(context[-4:]))


TARGET = remembered(chain(VOCAB, seed=1, memory=2, sharpness=1.2))
DRAFT = remembered(chain(VOCAB, seed=9, memory=2, sharpness=1.2))


def likelihood(tokens: tuple[int, ...]) -> float:
    context, p = [1], 1.0
    for token in tokens:
        p *= torch.tensor(TARGET(context)).softmax(-1)[token].item()
        context.append(token)
    return p


class Restless:
    """A policy that reacts to every acceptance and has target-only rounds now and then."""

    def __init__(self) -> None:
        self.n = 2

    threshold = 0.0

    def length(self, at: Situation) -> int:
        return self.n

    def observe(self, made: Round) -> None:
        self.n = (made.requested + 2 * made.tokens) % 4

    def target_only_tokens(self, undrafted_rounds: int) -> int:
        return 2

    def close(self) -> None:
        pass


def p_value(
    kind: type[Decoder],
    verifier: str,
    policy: Callable[[], int | DraftLengthPolicy] = lambda: 3,
    min_p: float = 0.0,
    draws: int = DRAWS,
    tree: TreeOptions = CHAIN,
) -> float:
    """How well the first tokens of many sequences fit the target's own distribution of them."""
    executor, rule = Executor(), verify.make(verifier)
    target, draft = FakeRunner(TARGET, VOCAB, slots=500), FakeRunner(DRAFT, VOCAB, slots=500)
    tasks = []
    for seed in range(draws):
        stats, job = Stats(), Job([1], rule, policy(), LENGTH, Sampling(1.0, seed=seed))
        tasks.append(
            executor.submit(kind(job, target, ModelDrafter(draft, EarlyExit(min_p), tree), stats).decode(), stats)
        )
    executor.run()
    assert not any(task.error for task in tasks)
    counts = torch.zeros(VOCAB**LENGTH)
    for task in tasks:
        tokens = [t for event in task.events for t in event.tokens]
        counts[sum(w * VOCAB ** (LENGTH - 1 - i) for i, w in enumerate(tokens))] += 1
    expected = torch.tensor([likelihood(tokens) for tokens in product(range(VOCAB), repeat=LENGTH)])
    return chi_square(counts, expected)


class Stuck(Decoder):
    """A loop that does not count its rounds, so that noise is used twice."""

    @property
    def round(self) -> int:  # type: ignore[override]
        return 0

    @round.setter
    def round(self, value: int) -> None:
        pass


@pytest.mark.parametrize("verifier", ["sampling", "block", "exact"])
def test_the_loop_has_the_targets_distribution(verifier: str):
    assert p_value(Decoder, verifier) > 1e-4


@pytest.mark.parametrize("verifier", ["sampling", "traversal"])
def test_drafts_that_branch_change_nothing(verifier: str):
    """Siblings as the drafter draws them, over several rounds."""
    assert p_value(Decoder, verifier, Restless, tree=TreeOptions(size=6, top=2), draws=2500) > 1e-4


def test_branches_chosen_by_what_was_drawn_would_be_caught(monkeypatch: pytest.MonkeyPatch):
    """Why drawn trees have a fixed shape."""

    def likely(draft: Draft) -> Draft:
        assert draft.logits is not None
        probs = draft.logits.softmax(-1).gather(-1, torch.tensor(draft.tokens)[:, None])[:, 0]
        parents = draft.parents or tuple(range(-1, len(draft.tokens) - 1))
        return replace(draft, parents=parents).only(i for i, p in enumerate(probs.tolist()) if p > 0.3)

    monkeypatch.setattr(tree, "in_order", likely)
    assert p_value(Decoder, "sampling", tree=TreeOptions(size=6, top=2), draws=1500) < 1e-6


def test_lengths_that_move_and_drafts_that_end_early_change_nothing():
    assert p_value(Decoder, "block", Restless, min_p=0.5) > 1e-4


def test_drafts_that_end_because_of_what_was_drawn_would_be_caught(monkeypatch: pytest.MonkeyPatch):
    """Why early exit depends on distributions: leaving out tokens that were unlikely draws makes them rarer."""

    def unlikely(self: ModelDrafter, out: DecodeOutput) -> int:
        assert out.logits is not None
        probs = out.logits.softmax(-1).gather(-1, torch.tensor(out.tokens)[:, None])[:, 0]
        return int((probs > 0.4).long().cumprod(0).sum())

    monkeypatch.setattr(verify.Rule, "min_draft_tokens", lambda rule: 0)
    monkeypatch.setattr(ModelDrafter, "_num_confident", unlikely)
    assert p_value(Decoder, "sampling", min_p=0.5, draws=4000) < 1e-6


def test_noise_that_is_used_twice_is_caught():
    assert p_value(Stuck, "block") < 1e-6
