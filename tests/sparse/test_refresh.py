"""What sparse passes wrote is written anew, and measured."""

from __future__ import annotations

import pytest
import torch

from semspec.model import ModelRunner
from semspec.sparse import AttentionPlan
from semspec.types import Decode, Sampling
from tests.checkpoints import make_model, save
from tests.sparse.runners import check, course, load, read, text, with_plan

PLAN = AttentionPlan(block=8, dense_below=32, rho=0.1, sinks=1, recent=1)


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> ModelRunner:
    return load(save(make_model("llama3.1"), tmp_path_factory.mktemp("model")))


def entries(runner: ModelRunner, slot: int) -> torch.Tensor:
    end = runner.length(slot)
    return torch.cat([runner.cache.keys[:, slot, :, :end], runner.cache.values[:, slot, :, :end]])


def played(runner: ModelRunner, rounds: int, writes: bool = False) -> list[torch.Tensor]:
    """Checks with something taken back after each, perhaps with a roll among them; slot 0 is left as it is then."""
    slot, logits = runner.acquire(), []
    read(runner, slot, text(0, 100))
    for i in range(rounds):
        logits.append(check(runner, slot, text(10 + i, 6)))
        runner.truncate(slot, runner.length(slot) - 1 - i % 4)
        if writes and i == 1:
            runner.decode([Decode(runner, slot, [7], 3, Sampling(), 0)])
    return logits


@pytest.mark.parametrize("writes", [False, True])
def test_a_refresh_leaves_what_dense_passes_would_have_left(runner: ModelRunner, writes: bool) -> None:
    sparse, dense = with_plan(runner, attention=PLAN, refresh=3), with_plan(runner)
    for i, (ours, exact) in enumerate(zip(played(sparse, 4, writes), played(dense, 4, writes), strict=True)):
        same = torch.allclose(ours, exact, atol=1e-3)
        assert same == (i == 3), "three sparse checks, then a dense one"
    if not writes:  # a roll that follows sparse passes may write other tokens
        torch.testing.assert_close(entries(sparse, 0), entries(dense, 0), atol=1e-3, rtol=1e-3)
    (error,) = sparse.sparsity.refresh.errors
    assert error.tokens == 6 * 3 - (1 + 2 + 3) + (3 if writes else 0)
    assert 0.001 < error.keys < 2 and 0.001 < error.values < 2


def test_without_a_refresh_it_stays_as_it_was_written(runner: ModelRunner) -> None:
    sparse, dense = with_plan(runner, attention=PLAN), with_plan(runner)
    played(sparse, 8)
    played(dense, 8)
    assert not torch.allclose(entries(sparse, 0), entries(dense, 0), atol=1e-2)
    assert sparse.sparsity.refresh.errors == []


def test_means_are_made_again_for_blocks_that_were_refreshed(runner: ModelRunner) -> None:
    sparse = with_plan(runner, attention=PLAN, refresh=3)
    played(sparse, 5)
    means, full = sparse.sparsity.statistics, sparse.length(0) // 8
    means.update(0, sparse.length(0))
    exact = sparse.cache.keys[:, 0, :, : full * 8].unflatten(2, (full, 8)).mean(3)
    torch.testing.assert_close(means.keys[:, 0, :, :full], exact)


def test_what_was_truncated_away_or_belongs_to_another_is_forgotten(runner: ModelRunner) -> None:
    sparse = with_plan(runner, slots=1, attention=PLAN, refresh=2)
    for seed in range(3):  # the same slot every time, and never a third check
        course(sparse, seed=seed, prompt=80, rounds=2)
    slot = sparse.acquire()
    read(sparse, slot, text(0, 80))
    for _ in range(6):
        check(sparse, slot, text(1, 5))
        sparse.truncate(slot, 80)  # nothing of it is kept
    assert sparse.sparsity.refresh.errors == []


def test_short_contexts_are_dense_and_need_no_refresh(runner: ModelRunner) -> None:
    sparse = with_plan(runner, attention=PLAN, refresh=1)
    course(sparse, prompt=10, rounds=3)
    assert sparse.sparsity.refresh.errors == []
