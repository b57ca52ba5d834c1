"""A draft model's head over some tokens: their logits are those of the whole head, and no answer changes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import semspec
from semspec.cli.main import app
from semspec.errors import BadRequest
from semspec.model import ModelRunner
from semspec.model.limited_head import LOWEST, LimitedHead
from semspec.model.quantised import quantise
from semspec.text.frequent import head_ids, most_frequent
from semspec.types import Score
from tests.checkpoints import VOCAB, make_model, make_tokenizer, save

IDS = [0, 3, 4, 9, 100, 250, 299, 319]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "fp8", "int8", "int4"])
def test_logits_are_those_of_the_whole_head_where_it_has_any(dtype: str, tmp_path: Path) -> None:
    folder = save(make_model("llama3.1"), tmp_path / "m")  # tied
    rows = []
    for ids in (None, IDS):
        runner = ModelRunner.load(folder, device="cpu", dtype=dtype, slots=1, context=64, head_ids=ids)
        slot = runner.acquire()
        rows += [runner.score([Score(runner, slot, part, 1)])[0].logits for part in ([5, 6, 7, 8, 9, 1, 2], [4])]
    for whole, some in zip(rows[:2], rows[2:], strict=True):
        assert some.shape == whole.shape == (1, VOCAB)
        torch.testing.assert_close(some[:, IDS], whole[:, IDS], atol=0.02, rtol=0.02)
        rest = [i for i in range(VOCAB) if i not in IDS]
        assert bool((some[:, rest] == torch.tensor(LOWEST, dtype=some.dtype)).all())
        probabilities = some.float().softmax(-1)
        assert not probabilities[:, rest].any() and torch.isfinite(probabilities * some.float().log_softmax(-1)).all()


def test_a_head_writes_into_memory_that_is_given() -> None:
    head = LimitedHead.picked(quantise(torch.randn(20, 16), "fp8"), None, [1, 5], 20)
    x, out = torch.randn(3, 16), torch.full((3, 20), 7.0)
    assert head.write(x, out) is out and torch.equal(out, head(x))


def test_a_head_of_its_own_in_int8_is_made_smaller(tmp_path: Path) -> None:
    folder = save(make_model("llama3"), tmp_path / "m")  # not tied
    small, whole = (
        ModelRunner.load(folder, device="cpu", dtype="int8", slots=1, context=64, head_ids=ids) for ids in (IDS, None)
    )
    x = torch.randn(3, whole.shape.width, generator=torch.Generator().manual_seed(1))
    found, expected = small.transformer.head(x), whole.transformer.head(x)
    torch.testing.assert_close(found[:, IDS], expected[:, IDS], atol=1e-4, rtol=1e-4)
    assert small.transformer.head.nbytes < whole.transformer.head.nbytes


@pytest.mark.parametrize("verifier", ["exact", "sampling", "block"])
def test_answers_stay_lossless(verifier: str, target_folder: Path, draft_folder: Path) -> None:
    pair = semspec.load(target_folder, draft_folder, device="cpu", slots=2, draft_vocab=150)
    assert pair.draft is not None
    options = {"max_new_tokens": 80, "ignore_eos": True, "temperature": 0.7 * (verifier != "exact"), "seed": 3}
    options |= {"num_draft_tokens": 4}
    drafted = pair.generate("the quick brown", verifier=verifier, **options)
    assert drafted.lossless and drafted.stats.drafted > 0
    if verifier == "exact":
        assert drafted.tokens == pair.generate("the quick brown", verifier="none", **options).tokens


def test_the_same_model_may_be_its_own_draft_with_a_smaller_head(target_folder: Path) -> None:
    pair = semspec.load(target_folder, target_folder, device="cpu", slots=2, draft_vocab=150)
    assert isinstance(pair.draft.transformer.head, LimitedHead)  # type: ignore[union-attr]
    assert not isinstance(pair.target.transformer.head, LimitedHead)  # type: ignore[union-attr]
    assert pair.draft.transformer.layers is pair.target.transformer.layers  # type: ignore[union-attr]


def test_frequent_tokens_are_counted_by_a_command(draft_folder: Path, tmp_path: Path) -> None:
    text, out = tmp_path / "text.txt", tmp_path / "ids.json"
    text.write_text("the lazy fox jumps over the lazy fox " * 3)
    made = CliRunner().invoke(app, ["vocabulary", str(draft_folder), str(text), "--size", "12", "--out", str(out)])
    assert made.exit_code == 0, made.output
    ids = json.loads(out.read_text())["ids"]
    tokenizer = make_tokenizer()
    assert len(ids) == 12 and set(tokenizer(" lazy fox")["input_ids"]) <= set(ids) and tokenizer.eos_token_id in ids
    assert head_ids(out, tokenizer, VOCAB) == ids
    missing = CliRunner().invoke(app, ["vocabulary", str(draft_folder), str(tmp_path / "x"), "--out", str(out)])
    assert missing.exit_code != 0


def test_ids_that_cannot_be_are_refused(tmp_path: Path) -> None:
    tokenizer, file = make_tokenizer(), tmp_path / "ids.json"
    assert head_ids("20", tokenizer, VOCAB) == most_frequent(tokenizer, (), 20, VOCAB)
    for content in ("{", "[]", '{"ids": []}', '{"ids": [1, 320]}', '{"ids": [-1]}', '{"ids": "12"}', '{"ids": [true]}'):
        file.write_text(content)
        with pytest.raises(BadRequest, match=r"draft_vocab .*ids\.json"):
            head_ids(file, tokenizer, VOCAB)
    for number in (0, 321, "0"):
        with pytest.raises(BadRequest, match=r"a head of .* tokens; give 1 to 320"):
            head_ids(number, tokenizer, VOCAB)
    with pytest.raises(BadRequest, match="is no number and no file"):
        head_ids(tmp_path / "none.json", tokenizer, VOCAB)


def test_a_pair_without_a_draft_model_has_no_head_to_limit(target_folder: Path) -> None:
    with pytest.raises(BadRequest, match="draft_vocab is for a draft model"):
        semspec.load(target_folder, device="cpu", draft_vocab=20)
