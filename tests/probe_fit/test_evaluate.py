from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from semspec.errors import BadRequest, ModelError
from semspec.probe_fit.data import Folder
from semspec.probe_fit.evaluate import evaluate
from semspec.probe_fit.train import fit
from tests.probe_fit.test_train import CPU, QUICK, known


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
    for name, bounds in found["test"]["intervals"].items():
        assert bounds is not None and bounds[0] <= found["test"][name] <= bounds[1], name
    assert found["test"]["baselines"]["logprob"]["r2"] < 0.1
    with pytest.raises(BadRequest, match="another --seed"):
        evaluate(probe, Folder(tmp_path / "seen"), "target", "cross")
    probe.model = "model-x"
    with pytest.raises(ModelError, match="probe's own model"):
        evaluate(probe, Folder(tmp_path / "new"), "target", "cross")
