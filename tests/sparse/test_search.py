"""The joint budget: on made-up models whose losses are known for every combination, and on a small real one."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import semspec
from semspec.errors import BadRequest
from semspec.model import ModelRunner
from semspec.sparse_fit.calibrate import CalibrationConfig
from semspec.sparse_fit.search import Grid, Levels, apart, cheapest, in_words, mean_and_bound, search
from tests.checkpoints import make_model, save
from tests.sparse.test_calibrate import SMALL, Stories

EVERY = list(product(range(3), range(4), range(2)))


@given(st.integers(0, 10_000), st.floats(0.0, 3.0))
def test_the_cheapest_within_the_limit_is_found(seed: int, limit: float) -> None:
    """Losses that rise with every level, not additively; costs that fall. Against a look at all combinations."""
    import random

    rng = random.Random(seed)
    steps = [[rng.random() for _ in range(n)] for n in (3, 4, 2)]
    twist = rng.uniform(-0.5, 2.0)

    def loss(at: Levels) -> tuple[float, float]:
        alone = [sum(steps[part][:level]) for part, level in enumerate(at)]
        found = sum(alone) + max(twist, -0.2) * alone[0] * alone[1]
        return found, 1.1 * found

    costs = {at: 1 - 0.1 * at[0] - 0.07 * at[1] - rng.uniform(0.05, 0.1) * at[2] for at in EVERY}
    asked: list[Levels] = []

    def noted(at: Levels) -> tuple[float, float]:
        asked.append(at)
        return loss(at)

    monotone = all(
        loss(a)[1] <= loss(b)[1] + 1e-12 for a in EVERY for b in EVERY if all(x <= y for x, y in zip(a, b, strict=True))
    )
    best, tried = cheapest(costs, noted, limit)
    within = [at for at in EVERY if loss(at)[1] <= limit or not any(at)]
    if monotone:
        assert costs[best] == min(costs[at] for at in within)
    assert best in within and len(asked) == len(set(asked)) == len(tried) < len(EVERY)
    assert [one.levels for one in tried] == asked and [one.cost for one in tried] == sorted(one.cost for one in tried)


def test_parts_that_are_harmless_alone_are_not_together() -> None:
    """Planted: blocks and channels each lose little, both together much. Chosen apart they break the limit."""

    def loss(at: Levels) -> tuple[float, float]:
        both = 5.0 if at[0] and at[1] else 0.0
        found = 0.1 * at[0] + 0.1 * at[1] + 0.2 * at[2] + both
        return found, found

    costs = {at: 1 - 0.1 * at[0] - 0.08 * at[1] - 0.05 * at[2] for at in EVERY}
    separate = apart(costs, loss, 0.4)
    assert separate == (2, 3, 1) and loss(separate)[0] > 0.4
    best, _ = cheapest(costs, loss, 0.4)
    assert best == (2, 0, 1) and loss(best)[0] <= 0.4
    assert cheapest(costs, loss, 0.0)[0] == (0, 0, 0), "no loss at all is dense"


def test_the_bound_of_losses_that_differ_by_powers_of_ten() -> None:
    losses = [1e-9, 1e-5, 3e-5, 1e-7]
    value, bound = mean_and_bound(losses)
    assert value == pytest.approx(sum(losses) / 4) and value < bound < 1e-4
    assert mean_and_bound([0.5]) == (0.5, 0.5)


def test_levels_are_checked() -> None:
    for wrong in ({"rhos": (0.5, 0.1)}, {"rhos": (1.0, 0.1, 0.5)}, {"channels": (0.0, 0.4, 0.4)}, {"experts": ()}):
        with pytest.raises(BadRequest, match="in order"):
            Grid(**wrong)


@pytest.mark.parametrize("kind", ["llama3.1", "qwen3-moe"])
def test_a_real_model(kind: str, tmp_path: Path) -> None:
    model = make_model(kind, num_experts_per_tok=3) if "moe" in kind else make_model(kind)
    pair = semspec.load(save(model, tmp_path / "model"), device="cpu", slots=1, context=512)
    grid = Grid((1.0, 0.2), (0.0, 0.3), (0, 1, 2, 5))
    base = CalibrationConfig(SMALL)
    asked: list[float] = []
    for limit in (1e-9, 0.02, 100.0):
        plan = search(pair, Stories(), 2, limit, base, grid, k=4, max_new_tokens=12)
        told = plan.made["search"]
        assert told["best"]["loss"] <= limit and told["best"]["cost"] <= 1
        assert all(one["bound"] > limit for one in told["tried"][:-1])
        asked.append(told["best"]["cost"])
        assert len(in_words(plan)) == 2
    assert asked[0] == 1.0 and plan.attention is not None and plan.ffn is not None
    assert asked == sorted(asked, reverse=True) and asked[2] < asked[0], "a larger loss buys more"
    assert (plan.experts is not None and plan.experts.most == 2) == ("moe" in kind)
    assert isinstance(pair.target, ModelRunner) and pair.target.sparsity is None and pair.target.free == 1


def test_texts_that_are_too_short_for_blocks(tmp_path: Path) -> None:
    pair = semspec.load(save(make_model("llama3.1"), tmp_path / "model"), device="cpu", slots=1, context=512)
    base = CalibrationConfig(replace(SMALL, dense_below=400))
    plan = search(pair, Stories(), 2, 100.0, base, Grid((1.0, 0.2), (0.0, 0.3)), k=4, max_new_tokens=12)
    assert plan.attention is None and plan.ffn is not None


def test_the_command(semspec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from semspec import tasks

    monkeypatch.setitem(tasks.REGISTRY, "stories", Stories)
    folder = save(make_model("llama3.1"), tmp_path / "model")
    common = ["--task", "stories", "--problems", 2, "-k", 4, "--device", "cpu", "--context", 512, "--block", 4]
    given = [
        *common,
        "--dense-below",
        16,
        "--rho",
        0.1,
        "--ffn",
        0.3,
        "--max-new-tokens",
        12,
        "--preset",
        "paper",
        "--by",
        "flops",
    ]
    done = semspec("sparse", "search", folder, "--out", tmp_path / "plan", "--max-kl", 10, *given)
    assert done.returncode == 0, done.stderr
    best = json.loads(done.stdout)["made"]["search"]["best"]
    assert best["levels"] == [1, 1, 0] and "of the dense flops" in done.stderr
    for wrong in (["--max-kl", 0], ["--max-kl", 1, "--by", "watts"]):
        refused = semspec("sparse", "search", folder, "--out", tmp_path / "plan", *given, *wrong)
        assert refused.returncode == 2 and "above 0, and bytes or flops" in refused.stderr
