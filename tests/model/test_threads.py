"""One thread or several, by what passes take now; and whether a machine is too busy to time anything."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch

from semspec.model import threads
from semspec.types import Score, ScoreOutput
from tests.fakes import FakeRunner


@pytest.fixture(autouse=True)
def as_before():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(("one", "several", "chosen"), [(1.0, 10.0, 1), (1.0, 0.6, 2), (1.0, 1.05, 2), (0.01, 0.1, 1)])
def test_the_faster_is_taken_and_a_tie_changes_nothing(one: float, several: float, chosen: int):
    now, used = 0.0, []

    def work() -> None:
        nonlocal now
        used.append(torch.get_num_threads())
        now += one if used[-1] == 1 else several
        if len(used) == 2:
            now += 0.1 if one < 0.1 else 0.0  # a hiccup, which the median of several does not see

    torch.set_num_threads(2)
    assert threads.faster(work, 2, lambda: now) == chosen
    assert used.count(1) <= 1 + threads.MAX_REPEATS and (one < 0.1 or len(used) == 3), "a slow model is timed once"


def test_a_runner_is_timed_unless_the_user_has_chosen(monkeypatch: pytest.MonkeyPatch):
    runner = FakeRunner(lambda held: [0.0, 1.0], 2, capacity=16)
    monkeypatch.setattr(threads, "faster", lambda work, many: (work(), 1)[1])
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    torch.set_num_threads(2)
    threads.choose_threads(runner)
    assert torch.get_num_threads() == 2 and not runner.diary
    for name in threads.VARIABLES:
        monkeypatch.delenv(name, raising=False)
    threads.choose_threads(runner)
    assert (
        torch.get_num_threads() == 1 and not runner.held and [list(p.rows.values()) for p in runner.diary] == [[1], [5]]
    )
    threads.choose_threads(runner)
    assert len(runner.diary) == 2, "with one thread there is nothing to choose"


@dataclass
class PerRow(FakeRunner):
    """A pass takes a second, and each further row so long."""

    row: float = 0.0

    def score(self, requests: Sequence[Score]) -> list[ScoreOutput]:
        self.clock.now += 1 + self.row * (sum(len(r.tokens) for r in requests) - 1)
        assert all(r.keep == len(r.tokens) for r in requests), "as a draft is checked"
        return super().score(requests)


@pytest.mark.parametrize(("row", "cost"), [(0.0, 0.0), (0.25, 0.25), (1.0, 1.0), (3.0, 1.0)])
def test_what_a_further_token_takes_is_measured_in_passes(row: float, cost: float):
    runner = PerRow(lambda held: [0.0, 1.0], 2, capacity=16, seconds=0.0, row=row)
    assert threads.row_cost(runner, runner.clock) == pytest.approx(cost)
    assert not runner.held and len(runner.diary) == 2, "a slow model is timed once"
    assert threads.row_cost(PerRow(lambda held: [0.0, 1.0], 2, capacity=4)) is None, "too short for a draft"


def test_a_busy_machine_is_told(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(threads, "share_of_core", lambda: 0.31)
    assert "one thread gets 31% of a core" in threads.busy()
    monkeypatch.setattr(threads, "share_of_core", lambda: 0.95)
    assert threads.busy() == ""
    monkeypatch.undo()
    assert 0.0 < threads.share_of_core(0.01) <= 1.0
