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


@pytest.mark.parametrize(("family", "dtype"), [(f, "int8") for f in ("llama3.1", "qwen3-moe", "gemma3")])
def test_a_model_is_near_itself_in_float32(family: str, dtype: str, tmp_path: Path) -> None:
    model_is_near_itself(family, dtype, tmp_path, 0.98)


def model_is_near_itself(family: str, dtype: str, folder: Path, least: float) -> None:
    folder = save(make_model(family), folder / "m")
    tokens = torch.randint(300, [40], generator=torch.Generator().manual_seed(1)).tolist()
    logits = []
    for kind in ("float32", dtype):
        runner = ModelRunner.load(folder, device="cpu", dtype=kind, slots=1, context=64)
        logits.append(runner.score([Score(runner, runner.acquire(), tokens, 40)])[0].logits)
    exact, found = logits
    assert not torch.equal(exact, found)
    assert torch.nn.functional.cosine_similarity(exact, found, dim=-1).median() > least


@pytest.mark.parametrize("dtype", ["int8", "int4"])
@pytest.mark.parametrize("family", ["llama3", "qwen3", "gemma3"])
def test_logits_are_the_same_to_the_last_bit_however_a_text_is_cut_into_passes(
    family: str, dtype: str, tmp_path: Path
) -> None:
    """After the same prompt: token by token, in drafts of any length, the prompt with a first draft, and beside another
    sequence. Float32 is not, and rounding would make the difference large; see Precision.attention."""
    folder = save(make_model(family), tmp_path / "m")
    runner = ModelRunner.load(folder, device="cpu", dtype=dtype, slots=6, context=128)
    tokens = torch.randint(300, [100], generator=torch.Generator().manual_seed(1)).tolist()
    texts = []
    other = runner.acquire()
    for beside in (False, True):
        for cuts in (range(40, 101), [40, 48, 57, 62, 63, 90, 100]):
            slot, rows, begin = runner.acquire(), [], 0
            for a, b in pairwise(cuts):
                requests = [Score(runner, slot, tokens[begin:b], b - a)]
                if beside and b - a < 12:
                    requests.append(Score(runner, other, [7, 8][: 1 + b % 2], 1))
                rows.append(runner.score(requests)[0].logits)
                begin = b
            texts.append(torch.cat(rows))
            runner.release(slot)
    assert all(torch.equal(texts[0], text) for text in texts[1:])


@pytest.mark.parametrize("dtype", ["int8", "int4"])
def test_drafts_are_lossless_for_the_model_in_integers(target_folder: Path, draft_folder: Path, dtype: str) -> None:
    pair = semspec.load(target_folder, draft_folder, device="cpu", dtype=dtype, slots=2)
    options = {"max_new_tokens": 120, "ignore_eos": True, "num_draft_tokens": 4}
    plain, drafted = (pair.generate("the quick brown", verifier=v, **options) for v in ("none", "exact"))
    assert drafted.tokens == plain.tokens and drafted.stats.accepted > 0
