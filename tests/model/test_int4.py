"""Four-bit weights on a CPU: torch's product is that of the weights it was given, and models stay near themselves."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from semspec.errors import ModelError
from semspec.model import ModelRunner, Source, int4
from semspec.model.int4 import Int4Linear, cpu_int4
from semspec.model.int8 import Int8Linear
from semspec.model.linear import evenly_spaced
from semspec.model.quantised import QuantisedLinear, quantise
from tests.checkpoints import make_model, save
from tests.model.test_int8 import model_is_near_itself, noise


@pytest.mark.parametrize("zeros", [True, False])
@pytest.mark.parametrize("inputs", [64, 96, 160])
def test_a_product_is_that_of_the_codes(inputs: int, zeros: bool) -> None:
    made = quantise(noise(48, inputs), "int4", noise(48))
    if not zeros:
        made.zeros = None
    linear = cpu_int4(made)
    assert isinstance(linear, Int4Linear)
    x = noise(5, inputs, seed=1)
    exact = F.linear(x, made.dequantised(), made.bias)
    assert ((linear(x) - exact).norm(dim=1) < 0.01 * exact.norm(dim=1)).all()  # bfloat16
    assert torch.equal(torch.cat([linear(row[None]) for row in x]), linear(x))
    assert linear.nbytes < 2 * made.codes.nbytes + 4 * 48 + linear.sample.nbytes


def test_a_matrix_that_torch_does_not_take_is_stored_as_int8() -> None:
    weight = noise(48, 48)
    for odd in (quantise(weight, "int4"), quantise(noise(40, 64), "int4")):  # groups of 16; 40 outputs
        assert isinstance(cpu_int4(odd), Int8Linear)
    blocks = QuantisedLinear("int4", torch.zeros(32, 32, dtype=torch.uint8), torch.ones(2, 2), (16, 32))
    assert isinstance(cpu_int4(blocks), Int8Linear)
    ragged = QuantisedLinear("int4", torch.zeros(32, 48, dtype=torch.uint8), torch.ones(32, 2), (1, 64))
    assert cpu_int4(ragged)(torch.ones(1, 96)).shape == (1, 32), "the last group has 32 inputs only"


def test_a_torch_without_the_product_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    class Without:
        def __getattr__(self, name: str) -> None:
            raise AttributeError(name)

    made = quantise(noise(32, 64), "int4")
    monkeypatch.setattr(int4.torch.ops, "aten", Without())
    with pytest.raises(ModelError, match=r"cannot do int4 on a CPU .* load with dtype int8 or float32"):
        cpu_int4(made)


@pytest.mark.parametrize("family", ["llama3.1", "qwen3-moe", "gemma3"])
def test_a_model_is_near_itself_in_float32(family: str, tmp_path: Path) -> None:
    model_is_near_itself(family, "int4", tmp_path, 0.8)


@pytest.mark.parametrize("dtype", ["fp8", "int8", "int4"])
def test_the_memory_plan_counts_quantised_weights(dtype: str, tmp_path: Path) -> None:
    source = Source.find(save(make_model("llama3.1", vocab_size=2048, hidden_size=128), tmp_path / "m"))
    planned = source.plan("cpu", dtype, 1, 64)
    runner = source.load("cpu", dtype, 1, 64)
    assert isinstance(runner, ModelRunner)
    model = runner.transformer
    linears = [m for layer in model.layers for m in (layer.qkv, layer.out, layer.ffn.gate_up, layer.ffn.down)]  # type: ignore[union-attr]
    linears.append(model.head)
    samples = sum(linear.sample.nbytes for linear in linears)  # kept for a fingerprint: much in so small a model
    taken = sum(linear.nbytes for linear in linears) - samples + model.embedding.nbytes
    assert planned.weights == pytest.approx(taken, rel=0.05)
    assert planned.read is not None and planned.read == pytest.approx(taken - model.embedding.nbytes, rel=0.1)


def test_quantising_keeps_the_fingerprint_of_the_checkpoint(tmp_path: Path) -> None:
    from semspec.probe.identity import fingerprint

    folder = save(make_model("qwen3"), tmp_path / "m")
    kinds = ("float32", "bfloat16", "fp8", "int8", "int4")
    prints = {fingerprint(ModelRunner.load(folder, device="cpu", dtype=kind, slots=1, context=32)) for kind in kinds}
    assert len(prints) == 1
    weight = noise(64, 64)
    assert torch.equal(cpu_int4(quantise(weight, "int4")).sample, evenly_spaced(weight))
