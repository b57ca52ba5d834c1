"""Quantised weights, experts and a smaller head in a GPU's passes, on a CPU with references in place of kernels."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from semspec.model import ModelRunner
from semspec.model.config import Shape
from semspec.model.experts import Experts
from semspec.model.limited_head import LOWEST
from semspec.model.quantised import QuantisedLinear
from semspec.model.transformer import Transformer
from semspec.model.weights import Checkpoint
from semspec.types import Decode, Sampling, Score
from tests.checkpoints import make_model, save
from tests.model.test_graph_runner import close, text, with_graphs
from tests.quantised_checkpoints import make

IDS = list(range(0, 320, 3))


@pytest.mark.parametrize("form", ["fp8 block, bf16", "awq", "nvfp4"])
@pytest.mark.parametrize("family", ["qwen3", "qwen3-moe"])
def test_fused_passes_take_weights_as_they_are_stored(form: str, family: str, tmp_path: Path) -> None:
    more = {"moe_intermediate_size": 64, "num_experts": 3} if family == "qwen3-moe" else {}
    folder = make(save(make_model(family, **more), tmp_path / "s"), tmp_path / "m", form) / "quantised"
    with Checkpoint(folder) as checkpoint:
        made = Transformer(Shape.read(folder), checkpoint, torch.device("cpu"), torch.float32, "stored")
    plain = ModelRunner(made, 4, 96)
    fused = with_graphs(plain)
    slots = [runner.acquire() for runner in (plain, fused)]
    want, found = (
        runner.score([Score(runner, slot, text(2, 9), 9)])[0].logits
        for runner, slot in zip((plain, fused), slots, strict=True)
    )
    close(found, want)
    last = made.layers[-1].ffn
    if family == "qwen3-moe":
        assert isinstance(last, Experts) and isinstance(last.gate_up, QuantisedLinear)


@pytest.mark.parametrize("dtype", ["float32", "fp8"])
def test_fused_passes_take_a_smaller_head(dtype: str, tmp_path: Path) -> None:
    folder = save(make_model("qwen3"), tmp_path / "m")
    whole, some = (
        ModelRunner.load(folder, device="cpu", dtype=dtype, slots=4, context=96, head_ids=ids) for ids in (None, IDS)
    )
    rows = []
    for runner in (whole, with_graphs(some)):
        slot = runner.acquire()
        rows.append(runner.score([Score(runner, slot, text(2, 9), 9)])[0].logits)
    close(rows[1][:, IDS], rows[0][:, IDS])
    rest = [i for i in range(320) if i not in IDS]
    assert bool((rows[1][:, rest] == LOWEST).all())
    for sampling in (Sampling(), Sampling(temperature=1.0)):
        drawn = runner.decode([Decode(runner, slot, [5], 12, sampling, 8)])[0].tokens
        assert set(drawn) <= set(IDS)
