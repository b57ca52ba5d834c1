"""The speedup of drafts at given costs, against a plain search; measuring, against fakes that take known time."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from semspec.loop import cost_profile as costs
from semspec.loop.draft_length import MAX_DRAFT_TOKENS
from semspec.types import Decode, DecodeOutput, Score, ScoreOutput
from tests.fakes import FakeRunner, chain


def test_the_best_draft_by_hand() -> None:
    """A pass costs 10 whatever it holds, a draft token 1: at 0.9 long drafts pay, and none where they cost as much."""
    flat = {1: 10.0, 17: 10.0}
    best = {b["acceptance"]: b for b in costs.best_drafts(flat, 1.0)}
    tokens = {n: sum(0.5**i for i in range(n + 1)) / (10 + n) for n in range(17)}
    expected = max(tokens, key=lambda n: tokens[n])
    assert best[0.5]["draft_tokens"] == expected and best[0.5]["speedup"] == pytest.approx(10 * tokens[expected])
    assert best[0.9]["draft_tokens"] > best[0.5]["draft_tokens"]
    assert best[0.9]["tau"] == pytest.approx(sum(0.9**i for i in range(int(best[0.9]["draft_tokens"]) + 1)))
    for none in costs.best_drafts(flat, 10.0):
        assert none == {"acceptance": none["acceptance"], "draft_tokens": 0, "tau": 1.0, "speedup": 1.0}


@given(
    st.lists(st.floats(0.1, 50.0), min_size=3, max_size=3), st.floats(0.01, 30.0),
)  # fmt: skip
def test_no_other_length_is_faster(passes: list[float], token: float) -> None:
    target = dict(zip((1, 5, 17), passes, strict=True))
    for best in costs.best_drafts(target, token):
        a = best["acceptance"]
        for n in range(MAX_DRAFT_TOKENS + 1):
            seconds = n * token + (costs.interpolate(target, n + 1) if n else target[1])
            speed = sum(a**i for i in range(n + 1)) / seconds * target[1]
            assert speed <= best["speedup"] * (1 + 1e-9)


def test_costs_between_two_sizes_are_interpolated() -> None:
    measured = {1: 2.0, 5: 4.0, 9: 4.0}
    assert [costs.interpolate(measured, n) for n in (1, 2, 3, 5, 7, 9, 30)] == [2.0, 2.5, 3.0, 4.0, 4.0, 4.0, 4.0]


class Timed(FakeRunner):
    """A pass takes 5 ms and 1 more a token, a decode 100 ms and 2 more a token, on a clock that nothing else moves."""

    now = 0.0

    def score(self, requests: Sequence[Score]) -> list[ScoreOutput]:
        Timed.now += 0.005 + 0.001 * sum(len(r.tokens) for r in requests)
        return super().score(requests)

    def decode(self, requests: Sequence[Decode]) -> list[DecodeOutput]:
        began = Timed.now
        outputs = super().decode(requests)
        Timed.now = began + 0.1 + 0.002 * requests[0].n
        return outputs


def test_passes_and_tokens_are_timed_separately() -> None:
    def clock() -> float:
        return Timed.now

    runner = Timed(chain(11), 11)
    assert costs.pass_cost(runner, 9, clock) == pytest.approx(14.0)
    token = costs.token_cost(runner, clock)
    assert token == pytest.approx(2.0), "what a decode call costs besides its tokens is not in it"
    assert not runner.held


def test_bandwidth_counts_what_is_read_and_what_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(costs, "COPY_BYTES", {"cpu": 1000})
    monkeypatch.setattr(costs, "seconds_of", lambda work: (work(), 0.5)[1])
    assert costs.bandwidth(torch.device("cpu")) == 4000.0
