"""What a calibration tries: settings from strict to loose, and combinations of several options in the order of their
speed, which is found on problems that nothing is tested on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import sqrt
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import semspec
from semspec import verify
from semspec.bench import candidates as tried
from semspec.bench.arms import arms_for
from semspec.bench.calibrate import MANY, calibrate, check_bound, fewest_problems, loosest_safe
from semspec.bench.candidates import LADDERS, candidates, order_by_speed, several
from semspec.bench.folder import load_run, write_json
from semspec.bench.run import Bench, Config
from semspec.errors import BadRequest
from semspec.types import Sampling
from tests.verify.build import build, random_one

EASY = {"fly": "fly:window=0", "csd": "csd:count=0"}  # else random languages have nothing to relax
GRID = "theta=0.6,0.3;window=8,6"


def test_several_options_give_all_combinations_the_strict_ones_first() -> None:
    assert candidates("fly:top=4", GRID) == [
        "fly:top=4,theta=0.6,window=8", "fly:top=4,theta=0.6,window=6", "fly:top=4,theta=0.3,window=8",
        "fly:top=4,theta=0.3,window=6",
    ]  # fmt: skip
    assert several(GRID) and not several("theta=0.6,0.3") and not several("theta=0.6;") and not several(None)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ("theta=0.6;window", "strictest first: theta"), (";", "strictest first"), ("=1", "strictest first"),
        ("theta=0.6;theta=0.3", "'theta' twice"),
        ("theta=" + ",".join(map(str, range(9))) + ";window=" + ",".join(map(str, range(8))), "72 combinations"),
    ],
)  # fmt: skip
def test_values_that_are_no_list_are_refused(values: str, message: str) -> None:
    with pytest.raises(BadRequest, match=message):
        candidates("fly", values)


@pytest.mark.parametrize("name", [name for name in LADDERS if verify.make(name).unit == "token"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_our_own_lists_go_from_strict_to_loose(name: str, temperature: float) -> None:
    ones = [random_one(seed, 9, Sampling(temperature, seed=seed)) for seed in range(400)]
    rules = [verify.make(method) for method in candidates(EASY.get(name, name), None)]
    accepted = [int(rule.verify(build(*ones)).accepted.sum()) for rule in rules]
    assert accepted == sorted(accepted), accepted
    assert accepted[0] < accepted[-1] or (name == "ears" and not temperature), "which is exact there"


# -- the order


def stand_in(methods: list[str], speeds: dict[str, float], problems: int = 40) -> tuple[Any, list[str]]:
    """A bench whose methods write so many tokens a pass, and the problems that they were tried on."""
    seen: list[str] = []

    def answer(arm: Any, some: list[str]) -> list[Any]:
        seen.extend(some)
        return [SimpleNamespace(stats=SimpleNamespace(tokens=100 * speeds[arm.name], target_passes=100))]

    made = SimpleNamespace(
        problems=[f"p{i}" for i in range(problems)], config=Config("pocket", methods), tried=answer,
        arms=arms_for(methods, True, None, "auto"),
    )  # fmt: skip
    return made, seen


def test_combinations_are_ordered_by_speed_on_problems_that_are_not_tested(tmp_path: Path) -> None:
    methods = candidates("fly", GRID)
    bench, seen = stand_in(methods, dict(zip(methods, (2.0, 5.0, 1.0, 2.0), strict=True)))
    order_by_speed(bench, tmp_path)
    wanted = [methods[2], methods[0], methods[3], methods[1]]
    assert bench.config.methods == wanted, "and of equally fast ones the stricter first"
    assert [arm.name for arm in bench.arms] == ["none", "draft", *wanted]
    assert len(bench.problems) == 40 - tried.PILOT and not set(seen) & set(bench.problems)
    assert len(set(seen)) == tried.PILOT and "p0" in seen and "p39" not in seen


def test_a_run_that_goes_on_keeps_its_order(tmp_path: Path) -> None:
    methods = candidates("fly", GRID)
    before = methods[::-1]
    write_json(tmp_path / "run.json", {"config": {"methods": before}, "arms": []})
    bench, seen = stand_in(methods, {})
    order_by_speed(bench, tmp_path)
    assert bench.config.methods == before and not seen


def test_too_few_problems_for_an_order_are_refused(tmp_path: Path) -> None:
    with pytest.raises(BadRequest, match="16 problems order the candidates and are not tested; there are 16"):
        order_by_speed(stand_in(candidates("fly", GRID), {}, 16)[0], tmp_path)


Order = Callable[[np.ndarray, np.ndarray], np.ndarray]


def broken(order: Order, splits: int = 200, count: int = 48, bound: float = 0.05) -> float:
    """How often a combination is chosen that loses more than the bound, where all lose a little more, and speed says
    nothing of that. `order`: from the speeds of a pilot and the losses that are tested."""
    rng, wrong = np.random.default_rng(3), 0
    for _ in range(splits):
        losses = (rng.random((count, 300)) < bound + 0.003).astype(float)
        ordered = losses[order(rng.random(count), losses)]
        wrong += loosest_safe(ordered.tolist(), bound, 0.95) is not None
    return wrong / splits


def test_an_order_by_speed_keeps_the_promise_and_a_careless_order_breaks_it() -> None:
    """Careless: it begins with what has lost least on the problems that are then tested."""
    assert broken(lambda speeds, losses: speeds.argsort()) <= 0.05 + 3 * sqrt(0.05 * 0.95 / 200)
    assert broken(lambda speeds, losses: losses.mean(1).argsort()) > 0.15


def test_several_options_are_calibrated_together(
    pocket: semspec.Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tried, "PILOT", 2)
    monkeypatch.setattr("semspec.bench.calibrate.PILOT", 2)
    monkeypatch.setattr("semspec.bench.calibrate.no_loss_in_answers", lambda own, control: None)
    methods = candidates("typical", "epsilon=0.5,0.01;alpha=0.9,0.3")
    config = Config("pocket:steps=3,split=probe", methods, n=12, batch=4, max_new_tokens=110, context=512, entropy=True)
    quick: dict[str, Any] = {"loss": 0.6, "confidence": 0.8, "progress": lambda done, total: None, "by_speed": True}
    with pytest.raises(BadRequest, match="besides 2 that order the candidates cannot show"):
        calibrate(Bench(replace(config, n=3), pocket), tmp_path, **quick)
    profile, choice = calibrate(Bench(config, pocket), tmp_path, **quick)
    run, samples = load_run(tmp_path)
    assert sorted(run["config"]["methods"]) == sorted(methods) and profile.verifier == choice.method
    assert profile.problems == len({s["problem"] for s in samples}) == 10
    again, _ = calibrate(Bench(config, pocket), tmp_path, **quick)
    assert replace(again, created="") == replace(profile, created="")


def test_a_bound_that_nothing_can_show_is_refused_at_once() -> None:
    assert fewest_problems(1e-9, 0.95) == MANY


@pytest.mark.parametrize(
    ("loss", "confidence", "message"),
    [
        (0.0, 0.95, "the loss is 0; give a share above 0"),
        (0.01, 1.0, "the confidence is 1; give more than 0 and less than 1, as 0.95"),
        (0.01, 95.0, "the confidence is 95;"),
    ],
)
def test_a_bound_without_a_meaning_is_named(loss: float, confidence: float, message: str) -> None:
    with pytest.raises(BadRequest, match=message):
        check_bound(loss, confidence)
