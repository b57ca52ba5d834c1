"""Plans on disk, and plans that belong to other models."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from semspec.errors import BadRequest
from semspec.model import ModelRunner
from semspec.probe import fingerprint
from semspec.sparse import AttentionPlan, ExpertsPlan, FfnPlan, SparsePlan, apply, plan_of
from tests.checkpoints import make_model, save
from tests.sparse.runners import load

WHOLE = SparsePlan(
    model="llama-3x64-abc",
    attention=AttentionPlan(
        block=16,
        dense_below=256,
        rho=0.25,
        sinks=2,
        recent=3,
        score="first",
        spread="heads",
        anchors=(0, 2),
        rest="mean",
    ),
    ffn=FfnPlan(torch.tensor([0.1, 0.0, 0.3]), "token", 0.5),
    experts=ExpertsPlan(torch.rand(3, 7), 3),
    refresh=8,
    made={"task": "pocket:long=true", "n": 4},
    seen={"layers": torch.rand(3, 3)},
)


def same(one: SparsePlan, other: SparsePlan) -> bool:
    tensors = [(p.ffn.thresholds, p.experts.betas, p.seen["layers"]) for p in (one, other) if p.ffn and p.experts]
    plain = [(p.model, p.attention, p.refresh, p.made, p.ffn and (p.ffn.by, p.ffn.sparsity)) for p in (one, other)]
    return plain[0] == plain[1] and all(torch.equal(a, b) for a, b in zip(*tensors, strict=True))


def test_a_plan_is_what_was_saved(tmp_path: Path) -> None:
    WHOLE.save(tmp_path / "a" / "plan")
    assert same(SparsePlan.load(tmp_path / "a" / "plan"), WHOLE)
    assert sorted(p.name for p in (tmp_path / "a" / "plan").iterdir()) == ["plan.json", "plan.safetensors"]
    SparsePlan().save(tmp_path / "nothing")
    assert SparsePlan.load(tmp_path / "nothing") == SparsePlan()
    assert "others by their mean" in str(WHOLE)


def test_a_plan_from_before_there_was_a_rest_sees_nothing_of_it(tmp_path: Path) -> None:
    WHOLE.save(tmp_path)
    numbers = json.loads((tmp_path / "plan.json").read_text())
    assert numbers["attention"].pop("rest") == "mean"
    (tmp_path / "plan.json").write_text(json.dumps(numbers))
    attention = SparsePlan.load(tmp_path).attention
    assert attention is not None and attention.rest == "nothing" and attention.rho == 0.25


@pytest.mark.parametrize("harm", ["missing", "json", "version", "field", "tensors"])
def test_a_damaged_plan_is_refused(tmp_path: Path, harm: str) -> None:
    WHOLE.save(tmp_path)
    numbers = json.loads((tmp_path / "plan.json").read_text())
    if harm == "missing":
        (tmp_path / "plan.json").unlink()
    elif harm == "json":
        (tmp_path / "plan.json").write_text("{")
    elif harm == "version":
        (tmp_path / "plan.json").write_text(json.dumps(numbers | {"version": 9}))
    elif harm == "field":
        (tmp_path / "plan.json").write_text(json.dumps(numbers | {"attention": {"blocks": 3, "anchors": None}}))
    else:
        (tmp_path / "plan.safetensors").write_bytes(b"nothing")
    with pytest.raises(BadRequest, match="make"):
        SparsePlan.load(tmp_path)


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> ModelRunner:
    return load(save(make_model("llama3"), tmp_path_factory.mktemp("model")))


def test_a_plan_belongs_to_its_model(runner: ModelRunner) -> None:
    own = SparsePlan(model=fingerprint(runner), attention=AttentionPlan())
    apply(own, runner)
    assert plan_of(runner) is own
    with pytest.raises(BadRequest, match="calibrate one for it"):
        apply(SparsePlan(model="llama-3x64-other"), runner)
    assert plan_of(runner) is own
    apply(None, runner)
    assert plan_of(runner) is None
    with pytest.raises(BadRequest, match="the model has 3 layers"):
        apply(SparsePlan(attention=AttentionPlan(anchors=(0, 3))), runner)


def test_weights_of_one_byte_are_refused(tmp_path: Path) -> None:
    model = ModelRunner.load(save(make_model("llama3"), tmp_path), device="cpu", dtype="int8", slots=1, context=64)
    with pytest.raises(BadRequest, match="weights of floating point"):
        apply(SparsePlan(attention=AttentionPlan()), model)
