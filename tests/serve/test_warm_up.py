"""The budget of a pass follows what the machine can do, on a GPU: measured here with a fake one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import semspec
from semspec.loop.executor import Executor
from semspec.model.prefix_cache import PrefixCache
from semspec.serve.warm_up import measure_budget, warm_up
from semspec.types import Score, ScoreOutput
from tests.fakes import FakeRunner, chain


@dataclass
class Timed(FakeRunner):
    """A pass takes so long for each token, and something once."""

    per_token: float = 0.0
    memory: int | None = None  # tokens of a pass that there is memory for
    device: torch.device = field(default_factory=lambda: torch.device("meta"))  # no CPU

    def score(self, requests: Sequence[Score]) -> list[ScoreOutput]:
        if self.memory and sum(len(r.tokens) for r in requests) > self.memory:
            raise torch.OutOfMemoryError("no memory for what a pass computes")
        rows = super().score(requests)
        self.clock.now += self.per_token * sum(len(r.tokens) for r in requests)
        return rows


@pytest.mark.parametrize(
    ("per_token", "capacity", "memory", "budget"),
    [(1e-3, 9000, None, 512), (0.13e-3, 9000, None, 2048), (1e-6, 9000, None, 8192), (1e-6, 3000, None, 2048),
     (1e-6, 9000, 5000, 4096)],
)  # fmt: skip
def test_a_pass_is_as_large_as_it_may_take(per_token: float, capacity: int, memory: int | None, budget: int) -> None:
    inner = Timed(chain(8), 8, slots=2, capacity=capacity, seconds=0.01, per_token=per_token, memory=memory)
    target, executor = PrefixCache(inner), Executor()
    pair: Any = SimpleNamespace(target=target, executor=executor)
    measure_budget(pair, inner.clock)
    assert executor.budget == budget
    assert target.free == 2 and not any(inner.held.values()), "it leaves nothing behind"


def test_on_a_cpu_no_text_depends_on_a_clock() -> None:
    inner = Timed(chain(8), 8, capacity=9000, per_token=1e-6, device=torch.device("cpu"))
    pair: Any = SimpleNamespace(target=inner, executor=Executor())
    measure_budget(pair, inner.clock)
    assert pair.executor.budget == 512 and not inner.diary


def test_automatic_lengths_learn_nothing_from_a_warm_up() -> None:
    """Its text is nonsense: they would not draft for the first people who ask."""
    pair = semspec.load("pocket", device="cpu", slots=1, context=512)
    assert warm_up(pair) > 0
    assert not list(pair._preparer.lengths)
    question = "Mia has 4 bags with 6 pens each. Tom has 5 more pens than Mia. How many pens does Tom have?"
    answer = pair.generate([{"role": "user", "content": question}], max_new_tokens=60)
    assert answer.stats.drafted > 0
