"""One-byte weights: near the float model, and the same for a row whatever stands beside it."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

import semspec
from semspec.model import ModelRunner
from semspec.model.int8 import Int8Linear
from semspec.types import Score
from tests.checkpoints import make_model, save


def noise(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def test_a_product_is_near_the_float_one() -> None:
    weight, bias = noise(96, 200) * noise(96, 1, seed=1).exp(), noise(96)
    x = noise(7, 200, seed=2) * noise(7, 1, seed=3).exp()
    found, exact = Int8Linear(weight, bias)(x), F.linear(x, weight, bias)
    assert ((found - exact).norm(dim=1) < 0.02 * exact.norm(dim=1)).all()
    assert not torch.equal(found, exact)


def test_nothing_times_anything_is_nothing() -> None:
    assert torch.equal(Int8Linear(noise(8, 16))(torch.zeros(2, 16)), torch.zeros(2, 8))
    assert torch.equal(Int8Linear(torch.zeros(8, 16))(noise(2, 16)), torch.zeros(2, 8))


@given(st.integers(1, 40), st.data())
def test_what_a_row_gives_does_not_depend_on_its_company(rows: int, data: st.DataObject) -> None:
    linear = Int8Linear(noise(33, 48))
    x = noise(rows, 48, seed=rows) * 10 ** (3 * noise(rows, 1, seed=4))
    begin = data.draw(st.integers(0, rows - 1))
    end = data.draw(st.integers(begin + 1, rows))
    assert torch.equal(linear(x[begin:end]), linear(x)[begin:end])


@pytest.mark.parametrize("family", ["llama3.1", "qwen3-moe", "gemma3"])
def test_a_model_is_near_itself_in_float32(family: str, tmp_path: Path) -> None:
    folder = save(make_model(family), tmp_path / "m")
    tokens = torch.randint(300, [40], generator=torch.Generator().manual_seed(1)).tolist()
    logits = []
    for dtype in ("float32", "int8"):
        runner = ModelRunner.load(folder, device="cpu", dtype=dtype, slots=1, context=64)
        logits.append(runner.score([Score(runner, runner.acquire(), tokens, 40)])[0].logits)
    exact, found = logits
    assert not torch.equal(exact, found)
    apart = torch.nn.functional.cosine_similarity(exact, found, dim=-1)
    assert apart.median() > 0.98


@pytest.mark.parametrize("family", ["llama3", "qwen3", "gemma3"])
def test_logits_are_the_same_to_the_last_bit_however_a_text_is_cut_into_passes(family: str, tmp_path: Path) -> None:
    """Float32 is not, and rounding would make the difference large; see Transformer.attention_dtype."""
    folder = save(make_model(family), tmp_path / "m")
    runner = ModelRunner.load(folder, device="cpu", dtype="int8", slots=2, context=128)
    tokens = torch.randint(300, [100], generator=torch.Generator().manual_seed(1)).tolist()
    texts = []
    for cuts in ([0, 30, *range(31, 101)], [0, 38, 47, 52, 53, 80, 100]):
        slot = runner.acquire()
        pieces = [tokens[a:b] for a, b in pairwise(cuts)]
        texts.append(torch.cat([runner.score([Score(runner, slot, p, len(p))])[0].logits for p in pieces]))
    assert torch.equal(*texts)


def test_drafts_are_lossless_for_the_model_in_int8(target_folder: Path, draft_folder: Path) -> None:
    pair = semspec.load(target_folder, draft_folder, device="cpu", dtype="int8", slots=2)
    options = {"max_new_tokens": 120, "ignore_eos": True}
    plain, drafted = (pair.generate("the quick brown", verifier=v, **options) for v in ("none", "exact"))
    assert drafted.tokens == plain.tokens and drafted.stats.accepted > 0
