"""What the exporter writes, read by the published computation in plain Python: trained heads, not random ones."""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors.torch import load_file

from semspec.head_fit.export import export
from semspec.head_fit.texts import Text
from semspec.model import ModelRunner
from semspec.model.heads.eagle import EagleHead
from semspec.model.heads.runner import HeadRunner
from tests import heads
from tests.checkpoints import make_model, save
from tests.model.test_heads import TEXT, greedy, states_of
from tests.test_head_fit import trainer


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> ModelRunner:
    return ModelRunner.load(save(make_model("llama3"), tmp_path_factory.mktemp("target")), device="cpu", context=128)


def exported(target: ModelRunner, folder: Path, vocab: int | None, monkeypatch: pytest.MonkeyPatch) -> heads.Head:
    """A head that has learnt to count, as the reference wants it."""
    texts = [Text([(start + i) % 9 + 20 for i in range(18 + start % 3)], 4) for start in range(24)]
    made = trainer(target, texts, folder, vocab=vocab)
    made.run(lambda done, total: None)
    export(made, folder, "x", target.vocab_size, 128, [0.5], "counting")
    size = made.module.size
    monkeypatch.setattr(heads, "EPS", size.eps)
    monkeypatch.setattr(heads, "THETA", size.theta)
    stored = load_file(folder / "model.safetensors")
    tensors = {
        name.replace("midlayer.", "layers.0."): x.float() if x.is_floating_point() else x for name, x in stored.items()
    }
    return heads.Head(folder, tensors, size.heads, size.kv_heads, size.head_dim, False, False, True)


@pytest.mark.parametrize("vocab", [40, None])
def test_an_exported_head_is_what_the_published_computation_reads(
    vocab: int | None, target: ModelRunner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    head = exported(target, tmp_path, vocab, monkeypatch)
    assert ("d2t" in head.tensors) == (vocab is not None)
    runner = HeadRunner(EagleHead.load(tmp_path, target), target.vocab_size, target.max_seq_len)
    hidden = states_of(target, TEXT, tuple(sorted(set(runner.layers))))
    states = [hidden[layer] for layer in runner.layers]
    for length in (3, 7, len(TEXT)):
        slot = runner.acquire()
        runner.observe(slot, {layer: h[: length - 1] for layer, h in hidden.items()})
        tokens, logits = greedy(runner, slot, TEXT[:length], 5)
        expected, rows = heads.drafted(head, TEXT[:length], states, 5, target.transformer.embedding)
        assert tokens == expected
        heads.close(logits, rows)
        runner.release(slot)


def test_a_head_that_is_exported_with_another_norm_would_be_noticed(
    target: ModelRunner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """A planted fault of the exporter, one part in a thousand."""
    head = exported(target, tmp_path, 40, monkeypatch)
    runner = HeadRunner(EagleHead.load(tmp_path, target), target.vocab_size, target.max_seq_len)
    hidden, slot = states_of(target, TEXT, tuple(sorted(set(runner.layers)))), runner.acquire()
    runner.observe(slot, {layer: h[:-1] for layer, h in hidden.items()})
    _, logits = greedy(runner, slot, TEXT, 2)
    head.tensors["layers.0.hidden_norm.weight"] = head.tensors["layers.0.hidden_norm.weight"] * 1.001
    states = [hidden[layer] for layer in runner.layers]
    _, rows = heads.drafted(head, TEXT, states, 2, target.transformer.embedding)
    with pytest.raises(AssertionError, match="of the standard deviation"):
        heads.close(logits, rows)
