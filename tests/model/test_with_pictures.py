"""Models that also read pictures, given none: their text part runs as its family does, from any layout of files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForImageTextToText, PreTrainedModel

from semspec.errors import ModelError
from semspec.model import ModelRunner, Source
from semspec.model.hf_runner import TransformersRunner
from semspec.types import Score
from tests.checkpoints import SMALL, edit_config, save

TEXT = SMALL | {"eos_token_id": 3}
PARTS = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}
TOWER = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "num_heads": 2}
TOWER |= {"image_size": 16, "patch_size": 8, "depth": 1, "out_hidden_size": 64, "embed_dim": 32}
CLIP = TOWER | {"model_type": "clip_vision_model"}
TEXTS: dict[str, dict[str, Any]] = {
    "gemma3": TEXT | {"head_dim": 16, "sliding_window": 24, "query_pre_attn_scalar": 20},
    "mistral3": TEXT | {"model_type": "mistral", "head_dim": 32, "sliding_window": None},
    "qwen2_5_vl": TEXT | {"rope_parameters": PARTS},
    "qwen3_vl": TEXT | {"rope_parameters": PARTS | {"mrope_interleaved": True}, "head_dim": 16},
    "smolvlm": TEXT | {"model_type": "llama"},
}
TOWERS = {"mistral3": {"model_type": "pixtral", "head_dim": 16}}
LAYOUTS = {"model.": "model.language_model.", "lm_head.": "lm_head."}  # as files are written today
FORMER = {"model.": "language_model.model.", "lm_head.": "language_model.lm_head."}  # and as most were published


def build(kind: str, **changes: Any) -> PreTrainedModel:
    torch.manual_seed(0)
    more = {"tie_word_embeddings": False} | changes
    tower = TOWER | TOWERS.get(kind, {})
    config = AutoConfig.for_model(kind, text_config=TEXTS[kind], vision_config=tower, **more)
    model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32).eval()
    torch.nn.init.normal_(model.lm_head.weight, 0, 0.3)
    return model


def rename(folder: Path, names: dict[str, str]) -> None:
    """The tensors of the text by other names; what is read are prefixes."""
    path, tensors = folder / "model.safetensors", load_file(folder / "model.safetensors")
    for old, new in names.items():
        tensors = {new + n.removeprefix(old) if n.startswith(old) else n: t for n, t in tensors.items()}
    save_file(tensors, path, {"format": "pt"})


def logits(folder: Path, tokens: list[int]) -> torch.Tensor:
    runner = Source.find(folder).load("cpu", "float32", 1, 128)
    assert isinstance(runner, ModelRunner)
    return runner.score([Score(runner, runner.acquire(), tokens, len(tokens))])[0].logits


def expected(model: PreTrainedModel, tokens: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        rows = model(torch.tensor([tokens])).logits[0]
    assert rows.std() > 0.3
    return rows


@pytest.mark.parametrize("kind", TEXTS)
def test_the_text_part_runs_natively(kind: str, tmp_path: Path) -> None:
    model, tokens = build(kind), list(range(5, 65))
    torch.testing.assert_close(logits(save(model, tmp_path), tokens), expected(model, tokens), atol=1e-4, rtol=1e-4)


def test_former_names_of_tensors_are_read(tmp_path: Path) -> None:
    model, tokens = build("gemma3"), list(range(5, 65))
    folder = save(model, tmp_path)
    rename(folder, {LAYOUTS[part]: FORMER[part] for part in LAYOUTS})
    assert "language_model.lm_head.weight" in load_file(folder / "model.safetensors")
    torch.testing.assert_close(logits(folder, tokens), expected(model, tokens), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("tied", [True, False])
def test_whether_the_head_is_the_embedding_is_said_by_the_whole_config(tied: bool, tmp_path: Path) -> None:
    model, tokens = build("mistral3", tie_word_embeddings=tied), list(range(5, 65))
    folder = save(model, tmp_path)
    found = Source.find(folder)
    assert found.shape is not None and found.shape.tied == tied
    torch.testing.assert_close(logits(folder, tokens), expected(model, tokens), atol=1e-4, rtol=1e-4)


def test_precision_and_ends_of_text_may_be_told_for_all_parts(tmp_path: Path) -> None:
    folder = save(build("gemma3"), tmp_path)
    text = TEXTS["gemma3"] | {"model_type": "gemma3_text"}  # and no word on precision
    edit_config(folder, eos_token_id=[1, 106], dtype="bfloat16", text_config=text)
    source = Source.find(folder)
    assert source.stop == {1, 3, 106} and source.shape is not None and source.shape.dtype == torch.bfloat16
    edit_config(folder, text_config=text | {"final_logit_softcapping": 30.0})  # which only transformers knows
    source = Source.find(folder)
    assert source.stop == {1, 3, 106} and source.shape is None and source.config.dtype == torch.bfloat16


def test_others_run_through_transformers(tmp_path: Path) -> None:
    torch.manual_seed(0)
    text = TEXT | {"model_type": "olmo"}
    config = AutoConfig.for_model("llava", text_config=text, vision_config=CLIP, tie_word_embeddings=False)
    model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32).eval()
    runner = Source.find(save(model, tmp_path)).load("cpu", "auto", 1, 128)
    assert isinstance(runner, TransformersRunner)
    tokens = list(range(5, 65))
    rows = runner.score([Score(runner, runner.acquire(), tokens, len(tokens))])[0].logits
    torch.testing.assert_close(rows, expected(model, tokens), atol=1e-4, rtol=1e-4)


def test_what_cannot_do_without_pictures_says_so(tmp_path: Path) -> None:
    config = AutoConfig.for_model("llava", text_config=TEXT | {"model_type": "olmo"}, vision_config=CLIP)
    model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32)

    class Blind(type(model)):  # type: ignore[misc]
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            raise ValueError("give pixel_values")

    model.__class__ = Blind
    with pytest.raises(ModelError, match=r"a pass over a text alone.* fails: give pixel_values"):
        TransformersRunner(model, 1, 64)


def test_a_head_of_its_own_is_read_although_the_config_says_tied(tmp_path: Path) -> None:
    """As transformers does, whose weights stay apart where a file has two that differ."""
    model, tokens = build("smolvlm"), list(range(5, 65))
    folder = save(model, tmp_path)
    edit_config(folder, tie_word_embeddings=True)
    again = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()
    torch.testing.assert_close(expected(again, tokens), expected(model, tokens))
    torch.testing.assert_close(logits(folder, tokens), expected(model, tokens), atol=1e-4, rtol=1e-4)
