"""The budget of a pass follows what the machine can do, on a GPU: measured here with a fake one."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import semspec
from semspec.draft import ModelDrafter, NoDrafter
from semspec.loop.decoder import Decoder, Job
from semspec.loop.executor import Executor
from semspec.loop.passes import NO_GROWTH
from semspec.loop.stats import Stats
from semspec.loop.work import Task
from semspec.model.prefix_cache import PrefixCache
from semspec.serve.warm_up import MAX_PASS_SECONDS, measure_budget, warm_up
from semspec.types import Score, ScoreOutput
from semspec.verify import make
from tests.fakes import Clock, FakeRunner, chain


@dataclass
class Timed(FakeRunner):
    """A pass takes so long for each token, and something once."""

    per_token: float = 0.0
    reach: float = math.inf  # tokens before it that cost a token as much again
    memory: int | None = None  # tokens of a pass that there is memory for
    device: torch.device = field(default_factory=lambda: torch.device("meta"))  # no CPU

    def score(self, requests: Sequence[Score]) -> list[ScoreOutput]:
        if self.memory and sum(len(r.tokens) for r in requests) > self.memory:
            raise torch.OutOfMemoryError("no memory for what a pass computes")
        for r in requests:
            n = len(r.tokens)
            self.clock.now += self.per_token * n * (1 + (len(self.held[r.slot]) + n / 2) / self.reach)
        return super().score(requests)


@pytest.mark.parametrize(
    ("per_token", "capacity", "memory", "budget"),
    [(1e-3, 9000, None, 512), (0.13e-3, 9000, None, 2048), (1e-6, 9000, None, 8192), (1e-6, 3000, None, 2048),
     (1e-6, 9000, 5000, 4096)],
)  # fmt: skip
def test_a_pass_is_as_large_as_it_may_take(per_token: float, capacity: int, memory: int | None, budget: int) -> None:
    inner = Timed(chain(8), 8, slots=2, max_seq_len=capacity, seconds=0.01, per_token=per_token, memory=memory)
    target, executor = PrefixCache(inner), Executor()
    pair: Any = SimpleNamespace(target=target, executor=executor)
    measure_budget(pair, inner.clock)
    assert executor.budget == budget
    assert target.free == 2 and not any(inner.held.values()), "it leaves nothing behind"


CONTEXT, READ = 33_000, 32_000


@pytest.mark.parametrize("rule", ["none", "exact"])
@pytest.mark.parametrize(
    ("per_token", "reach"),
    [(0.13e-3, 49_000.0), (0.13e-3, 4_000.0), (0.02e-3, 8_000.0), (1e-3, 9_000.0), (1e-5, math.inf)],
)
def test_a_long_prompt_keeps_nobody_waiting_for_longer_than_is_said(rule: str, per_token: float, reach: float) -> None:
    """Time between tokens of who writes while 32,000 tokens are read: its own round, and 0.3 s on each model. The first
    machine is about an H200 with 32B."""
    clock, language = Clock(), chain(8)
    runners = [
        Timed(language, 8, 4, CONTEXT, clock, seconds=0.02 * size, per_token=per_token * size, reach=reach)
        for size in (1.0, 0.1)
    ]
    target, draft, executor = PrefixCache(runners[0]), runners[1], Executor(clock=clock)
    pair: Any = SimpleNamespace(target=target, executor=executor)
    measure_budget(pair, clock)
    runners[0].diary.clear()

    def submit(prompt: list[int], tokens: int) -> Task:
        drafter = NoDrafter() if rule == "none" else ModelDrafter(draft)
        decoder = Decoder(Job(prompt, make(rule), 4, tokens), target, drafter, Stats())
        return executor.submit(decoder.decode(), decoder.stats)

    writers = [submit([i, 2], 9000) for i in (1, 2)]
    for _ in range(5):
        executor.tick()
    alone = clock.now
    executor.tick()
    alone = (clock.now - alone) / (executor.chunk if rule == "none" else 1)  # a round without anybody's prompt
    reader, waits = submit([i % 8 for i in range(READ)], 4), list[float]()
    while not reader.events:
        before, passes = clock.now, [task.stats.target_passes for task in writers]
        executor.tick()
        waits.append(clock.now - before)
        moved = [task.stats.target_passes > n for task, n in zip(writers, passes, strict=True)]
        assert all(moved) or len(waits) == 1, "a round in every tick, once a decode of several tokens has ended"
    models = 1 if rule == "none" else 1.1
    assert max(waits) <= alone + models * MAX_PASS_SECONDS + 0.01
    pieces = [p.rows[max(p.rows)] for p in runners[0].diary if max(p.rows.values()) > 64]
    assert max(pieces) <= executor.budget
    if reach < 5000:  # and would wait longer without what was measured
        whole = per_token * executor.budget * (1 + READ / reach)
        assert whole > 2 * MAX_PASS_SECONDS
    if math.isinf(reach):
        assert 8150 < max(pieces) <= executor.budget == 8192, "nothing is smaller than it has to be"


def test_what_a_text_costs_that_goes_on_is_measured() -> None:
    for reach in (3000.0, 50_000.0, math.inf):
        inner = Timed(chain(8), 8, 1, 40_000, seconds=0.0, per_token=1e-4, reach=reach)
        pair: Any = SimpleNamespace(target=inner, executor=Executor())
        measure_budget(pair, inner.clock)
        growth = pair.executor.growth
        assert growth.reach == pytest.approx(reach) or (math.isinf(reach) and growth.reach > 1e9)
        assert growth.most == pytest.approx(0.3 / 1e-4)
        at = 20_000
        n = int(growth.count(at, growth.most))
        assert 1e-4 * n * (1 + (at + n / 2) / reach) == pytest.approx(0.3, rel=1e-3)


def test_on_a_cpu_no_text_depends_on_a_clock() -> None:
    inner = Timed(chain(8), 8, max_seq_len=9000, per_token=1e-6, device=torch.device("cpu"))
    pair: Any = SimpleNamespace(target=inner, executor=Executor())
    measure_budget(pair, inner.clock)
    assert pair.executor.budget == 512 and pair.executor.growth == NO_GROWTH and not inner.diary


def test_automatic_lengths_learn_nothing_from_a_warm_up() -> None:
    """Its text is nonsense: they would not draft for the first people who ask."""
    pair = semspec.load("pocket", device="cpu", slots=1, context=512)
    assert warm_up(pair) > 0
    assert not list(pair._preparer.lengths)
    question = "Mia has 4 bags with 6 pens each. Tom has 5 more pens than Mia. How many pens does Tom have?"
    answer = pair.generate([{"role": "user", "content": question}], max_new_tokens=60)
    assert answer.stats.drafted > 0
