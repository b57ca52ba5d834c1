"""One thread or several, by what passes take now; and whether a machine is too busy to time anything."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch

from semspec.model import ModelRunner, Source, threads
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
    runner = FakeRunner(lambda held: [0.0, 1.0], 2, max_seq_len=16)
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


@pytest.mark.parametrize("fails", [False, True])
def test_weights_are_read_with_the_threads_that_are_faster_now(fails: bool, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(threads, "faster", lambda work, many: (work(), 1)[1])
    for name in threads.VARIABLES:
        monkeypatch.delenv(name, raising=False)
    torch.set_num_threads(2)
    with contextlib.suppress(OSError), threads.threads_for_reading(torch.device("cpu")):
        assert torch.get_num_threads() == 1
        if fails:
            raise OSError
    assert torch.get_num_threads() == 2, "passes are timed with all of them"
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    with threads.threads_for_reading(torch.device("cpu")):
        assert torch.get_num_threads() == 2, "the user has chosen"


def test_a_source_reads_so(target_folder, monkeypatch: pytest.MonkeyPatch):
    seen = []
    monkeypatch.setattr(threads, "faster", lambda work, many: 1)
    monkeypatch.setattr(ModelRunner, "load", lambda *_: seen.append(torch.get_num_threads()))
    for name in threads.VARIABLES:
        monkeypatch.delenv(name, raising=False)
    torch.set_num_threads(2)
    Source.find(target_folder).load("cpu", "auto", 1, 64)
    assert seen == [1] and torch.get_num_threads() == 2


@dataclass
class PerRow(FakeRunner):
    """A pass takes a second, and each further row so long."""

    row: float = 0.0

    def score(self, requests: Sequence[Score]) -> list[ScoreOutput]:
        self.clock.now += 1 + self.row * (sum(len(r.tokens) for r in requests) - 1)
        assert all(r.logits_to_keep == len(r.tokens) for r in requests), "as a draft is checked"
        return super().score(requests)


@pytest.mark.parametrize(("row", "cost"), [(0.0, 0.0), (0.25, 0.25), (1.0, 1.0), (3.0, 1.0)])
def test_what_a_further_token_takes_is_measured_in_passes(row: float, cost: float):
    runner = PerRow(lambda held: [0.0, 1.0], 2, max_seq_len=16, seconds=0.0, row=row)
    assert threads.row_cost(runner, runner.clock) == pytest.approx(cost)
    assert not runner.held and len(runner.diary) == 2, "a slow model is timed once"
    assert threads.row_cost(PerRow(lambda held: [0.0, 1.0], 2, max_seq_len=4)) is None, "too short for a draft"


@dataclass
class PerSequence(FakeRunner):
    """A token of several sequences takes a second, and so long for each but the first."""

    each: float = 0.0

    def score(self, requests: Sequence[Score]) -> list[ScoreOutput]:
        self.clock.now += self.each * (len(requests) - 1)
        return super().score(requests)


def test_what_a_draft_token_of_several_takes_is_measured_in_tokens_of_the_target():
    def cost(slots: int, seconds: float = 0.001, context: int = 512) -> dict[int, float]:
        draft = PerSequence(lambda held: [0.0, 1.0], 2, slots, context, seconds=0.2 * seconds, each=0.1 * seconds)
        target = PerSequence(lambda held: [0.0, 1.0], 2, slots, context, draft.clock, seconds, each=0.2 * seconds)
        found = threads.step_costs(draft, target, draft.clock)
        assert not draft.held and not target.held
        return found

    expected = {n: (0.2 + 0.1 * (n - 1)) / (1 + 0.2 * (n - 1)) for n in (1, 2, 4, 8)}
    assert cost(9) == pytest.approx(expected)
    assert cost(5) == pytest.approx({n: expected[n] for n in (1, 2, 4)})
    assert list(cost(9, seconds=10.0)) == [1], "a slow model is timed once"
    assert cost(1) == {} and cost(9, context=16) == {}


def test_a_busy_machine_is_told(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(threads, "share_of_core", lambda: 0.31)
    assert "one thread gets 31% of a core" in threads.busy()
    monkeypatch.setattr(threads, "share_of_core", lambda: 0.95)
    assert threads.busy() == ""
    monkeypatch.undo()
    assert 0.0 < threads.share_of_core(0.01) <= 1.0
