"""The memory plan: true, told beforehand, and refused with a way out where it cannot be had."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

import semspec
from semspec.cli import app
from semspec.errors import ModelError
from semspec.model import Source, few, plan
from semspec.model.experts import Linear
from semspec.model.plan import Plan, check
from semspec.model.runner import ModelRunner
from tests.checkpoints import make_model, save
from tests.model.test_foreign import build

CPU = torch.device("cpu")


@pytest.fixture
def free(monkeypatch: pytest.MonkeyPatch) -> object:
    return lambda count: monkeypatch.setattr(plan, "available", lambda device: count)


def taken(runner: ModelRunner) -> int:
    """Bytes of all matrices and of the KV memory."""
    model = runner.transformer
    tensors = {id(model.embedding): model.embedding}
    linears = [model.head] + [
        x for layer in model.layers for x in (layer.qkv, layer.out, layer.ffn.gate_up, layer.ffn.down)
    ]  # type: ignore[union-attr]
    for linear in linears:
        assert isinstance(linear, Linear)
        tensors[id(linear.weight)] = linear.weight
    return sum(t.nbytes for t in tensors.values()) + runner.cache.keys.nbytes + runner.cache.values.nbytes


@pytest.mark.parametrize("family", ["llama3", "qwen3", "gemma3", "phi4-mini"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_plan_is_what_is_taken(family: str, dtype: str, tmp_path: Path) -> None:
    source = Source.find(save(make_model(family), tmp_path / "m"))
    planned = source.plan("cpu", dtype, slots=3, context=200)
    runner = source.load("cpu", dtype, 3, 200)
    assert isinstance(runner, ModelRunner)
    assert planned.total == pytest.approx(taken(runner), rel=0.01)  # norms and biases are small change


def test_weights_that_are_packed_are_planned_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(few, "LEAST", 0)
    monkeypatch.setattr(few, "can_pack", lambda: True)
    monkeypatch.setattr(few, "pack", lambda weight: weight.clone())
    for family in ("llama3.1", "qwen3"):  # with a head of its own, and with the embedding as head
        source = Source.find(save(make_model(family), tmp_path / family))
        planned = source.plan("cpu", "float32", slots=3, context=200)
        runner = source.load("cpu", "float32", 3, 200)
        assert isinstance(runner, ModelRunner)
        transformer = runner.transformer
        linears = [transformer.head, *(m for layer in transformer.layers for m in (layer.qkv, layer.out))]
        linears += [m for layer in transformer.layers for m in (layer.ffn.gate_up, layer.ffn.down)]
        packed = sum(m.packed.nbytes for m in linears)
        assert packed and planned.total == pytest.approx(taken(runner) + packed, rel=0.01)


def test_int8_plans_a_byte_for_each_weight_and_floats_for_the_embedding(tmp_path: Path) -> None:
    model = make_model("llama3.1")
    planned = Source.find(save(model, tmp_path / "m")).plan("cpu", "int8", 1, 100)
    embedding = model.get_input_embeddings().weight.numel()
    assert planned.weights == pytest.approx(model.num_parameters() + 4 * embedding, rel=0.01)
    assert planned.per_token == 2 * 3 * 2 * 16 * 8  # int8 attends in double precision


def test_a_foreign_models_plan_counts_the_tensors_in_its_files(tmp_path: Path) -> None:
    model = build("gpt2")
    planned = Source.find(save(model, tmp_path / "m")).plan("cpu", "float32", 1, 100)
    assert planned.weights == pytest.approx(4 * model.num_parameters(), rel=0.01)


def test_an_impossible_plan_is_an_error_before_anything_is_read(
    target_folder: Path, draft_folder: Path, free: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Source, "load", lambda *args: pytest.fail("weights were read"))
    free(3_000_000)  # type: ignore[operator]
    with pytest.raises(ModelError) as error:
        semspec.load(target_folder, draft_folder, device="cpu", slots=8)
    message = str(error.value)
    needed = [Source.find(f).plan("cpu", "auto", 8, None).total for f in (target_folder, draft_folder)]
    assert f"that is {plan.size(sum(needed) - 3_000_000)} too much; slots=1 would fit" in message


@given(st.integers(1, 10**10), st.integers(1, 10**6), st.integers(1, 64), st.integers(2, 10**5), st.integers(1, 10**10))
def test_what_is_said_to_fit_fits(weights: int, per_token: int, slots: int, context: int, free: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plan, "available", lambda device: free)
        asked = Plan("m", CPU, weights, per_token, slots, context)
        if asked.total <= free:
            check([asked])
            return
        with pytest.raises(ModelError) as error:
            check([asked])
        found = re.search(r"slots=(\d+)(?:, context=(\d+))? would fit", str(error.value))
        if found:
            check([Plan("m", CPU, weights, per_token, int(found[1]), int(found[2] or context))])
        else:
            assert "take a narrower dtype" in str(error.value) and weights + 256 * per_token > free


def test_where_free_memory_is_unknown_nothing_is_refused(free: object) -> None:
    free(None)  # type: ignore[operator]
    check([Plan("m", CPU, 10**18, 1, 1, 1)])


def test_a_containers_limit_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "meminfo").write_text("MemTotal: 99 kB\nMemAvailable:   5000 kB\n")
    monkeypatch.setattr(plan, "MEMINFO", tmp_path / "meminfo")
    monkeypatch.setattr(plan, "CGROUP", tmp_path)
    assert plan.available(CPU) == 5000 * 1024
    (tmp_path / "memory.max").write_text("max\n")
    (tmp_path / "memory.current").write_text("1000\n")
    assert plan.available(CPU) == 5000 * 1024
    (tmp_path / "memory.max").write_text("4000\n")
    assert plan.available(CPU) == 3000
    monkeypatch.setattr(plan, "MEMINFO", tmp_path / "nowhere")
    assert plan.available(CPU) is None


def test_the_command_line_tells_the_plan_on_standard_error_in_one_line(target_folder: Path) -> None:
    args = ["generate", str(target_folder), "the fox", "-n", "2", "--context", "64"]
    told = CliRunner().invoke(app, args)
    line = told.stderr.splitlines()[0]
    assert re.match(r"\S+ on cpu: weights \d+ kB \+ KV of 1 x 64 tokens \d+ kB; .* in all, .* free on cpu", line)
    assert "weights" not in told.stdout
    assert "weights" not in CliRunner().invoke(app, [*args, "--quiet"]).stderr
