"""An entailment classifier as it is published: DeBERTa-v2 whose tokenizer is a SentencePiece model."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import sentencepiece
import torch
from transformers import DebertaV2Config, DebertaV2ForSequenceClassification

from semspec.errors import ModelError
from semspec.probe_fit.cluster import SENTENCES, Source, make
from tests.probe_fit.test_chain import command

SPECIAL = {"pad": "[PAD]", "bos": "[CLS]", "eos": "[SEP]", "unk": "[UNK]"}


@pytest.fixture(scope="module")
def deberta(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random one: config.json, model.safetensors, spm.model, and no tokenizer.json."""
    folder = tmp_path_factory.mktemp("deberta")
    names = {f"{name}_id": i for i, name in enumerate(SPECIAL)} | {f"{k}_piece": v for k, v in SPECIAL.items()}
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(list(SENTENCES) * 20), model_prefix=str(folder / "spm"), vocab_size=60,
        hard_vocab_limit=False, minloglevel=2, **names,
    )  # fmt: skip
    (folder / "spm.vocab").unlink()
    pieces = sentencepiece.SentencePieceProcessor(model_file=str(folder / "spm.model")).get_piece_size()
    labels = {0: "CONTRADICTION", 1: "NEUTRAL", 2: "ENTAILMENT"}
    torch.manual_seed(0)
    config = DebertaV2Config(vocab_size=pieces + 1, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=16, relative_attention=True, pos_att_type=["p2c", "c2p"], type_vocab_size=0, id2label=labels)  # noqa: E501  # fmt: skip
    DebertaV2ForSequenceClassification(config).save_pretrained(folder)
    (folder / "tokenizer_config.json").write_text(json.dumps({"do_lower_case": False, "vocab_type": "spm"}))
    assert {path.suffix for path in folder.iterdir()} == {".json", ".safetensors", ".model"}
    assert not (folder / "tokenizer.json").exists()
    return folder


def test_it_loads_as_installed_and_sorts_two_sentences(deberta: Path) -> None:
    clusterer = make(f"nli:model={deberta},order=released", Source(device="cpu"))
    clusterer.try_out()
    assert clusterer.cluster([*SENTENCES, SENTENCES[0]])[2] == 0, "equal texts mean the same"


@pytest.mark.parametrize(
    ("missing", "said"),
    [
        ("model.safetensors", "no safetensors: convert it once"),
        ("spm.model", "reads every sentence alike; are its files complete?"),
        ("config.json", "without a config.json"),
    ],
)
def test_what_is_missing_is_told_before_anything_is_sampled(
    deberta: Path, tmp_path: Path, missing: str, said: str,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    broken = shutil.copytree(deberta, tmp_path / "broken")
    (broken / missing).unlink()
    where = ("--clusters", f"nli:model={broken}", "--out", tmp_path / "out", "--device", "cpu")
    code, _, err = command(monkeypatch, capsys, "probe", "fit", "pocket", *where)
    assert code != 0 and said in " ".join(err.split()) and "Traceback" not in err
    assert not (tmp_path / "out").exists()


def test_without_sentencepiece_the_extra_is_named(deberta: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*_: object, **__: object) -> None:
        raise ImportError("requires the SentencePiece library")

    monkeypatch.setattr("semspec.text.encoder.AutoTokenizer.from_pretrained", missing)
    with pytest.raises(ModelError, match=r"pip install 'semspec\[fit\]'"):
        make(f"nli:model={deberta}", Source(device="cpu")).try_out()


def test_a_tokenizer_that_reads_all_sentences_alike_is_refused(deberta: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Blind:
        def __call__(self, text: str) -> dict[str, list[int]]:
            return {"input_ids": [1, 3, 3, 2]}

    monkeypatch.setattr("semspec.text.encoder.AutoTokenizer.from_pretrained", lambda *_: Blind())
    with pytest.raises(ModelError, match="reads every sentence alike"):
        make(f"nli:model={deberta}", Source(device="cpu")).try_out()
