"""Quantised checkpoints of families that only transformers can run: dequantised while they are loaded."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from semspec.errors import ModelError
from semspec.model import Source
from semspec.model.hf_runner import TransformersRunner
from semspec.model.weights import Checkpoint
from semspec.types import Score
from tests import quantised_checkpoints as made
from tests.checkpoints import SMALL, edit_config, save
from tests.model.test_hf_runner import RECURRENT, build, text

MIXTURE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True}
EXPERTS = ("gate_up_proj", "down_proj")


@pytest.fixture(scope="module")
def recurrent(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(build("qwen3_5_text"), tmp_path_factory.mktemp("plain"))


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    config = AutoConfig.for_model("qwen3_5_moe_text", **RECURRENT["qwen3_5_text"] | MIXTURE)
    return save(AutoModelForCausalLM.from_config(config).float().eval(), tmp_path_factory.mktemp("mixture"))


def logits(folder: Path) -> torch.Tensor:
    runner = Source.find(folder).load("cpu", "float32", 1, 64)
    assert isinstance(runner, TransformersRunner)
    return runner.score([Score(runner, runner.acquire(), text(1, 30), 30)])[0].logits


@pytest.mark.parametrize("form", sorted(made.FORMATS))
def test_a_quantised_checkpoint_gives_the_logits_of_what_it_stands_for(
    form: str, recurrent: Path, tmp_path: Path
) -> None:
    both = made.make(recurrent, tmp_path / "it", form)
    found, expected = logits(both / "quantised"), logits(both / "plain")
    assert expected.std() > 0.3
    torch.testing.assert_close(found, expected, atol=2e-3, rtol=1e-3)


def test_experts_stored_one_by_one_are_found(mixture: Path, tmp_path: Path) -> None:
    stored = load_file(mixture / "model.safetensors")
    if any(name.endswith("experts.gate_up_proj") for name in stored):  # as transformers keeps them
        for name in [n for n in stored if n.endswith(tuple(f"experts.{e}" for e in EXPERTS))]:
            parts = {"gate_proj": 0, "up_proj": 1} if name.endswith("gate_up_proj") else {"down_proj": 0}
            for expert, matrix in enumerate(stored.pop(name)):
                for part, half in zip(parts, matrix.chunk(len(parts)), strict=True):
                    stored[f"{name.rpartition('.')[0]}.{expert}.{part}.weight"] = half.contiguous()
        save_file(stored, mixture / "model.safetensors", metadata={"format": "pt"})
    assert any(".experts.3.up_proj.weight" in name for name in stored)
    both = made.make(mixture, tmp_path / "it", "fp8 block, f32")
    torch.testing.assert_close(logits(both / "quantised"), logits(both / "plain"), atol=2e-3, rtol=1e-3)


def test_the_plan_counts_plain_weights(recurrent: Path, tmp_path: Path) -> None:
    both = made.make(recurrent, tmp_path / "it", "pack-quantized, int4")
    plans = [Source.find(both / name).plan("cpu", "float32", 1, 64) for name in ("quantised", "plain")]
    assert plans[0].weights == plans[1].weights > 0


def test_what_closing_raises_does_not_hide_what_failed(recurrent: Path) -> None:
    """transformers' threads read on after the first error, and a file that is read cannot be closed."""

    def busy() -> None:
        raise RuntimeError("Already borrowed")

    def load(error: Exception | None) -> None:
        with Checkpoint(recurrent) as checkpoint:
            checkpoint._stack.callback(busy)
            if error is not None:
                raise error

    with pytest.raises(ModelError, match="the first error"):
        load(ModelError("the first error"))
    with pytest.raises(RuntimeError, match="borrowed"):
        load(None)


