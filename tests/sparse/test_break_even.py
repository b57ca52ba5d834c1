"""What does not pay is turned off: decided on planted times, and once on real ones."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from semspec.model import ModelRunner
from semspec.sparse import AttentionPlan, ExpertsPlan, FfnPlan, SparsePlan
from semspec.sparse_fit import break_even as pays
from tests.checkpoints import make_model, save
from tests.sparse.runners import check, load, read, text, with_plan

ATTENTION = AttentionPlan(block=16, dense_below=64, rho=0.1)


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> ModelRunner:
    return load(save(make_model("qwen3-moe"), tmp_path_factory.mktemp("model")), context=512)


def whole(runner: ModelRunner) -> SparsePlan:
    depth = runner.num_layers
    return SparsePlan(
        attention=ATTENTION, ffn=FfnPlan(torch.full((depth,), 0.1)), experts=ExpertsPlan(torch.ones(depth, 1), 1)
    )


def test_each_part_is_kept_or_dropped_by_its_own_time(runner: ModelRunner) -> None:
    asked: list[tuple[int, str]] = []

    def compare(one: ModelRunner, slot: int, start: int, draft: Sequence[int], plan: SparsePlan) -> float:
        parts = [name for name in ("attention", "ffn", "experts") if getattr(plan, name) is not None]
        assert len(parts) == 1 and len(draft) == 5 and one.sparsity is None
        asked.append((start, parts[0]))
        return {"ffn": 0.99, "experts": 0.6}.get(parts[0], 1.5 if start < 400 else 0.5)

    free = runner.free
    plan = pays.keep_faster_parts(runner, whole(runner), text(1, 100), 5, compare)
    assert plan.ffn is None, "a hundredth may be noise"
    assert plan.experts is not None and plan.attention is not None
    assert asked == [(95, "ffn"), (95, "experts"), (256, "attention"), (507, "attention")]
    assert plan.attention.pays_from == 507 and "above 507" in str(plan)
    assert plan.made["pays"] == {"ffn": 0.99, "experts": 0.6, "attention": {"256": 1.5, "507": 0.5}}
    assert runner.free == free and runner.sparsity is None


def test_blocks_pay_from_where_all_longer_ones_do() -> None:
    assert pays.pays_from({256: 1.2, 512: 0.9, 1024: 1.1, 2048: 0.8, 4096: 0.7}, 9999) == 2048
    assert pays.pays_from({256: 0.9, 512: 0.8}, 9999) == 256
    assert pays.pays_from({256: 1.0, 512: 0.98}, 9999) == pays.pays_from({}, 9999) == 9999


def test_below_that_length_checks_are_dense_to_the_last_bit(runner: ModelRunner) -> None:
    late = AttentionPlan(16, 64, 0.1, pays_from=300)
    assert not late.sparse_at(299, 2) and late.sparse_at(300, 2) and ATTENTION.sparse_at(299, 2)
    answers = []
    for one in (with_plan(runner, attention=late), with_plan(runner), with_plan(runner, attention=ATTENTION)):
        slot = one.acquire()
        read(one, slot, text(2, 200))
        answers.append(check(one, slot, text(3, 5)))
    assert torch.equal(answers[0], answers[1]) and not torch.equal(answers[0], answers[2])


def test_a_plan_remembers_it(runner: ModelRunner, tmp_path: Path) -> None:
    plan = SparsePlan(attention=AttentionPlan(pays_from=8192))
    plan.save(tmp_path)
    loaded = SparsePlan.load(tmp_path).attention
    assert loaded is not None and loaded.pays_from == 8192


def test_real_times_are_ratios(runner: ModelRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pays, "SECONDS", 0.0)
    plan = pays.keep_faster_parts(runner, whole(runner), text(1, 100), 5)
    seen = plan.made["pays"]
    assert seen["ffn"] > 0 and seen["experts"] > 0 and set(seen["attention"]) == {"256", "507"}
    assert runner.length(0) == 0 and runner.sparsity is None
