"""The whole path (loop, drafter, Executor, collate, rule) writes text distributed as the target's, over many rounds.

Rules by themselves are tested in tests/verify with 100,000 draws; here a slip of the loop would show, such as noise
that is used twice.
"""

from __future__ import annotations

from functools import cache
from itertools import product

import pytest
import torch

from semspec import verify
from semspec.decode import Decoder, Job
from semspec.draft import ModelDrafter
from semspec.execute import Executor
from semspec.stats import Stats
from semspec.types import Sampling
from tests.chi import chi_square
from tests.fakes import FakeRunner, Logits, chain

VOCAB, LENGTH, DRAWS = 3, 4, 6000


def remembered(language: Logits) -> Logits:
    kept = cache(lambda context: language(list(context)))
    return lambda context: kept(tuple(context[-4:]))


TARGET = remembered(chain(VOCAB, seed=1, memory=2, sharpness=1.2))
DRAFT = remembered(chain(VOCAB, seed=9, memory=2, sharpness=1.2))


def likelihood(words: tuple[int, ...]) -> float:
    context, p = [1], 1.0
    for word in words:
        p *= torch.tensor(TARGET(context)).softmax(-1)[word].item()
        context.append(word)
    return p


def p_value(kind: type[Decoder], verifier: str) -> float:
    """How well the first tokens of many sequences fit the target's own distribution of them."""
    executor, rule = Executor(), verify.make(verifier)
    target, draft = FakeRunner(TARGET, VOCAB, slots=500), FakeRunner(DRAFT, VOCAB, slots=500)
    tasks = []
    for seed in range(DRAWS):
        stats, job = Stats(), Job([1], rule, 3, LENGTH, Sampling(1.0, seed=seed))
        tasks.append(executor.submit(kind(job, target, ModelDrafter(draft), stats).decode(), stats))
    executor.run()
    counts = torch.zeros(VOCAB**LENGTH)
    for task in tasks:
        words = [t for event in task.events for t in event.tokens]
        counts[sum(w * VOCAB ** (LENGTH - 1 - i) for i, w in enumerate(words))] += 1
    expected = torch.tensor([likelihood(words) for words in product(range(VOCAB), repeat=LENGTH)])
    return chi_square(counts, expected)


class Stuck(Decoder):
    """A loop that forgets to count its rounds, so that noise comes back."""

    @property
    def round(self) -> int:  # type: ignore[override]
        return 0

    @round.setter
    def round(self, value: int) -> None:
        pass


@pytest.mark.parametrize("verifier", ["sampling", "block", "exact"])
def test_the_loop_writes_what_the_target_would(verifier: str):
    assert p_value(Decoder, verifier) > 1e-4


def test_noise_that_comes_back_is_caught():
    assert p_value(Stuck, "block") < 1e-6
