"""One token at a time in NumPy: the same numbers, in the same cache, wherever it is taken."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from semspec.model import ModelRunner, cpu_gemm
from semspec.model.numpy_decoder import MAX_TOKENS, NumpyDecoder
from semspec.types import Score
from tests.checkpoints import FAMILIES, VOCAB, make_model, save

DENSE = [name for name in FAMILIES if name not in ("qwen3-moe", "mixtral")]


def load(name: str, folder: Path) -> ModelRunner:
    return ModelRunner.load(save(make_model(name), folder), device="cpu", slots=2, context=128)


def read(runner: ModelRunner, slot: int, tokens: list[int], keep: int = 0) -> tuple[Tensor, dict[int, Tensor]]:
    layers = tuple(range(runner.num_layers + 1))
    rows = runner.score([Score(runner, slot, tokens, keep or len(tokens), layers)])[0]
    return rows.logits, rows.hidden


def near(found: Tensor, exact: Tensor) -> None:
    """By size: tiny models of large random weights have some numbers in the hundreds."""
    assert found.shape == exact.shape
    assert (found - exact).norm() <= 1e-5 * exact.norm()


def text(length: int) -> list[int]:
    return torch.randint(VOCAB, [length], generator=torch.Generator().manual_seed(length)).tolist()


@pytest.mark.parametrize("name", DENSE)
def test_one_by_one_is_as_all_at_once(name: str, tmp_path: Path) -> None:
    runner = load(name, tmp_path)
    assert runner.numpy_decoder is not None
    tokens = text(40)  # beyond the window of those that have one
    once, again = runner.acquire(), runner.acquire()
    logits, hidden = read(runner, once, tokens)
    for i, token in enumerate(tokens):
        found, states = read(runner, again, [token])
        near(found[0], logits[i])
        for layer, state in states.items():
            near(state[0], hidden[layer][i])
    for stored in (runner.cache.keys, runner.cache.values):
        near(stored[:, again, :, :40], stored[:, once, :, :40])


@pytest.mark.parametrize(("count", "keep"), [(n, k) for n in range(1, MAX_TOKENS + 1) for k in range(1, n + 1)])
def test_a_few_tokens_after_others(count: int, keep: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = load("llama3.1", tmp_path)
    runner = ModelRunner(whole.transformer, 2, whole.max_seq_len, vocab=VOCAB - 7)
    prefix, tokens = text(20), text(count)
    taken: list[int] = []
    forward = NumpyDecoder.forward
    monkeypatch.setattr(NumpyDecoder, "forward", lambda self, *args: (taken.extend(args[0]), forward(self, *args))[1])
    slots = [runner.acquire(), runner.acquire()]
    for slot in slots:
        read(runner, slot, prefix)
    found, states = read(runner, slots[0], tokens, keep)
    assert taken == tokens
    runner.numpy_decoder = None
    logits, hidden = read(runner, slots[1], tokens, keep)
    assert found.shape == logits.shape == (keep, VOCAB - 7)
    near(found, logits)
    for layer in hidden:
        near(states[layer], hidden[layer])


def test_hidden_states_are_not_overwritten(tmp_path: Path) -> None:
    runner = load("llama3.1", tmp_path)
    slot = runner.acquire()
    _, states = read(runner, slot, [5])
    before = {layer: state.clone() for layer, state in states.items()}
    weights = runner.transformer.embedding.clone()
    read(runner, slot, [6])
    for layer, state in states.items():
        torch.testing.assert_close(state, before[layer], atol=0, rtol=0)
    assert torch.equal(runner.transformer.embedding, weights), "the embedding is looked up, not written to"


def test_batches_mixtures_and_large_models_are_not_decoded_in_numpy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = load("llama3.1", tmp_path / "a")
    decoder = NumpyDecoder.of(runner.transformer, runner.cache)
    assert decoder is not None
    one = Score(runner, 0, [1], 1)
    assert decoder.supports([one]) and not decoder.supports([one, one])
    assert not decoder.supports([Score(runner, 0, [1] * (MAX_TOKENS + 1), 1)])
    assert not decoder.supports([Score(runner, 0, [1, 2], 0)]), "nobody wants a row, so nothing waits for it"
    mixture = load("mixtral", tmp_path / "b")
    assert mixture.numpy_decoder is None
    monkeypatch.setattr(cpu_gemm, "CPU_CACHE_BYTES", 1000)
    assert NumpyDecoder.of(runner.transformer, runner.cache) is None


def test_strange_numbers_make_no_noise(tmp_path: Path) -> None:
    """An activation of a very negative number is 0 by way of an overflow, which nobody should be told of."""
    runner = load("llama3.1", tmp_path)
    runner.transformer.layers[0].attention_norm.mul_(1e6)
    slot = runner.acquire()
    with np.errstate(all="raise", under="ignore"):
        logits, _ = read(runner, slot, [3])
    assert not logits.isnan().any()
