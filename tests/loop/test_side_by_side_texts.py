"""Texts with a draft on a device of its own are those of one device, for every rule."""

from __future__ import annotations

from random import Random

import pytest

from semspec import verify
from semspec.draft import ModelDrafter
from semspec.loop.decoder import Decoder
from semspec.loop.executor import Executor
from semspec.loop.side_by_side import Alternation
from semspec.loop.stats import Stats
from semspec.loop.step_decoder import StepDecoder
from semspec.types import Runner, Sampling
from tests import test_every_rule as every_rule
from tests.fakes import FakeRunner
from tests.loop.test_mixed import mixed
from tests.loop.test_side_by_side import ELSEWHERE, HERE, VOCAB, Always, tokens
from tests.steps_by_hand import VOCAB as STEP_VOCAB
from tests.steps_by_hand import job, language
from tests.test_every_rule import RULES, Case, rule_of


class Sometimes(Alternation):
    def __init__(self, rng: Random) -> None:
        super().__init__()
        self._rng, self.chosen = rng, 0

    def _alternate(self, target: Runner, size: int) -> bool:
        self.chosen += (now := self._rng.random() < 0.7)
        return now


@pytest.mark.parametrize("seed", range(24))
def test_whatever_runs_side_by_side_an_answer_is_the_one_alone(seed: int) -> None:
    alternation = Sometimes(Random(seed))
    mixed(seed, ELSEWHERE, alternation)
    assert alternation.chosen


@pytest.mark.parametrize("heat", [0.0, 0.9])
def test_every_rule_for_tokens_writes_what_it_writes_on_one_device(heat: float) -> None:
    cases = [
        Case([1 + i % 9, *range(i % 4)], rule_of(name), 1 + i % 7, 40 + i % 9, Sampling(heat, seed=i))
        for i, name in enumerate(RULES)
    ]
    found = []
    for device in (HERE, ELSEWHERE):
        runners = [FakeRunner(every_rule.TARGET, VOCAB, 64, device=device), FakeRunner(every_rule.DRAFT, VOCAB, 64)]
        world = every_rule.World(*runners)
        world.executor.alternation = Always()
        for case in cases:
            world.submit(case)
        found.append(world.run())
        assert (world.executor._side_by_side._threads is None) == (device == HERE)
    assert found[0] == found[1]


@pytest.mark.parametrize("rule", ["random-step:rate=0.5,steps=3,ahead=0.7", "accept-all-steps:lead=1", "exact"])
def test_step_rules_write_what_they_write_on_one_device(rule: str) -> None:
    found = []
    for device in (HERE, ELSEWHERE):
        target = FakeRunner(language(1), STEP_VOCAB, device=device)
        draft, executor, tasks = FakeRunner(language(2), STEP_VOCAB), Executor(), []
        executor.alternation = Always()
        for i in range(6):
            made = job(verify.make(rule), 60 + i, sampling=Sampling(0.8, seed=i))
            kind = StepDecoder if made.rule.unit == "step" else Decoder
            decoder = kind(made, target, ModelDrafter(draft), Stats())
            tasks.append(executor.submit(decoder.decode(), decoder.stats))
        executor.run()
        assert not any(task.error for task in tasks) and not target.held and not draft.held
        found.append([tokens(task) for task in tasks])
    assert executor._side_by_side._threads is not None
    assert found[0] == found[1]
