from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from semspec.errors import BadRequest, ModelError
from semspec.fit.data import Folder
from semspec.fit.evaluate import evaluate, intervals
from semspec.fit.rows import Rows, load_rows
from semspec.fit.train import fit
from semspec.probe import metrics
from semspec.probe.features import Features
from tests.fit.test_train import CPU, QUICK, known


def other(path: Path) -> Folder:
    """The same kind of collection, of problems with other names."""
    made = known(path, problems=10, seed=7)
    renamed = [replace(s, problem=f"new-{s.problem}") for s in made.read_samples(0)]
    made.write_shard(0, renamed, made.read_states(0))
    return made


def test_a_probe_is_measured_on_problems_it_has_not_seen(tmp_path: Path) -> None:
    probe = fit(known(tmp_path / "seen"), "target", QUICK, CPU).probe
    found = evaluate(probe, other(tmp_path / "new"), "target", "cross")
    assert found["test"]["n"] == 10 * 3 * 20 and found["test"]["r2"] > 0.8
    for name, bounds in found["intervals"].items():
        assert bounds is not None and bounds[0] <= found["test"][name] <= bounds[1], name
    assert found["baselines"]["logprob"]["r2"] < 0.1
    with pytest.raises(BadRequest, match="another --seed"):
        evaluate(probe, Folder(tmp_path / "seen"), "target", "cross")
    probe.model = "model-x"
    with pytest.raises(ModelError, match="probe's own model"):
        evaluate(probe, Folder(tmp_path / "new"), "target", "cross")


def test_intervals_widen_where_the_steps_of_a_problem_are_alike(tmp_path: Path) -> None:
    """Ten problems of sixty copies of one step are ten trials, not six hundred."""
    rows = load_rows(known(tmp_path, problems=10), "target", Features((2,)), "cross")
    torch.manual_seed(0)
    said = (rows.labels + torch.randn(len(rows)) * 0.3).clamp(0, 1)
    place = {p: i for i, p in enumerate(sorted(set(rows.problems)))}
    one_each = torch.tensor([place[p] for p in rows.problems])
    alike = Rows(rows.features, rows.labels[:10][one_each], rows.problems, rows.prefixes, rows.cross, rows.logprob, rows.surface, None)  # noqa: E501  # fmt: skip

    def width(of: Rows, predicted: torch.Tensor) -> float:
        low, high = intervals(of, predicted, draws=200)["mse"] or (0.0, 0.0)
        return high - low

    assert width(alike, said[:10][one_each]) > 3 * width(rows, said)


def test_a_problem_drawn_twice_makes_no_pairs_with_its_copy() -> None:
    """With one problem every draw is the problem itself, so the interval is the figure."""
    n = 6
    labels, said = torch.tensor([0.0, 1, 0, 1, 1, 0]), torch.tensor([0.1, 0.9, 0.5, 0.4, 0.6, 0.2])
    blank = torch.zeros(n, 1)
    rows = Rows(blank, labels, ["p"] * n, ["x"] * 3 + ["y"] * 3, labels > 2, blank[:, 0], blank, labels > 0.5)
    figures = metrics.summary(said, labels, rows.prefixes, rows.valid)
    for name, bounds in intervals(rows, said, draws=5).items():
        assert bounds == pytest.approx([figures[name]] * 2), name
