"""Figures, intervals and differences against a slow reference: every draw spelled out row by row."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
import torch
from rich.console import Console

from semspec.probe import metrics
from semspec.probe.features import Features
from semspec.probe_fit.bootstrap import Resampled
from semspec.probe_fit.measure import MIN_PROBLEMS, measure
from semspec.probe_fit.rows import Rows, load_rows
from semspec.probe_fit.table import tables
from tests.probe_fit.test_train import known


def random_rows(problems: int = 7, seed: int = 0) -> tuple[Rows, torch.Tensor]:
    """Problems of different sizes, one of them with wrong steps only; and predictions with many ties."""
    rng = Random(seed)
    names = [f"p{p}" for p in range(problems) for _ in range(3 + 4 * (p % 3))]
    prefixes = [f"{name}/{rng.randrange(2)}" for name in names]
    n = len(names)
    labels = torch.tensor([rng.randrange(11) / 10 for _ in names])
    valid = torch.tensor([rng.random() < 0.6 and name != "p1" for name in names])
    said = ((labels + torch.tensor([rng.uniform(-0.4, 0.4) for _ in names])).clamp(0, 1) * 8).round() / 8
    logprob = torch.tensor([-rng.random() for _ in names])
    surface = torch.tensor([[rng.randrange(5, 30), rng.randrange(6)] for _ in names]).float()
    cross = torch.tensor([rng.random() < 0.5 for _ in names])
    return Rows(torch.zeros(n, 1), labels, names, prefixes, cross, logprob, surface, valid), said


def drawn_by_hand(rows: Rows, said: torch.Tensor, times: list[int]) -> dict[str, float]:
    """A draw in rows, in which a problem drawn twice is two problems with prefixes of their own."""
    problems = list(dict.fromkeys(rows.problems))
    at = [(i, copy) for p, n in enumerate(times) for copy in range(n) for i, name in enumerate(rows.problems) if name == problems[p]]  # noqa: E501  # fmt: skip
    index = torch.tensor([i for i, _ in at])
    groups = [(rows.prefixes[i], copy) for i, copy in at]
    assert rows.valid is not None
    found = metrics.summary(said[index], rows.labels[index], groups, rows.valid[index])
    return {name: float("nan") if value is None else value for name, value in found.items() if name != "n"}


def draws(problems: int, n: int, seed: int) -> torch.Tensor:
    drawn = torch.randint(problems, (n, problems), generator=torch.Generator().manual_seed(seed))
    return torch.stack([row.bincount(minlength=problems) for row in drawn]).double()


@pytest.mark.parametrize("seed", range(4))
def test_all_draws_at_once_are_each_draw_by_hand(seed: int) -> None:
    rows, said = random_rows(seed=seed)
    times = draws(7, 30, seed)
    found = Resampled(rows.problems, rows.prefixes).figures(times, said, rows.labels, rows.valid)
    for d, counts in enumerate(times.int().tolist()):
        for name, value in drawn_by_hand(rows, said, counts).items():
            assert found[name][d].item() == pytest.approx(value, abs=6e-5, nan_ok=True), name


def test_a_draw_without_a_figure_leaves_no_interval() -> None:
    """Four of five problems have wrong steps only: some draws have nothing else."""
    names = [f"p{i}" for i in range(5) for _ in range(2)]
    right = torch.tensor([True, *[False] * 9])
    labels, said = torch.tensor([1.0, 0.0] * 5), torch.tensor([0.9, 0.1, *[0.7, 0.3] * 4])
    rows = Rows(torch.zeros(10, 1), labels, names, names, right & False, said.log(), torch.zeros(10, 2), right)
    ends = measure(rows, said, said, rows)["test"]["intervals"]
    assert ends["valid_auroc"] is None and ends["mse"] is not None
    assert ends["within_prefix_auroc"] == [1.0, 1.0], "all have a pair in which the likelier is higher"


def test_intervals_widen_where_the_steps_of_a_problem_are_alike(tmp_path: Path) -> None:
    """Ten problems of sixty copies of one step are ten trials, not six hundred."""
    rows = load_rows(known(tmp_path, problems=10), "target", Features((2,)), "cross")
    torch.manual_seed(0)
    said = (rows.labels + torch.randn(len(rows)) * 0.3).clamp(0, 1)
    one_each = metrics.numbered(rows.problems)

    def width(labels: torch.Tensor, predicted: torch.Tensor) -> float:
        alike = replace(rows, labels=labels, valid=None, cross=rows.cross & False)
        low, high = measure(alike, predicted, predicted, alike)["test"]["intervals"]["mse"]
        return high - low

    assert width(rows.labels[:10][one_each], said[:10][one_each]) > 3 * width(rows.labels, said)


def test_a_difference_is_between_predictors_in_the_same_draw() -> None:
    """A probe that is always a little better than a good baseline: the intervals overlap, the difference is clear."""
    rng = torch.Generator().manual_seed(0)
    n, each = 40, 25
    problems = [f"p{i // each}" for i in range(n * each)]
    labels = torch.rand(n * each, generator=rng)
    hard = torch.rand(n, generator=rng)[metrics.numbered(problems)] * 2  # some problems are hard for everybody
    off = torch.randn(n * each, generator=rng) * hard
    rows = Rows(torch.zeros(n * each, 1), labels, problems, problems, labels < 0, labels + off, torch.zeros(n * each, 2), None)  # noqa: E501  # fmt: skip
    said = (labels + 0.9 * off) * 0.45 + 0.28
    found = measure(rows, said, said, rows)["test"]
    baseline = found["baselines"]["logprob"]
    (low, _), (_, high) = found["intervals"]["correlation"], baseline["intervals"]["correlation"]
    assert low < high and baseline["difference"]["correlation"]["clearly_better"]
    gain = baseline["difference"]["correlation"]
    assert gain["value"] == pytest.approx(found["correlation"] - baseline["correlation"], abs=1e-4)
    assert gain["interval"][0] > 0 and gain["interval"][0] <= gain["value"] <= gain["interval"][1]
    itself = measure(rows, labels + off, labels, rows)["test"]["baselines"]["logprob"]["difference"]
    assert not itself["correlation"]["clearly_better"] and not itself["mse"]["clearly_better"]


def test_less_error_is_better() -> None:
    rows, _ = random_rows()
    found = measure(rows, rows.labels, rows.labels, rows)["test"]["baselines"]["logprob"]["difference"]
    assert found["mse"]["value"] < 0 and found["mse"]["clearly_better"] and found["r2"]["clearly_better"]
    worst = measure(rows, 1 - rows.labels, rows.labels, rows)["test"]["baselines"]["logprob"]["difference"]
    assert not any(gain["clearly_better"] for gain in worst.values())


def test_each_models_steps_are_measured_alone_with_baselines_of_their_own() -> None:
    rows, said = random_rows(problems=30)
    rows = replace(rows, logprob=torch.where(rows.cross, rows.labels, -rows.labels))  # tells all, but differently
    found = measure(rows, said, said, rows)
    for part, mask in (("test_own_steps", ~rows.cross), ("test_other_steps", rows.cross)):
        alone = rows.where(mask)
        plain = metrics.summary(said[mask], alone.labels, alone.prefixes, alone.valid)
        assert {key: found[part][key] for key in plain} == plain and found[part]["problems"] <= 30
        assert found[part]["baselines"]["logprob"]["correlation"] == pytest.approx(1.0)
    assert found["test"]["baselines"]["logprob"]["correlation"] < 0.9
    assert "test_own_steps" not in measure(rows.where(rows.cross), said[rows.cross], said[rows.cross], rows)


def test_what_a_baseline_says_beyond_one_still_ranks() -> None:
    names = [f"p{i}" for i in range(MIN_PROBLEMS) for _ in range(8)]
    labels = torch.tensor([0.0] * 3 + [1.0] * 5).repeat(MIN_PROBLEMS)
    logprob = torch.tensor([-1.0, -1.0, -1.0, 0.0, 0.0, 0.0, 0.9, 1.0]).repeat(
        MIN_PROBLEMS
    )  # a line above 1 from 0.5 on
    right = torch.tensor([False] * 7 + [True]).repeat(MIN_PROBLEMS)
    n = len(names)
    rows = Rows(torch.zeros(n, 1), labels, names, names, right & False, logprob, torch.zeros(n, 2), right)
    found = measure(rows, labels, labels, rows)["test"]["baselines"]["logprob"]
    assert found["valid_auroc"] == 1.0 and found["intervals"]["valid_auroc"] == [1.0, 1.0]


def test_people_get_a_table_for_each_kind_of_step() -> None:
    rows, said = random_rows(problems=12)
    shown = list(tables("target", measure(rows, said, said, rows)))
    console = Console(width=120, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    for table in shown:
        console.print(table)
    text = console.export_text()
    assert len(shown) == 3 and "target probe, the draft's steps:" in text and "✓" in text
    value = measure(rows, said, said, rows)["test"]["correlation"]
    assert f"{value:.2f} [" in text, "brackets are not taken for styles"


def test_few_problems_have_no_intervals_and_nothing_is_clearly_better() -> None:
    """Draws of one or two problems are nearly all the same: an interval of no width is no knowledge."""
    rows, _ = random_rows(problems=9)
    for problems, known_enough in ((MIN_PROBLEMS - 1, False), (MIN_PROBLEMS, True)):
        at = torch.tensor([int(name[1:]) < problems for name in rows.problems])
        some = rows.where(at)
        found = measure(some, some.labels, some.labels, some)["test"]
        gains = [gain for cheap in found["baselines"].values() for gain in cheap["difference"].values()]
        assert any(bounds is not None for bounds in found["intervals"].values()) == known_enough
        assert any(gain["clearly_better"] for gain in gains) == known_enough