def damaged(folder: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> str:
    made.rewritten(folder, change)
    with pytest.raises(ModelError) as error:
        logits(folder)
    return str(error.value)


def test_a_damaged_twin_is_refused_by_name(recurrent: Path, tmp_path: Path) -> None:
    folder = made.make(recurrent, tmp_path / "it", "fp8 block, f32") / "quantised"
    (name,) = made.named(load_file(folder / "model.safetensors"), "mlp.up_proj.weight_scale_inv")
    assert name in damaged(folder, lambda tensors: tensors.update({name: tensors[name][:-1].contiguous()}))
    assert name in damaged(folder, lambda tensors: tensors.__delitem__(name))


@pytest.mark.parametrize("form", ["fp8 block, f32", "awq", "nvfp4"])
def test_codes_that_are_no_matrix_are_refused_by_name(form: str, recurrent: Path, tmp_path: Path) -> None:
    folder = made.make(recurrent, tmp_path / "it", form) / "quantised"
    codes = {"awq": "qweight", "nvfp4": "weight_packed"}.get(form, "weight")
    name = "model.layers.1.self_attn.o_proj." + codes
    said = damaged(folder, lambda tensors: tensors.update({name: tensors[name].flatten()}))
    assert name in said and "where a quantised matrix has two dimensions" in said


def test_codes_without_a_word_on_how_to_read_them_are_refused(recurrent: Path, tmp_path: Path) -> None:
    folder = made.make(recurrent, tmp_path / "it", "fp8 block, f32") / "quantised"
    edit_config(folder, quantization_config={"quant_method": "mxfp4"}, model_type="qwen3_5_text")
    with pytest.raises(
        ModelError, match="quantised \\(mxfp4\\), which is not supported: it is the format of 'gpt_oss'"
    ):
        Source.find(folder)
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.0.odd"
    save_file(tensors | {name: torch.ones(4, dtype=torch.int8)}, folder / "model.safetensors")
    edit_config(folder, quantization_config={"quant_method": "fp8", "weight_block_size": [48, 40]})
    with pytest.raises(ModelError, match=f"{name} is stored as I8, and the config does not say how that is read"):
        logits(folder)


@pytest.fixture
def gpt_oss(tmp_path: Path) -> Path:
    """As it is published: experts in blocks of four bits with exponents, everything else plain."""
    torch.manual_seed(0)
    kinds = {"layer_types": ["sliding_attention", "full_attention"], "num_hidden_layers": 2, "sliding_window": 16}
    own: dict[str, Any] = {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 64, "head_dim": 16}
    config = AutoConfig.for_model("gpt_oss", **SMALL | own | kinds | {"tie_word_embeddings": False})
    folder = save(AutoModelForCausalLM.from_config(config).float().eval(), tmp_path / "plain")
    plain = load_file(folder / "model.safetensors")
    stored = dict(plain)
    for name in [n for n in plain if n.endswith(EXPERTS)]:
        experts, inputs, outputs = plain[name].shape
        blocks = torch.randint(256, [experts, outputs, inputs // 32, 16], dtype=torch.uint8)
        scales = torch.randint(122, 126, [experts, outputs, inputs // 32], dtype=torch.uint8)
        del stored[name]
        stored |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        plain[name] = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32).contiguous()
    save_file(plain, folder / "model.safetensors", metadata={"format": "pt"})
    quantised = save(AutoModelForCausalLM.from_config(config), tmp_path / "quantised")
    save_file(stored, quantised / "model.safetensors", metadata={"format": "pt"})
    edit_config(quantised, quantization_config={"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers"]})
    return tmp_path


def test_gpt_oss_as_it_is_published(gpt_oss: Path) -> None:
    found, expected = logits(gpt_oss / "quantised"), logits(gpt_oss / "plain")
    assert expected.std() > 0.3
    torch.testing.assert_close(found, expected, atol=2e-3, rtol=1e-3)


def test_gpt_oss_with_a_wrong_shape_is_refused(gpt_oss: Path) -> None:
    def shorten(tensors: dict[str, torch.Tensor]) -> None:
        name = next(n for n in tensors if n.endswith("gate_up_proj_scales"))
        tensors[name] = tensors[name][..., :-1].contiguous()

    said = damaged(gpt_oss / "quantised", shorten)
    assert "gate_up_proj_scales" in said and "where one scale is for 32 weights; the checkpoint is damaged" in said
