"""Training heads: drafting in training is drafting, an interrupted run ends as any other, exported heads work."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import semspec
from semspec.cli.main import app
from semspec.errors import BadRequest
from semspec.head_fit.export import export, frequent, layers_of, size_of, tau_of
from semspec.head_fit.texts import Text, read
from semspec.head_fit.train import Trainer, Training
from semspec.model import ModelRunner
from semspec.model.heads.eagle import EagleHead
from semspec.model.heads.runner import HeadRunner
from semspec.types import Score
from tests.checkpoints import make_model, save

LAYERS = (1, 2, 2)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(make_model("llama3"), tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def target(folder: Path) -> ModelRunner:
    return ModelRunner.load(folder, device="cpu", slots=3, context=128)


@pytest.fixture(scope="module")
def texts() -> list[Text]:
    """Counting, which is quickly learnt."""
    return [Text([(start + i) % 9 + 20 for i in range(18 + start % 3)], 4) for start in range(24)]


def trainer(target: ModelRunner, texts: list[Text], folder: Path, vocab: int | None = None, **how: object) -> Trainer:
    ids = frequent(texts, target.vocab, vocab)
    training = Training(LAYERS, **{"steps": 6, "batch": 4, "length": 32, "depth": 3, "rate": 3e-3} | how)  # type: ignore[arg-type]
    return Trainer(target, texts, ids, size_of(target, LAYERS, len(ids)), training, folder)


def test_every_step_of_the_training_is_what_the_exported_head_drafts(
    target: ModelRunner, texts: list[Text], tmp_path: Path
):
    """Step j at position i against a draft that began at i - j, with the same tokens, through the runner."""
    made = trainer(target, texts, tmp_path, vocab=40, depth=4)
    for parameter in made.module.parameters():  # bfloat16 keeps these
        parameter.data = parameter.data.bfloat16().float()
    export(made, tmp_path, "x", target.vocab, 128, [0.5], "counting")
    text = texts[1]
    batch = made.batch([text])
    logits = made.module(batch.embedded, batch.states, torch.arange(len(text.tokens) - 2), 4)
    runner = HeadRunner(EagleHead.load(tmp_path, target), target.vocab, target.capacity)
    hidden = made._read([text])[0].states
    for begin in (0, 2, 7):
        slot = runner.acquire()
        runner.observe(slot, {i: h[: begin + 1] for i, h in hidden.items()})
        feed = text.tokens[: begin + 2]
        for j in range(4):
            (rows,) = runner.score([Score(runner, slot, feed, 1)])
            feed = [text.tokens[begin + 2 + j]]
            torch.testing.assert_close(rows.logits[0, made.ids], logits[j][begin + j], atol=2e-4, rtol=1e-4)


def test_rows_that_do_not_count_change_nothing_for_those_that_do(
    target: ModelRunner, texts: list[Text], tmp_path: Path
):
    """Prompts give keys and values only; what a draft reads of its own steps is among the rows."""
    made = trainer(target, texts, tmp_path, depth=4)
    batch = made.batch([Text(texts[2].tokens, 11), Text(texts[0].tokens, 3)])
    every = made.module(batch.embedded, batch.states, torch.arange(batch.embedded[..., 0].numel()), 4)
    assert len(batch.rows) < batch.embedded[..., 0].numel() and not batch.counts.all()
    for j, logits in enumerate(made.logits(batch)):
        counts = batch.counts & (batch.places >= j)
        torch.testing.assert_close(logits[counts], every[j][batch.rows[counts]], atol=1e-5, rtol=1e-4)


def test_states_are_read_once_while_there_is_room(target: ModelRunner, texts: list[Text], tmp_path: Path):
    made = trainer(target, texts, tmp_path)
    first = made._read(texts[:2])
    again = made._read([texts[1], texts[3], texts[0]])
    assert again[2] is first[0] and again[0] is first[1] and again[1] is not first[0]
    made.room = 0
    assert made._read([texts[4]])[0] is not made._read([texts[4]])[0]


def test_the_loss_is_over_the_targets_best_tokens_that_the_head_can_draft(
    target: ModelRunner, texts: list[Text], tmp_path: Path
):
    """Against the whole softmax of a plain pass; a favourite that the head cannot draft is never right."""
    made = trainer(target, texts, tmp_path, vocab=40, depth=2)
    text = texts[0]
    batch = made.batch([text])
    slot = target.acquire()
    (rows,) = target.score([Score(target, slot, text.tokens, len(text.tokens))])
    target.release(slot)
    said = rows.logits.softmax(-1)[batch.places + 1]
    best, tokens = said.topk(batch.likely.shape[1])
    wanted = torch.zeros_like(said).scatter(1, tokens, best)[:, made.ids]
    expected = sum(
        0.8**j * -(wanted * logits.log_softmax(-1))[batch.counts & (batch.places >= j)].sum(-1).mean()
        for j, logits in enumerate(made.logits(batch))
    )
    torch.testing.assert_close(made.loss(batch), expected)
    able = torch.isin(tokens[:, 0], made.ids)
    assert batch.likely[able, 0].tolist() == torch.searchsorted(made.ids, tokens[able, 0]).tolist()
    assert (batch.likely[~able, 0] == -1).all() and not able.all() and not batch.chances[~able, 0].any()


def test_an_interrupted_training_ends_as_one_that_was_not(target: ModelRunner, texts: list[Text], tmp_path: Path):
    whole, first = trainer(target, texts, tmp_path / "a"), trainer(target, texts, tmp_path / "b")
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    whole.run(lambda done, total: None, every=2)

    def stop(done: int, total: int) -> None:
        if done == 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        first.run(stop, every=2)
    second = trainer(target, texts, tmp_path / "b")
    second.run(lambda done, total: None, every=2)
    assert second.losses == whole.losses and len(whole.losses) == 6
    for ours, theirs in zip(second.module.parameters(), whole.module.parameters(), strict=True):
        assert ours.equal(theirs)
    with pytest.raises(BadRequest, match=r"training with rate 0.003"):
        trainer(target, texts, tmp_path / "b", rate=1e-2).run(lambda done, total: None)


def test_it_learns(target: ModelRunner, texts: list[Text], tmp_path: Path):
    """What the target says after these texts; the labels are its probabilities."""
    made = trainer(target, texts, tmp_path, steps=40, depth=2)
    before = made.curve()
    made.run(lambda done, total: None)
    after = made.curve()
    assert sum(made.losses[-5:]) < 0.8 * sum(made.losses[:5])
    assert tau_of(after) > tau_of(before) + 0.1


def test_prompts_and_padding_teach_nothing(target: ModelRunner, texts: list[Text], tmp_path: Path):
    made = trainer(target, texts, tmp_path)
    short, long = texts[0], texts[2]
    batch = made.batch([short, long])
    counted = batch.rows[batch.counts].tolist()
    assert counted == [i for i in range(36) if 2 <= i % 18 < (16 if i < 18 else 18)]
    alone, padded = made.batch([short]), made.batch([short, Text([5] * 20, 20)])
    torch.testing.assert_close(made.loss(alone), made.loss(padded), atol=1e-4, rtol=1e-4)


def test_the_command_trains_exports_and_resumes(folder: Path, tmp_path: Path):
    data = tmp_path / "prompts.jsonl"
    data.write_text("".join(json.dumps({"prompt": f"the quick brown {i}"}) + "\n" for i in range(12)))
    out = tmp_path / "head"
    command = ["head", "train", str(folder), "--prompts", str(data), "--out", str(out), "--steps", "3", "--batch", "2"]
    command += ["--depth", "2", "--max-new-tokens", "16", "--device", "cpu", "--slots", "4", "--draft-vocab", "64"]
    for attempt in range(2):  # the second time there is nothing left to do but a text that was cut short
        if attempt:
            lines = (out / "texts.jsonl").read_text()
            (out / "texts.jsonl").write_text(lines[:-9])
        result = CliRunner().invoke(app, command)
        assert result.exit_code == 0, result.output
        assert "tokens a round" in result.output and "eagle:" in result.output
    assert len(read(out / "texts.jsonl")) == 12 and (out / "texts.jsonl").read_text() == lines
    other = CliRunner().invoke(app, [*command[:-2], "--max-new-tokens", "9"])
    assert "texts of other prompts or options" in str(other.exception)
    card = (out / "README.md").read_text()
    assert "64 of 320 tokens" in card and "| draft token | 1 | 2 |" in card
    pair = semspec.load(folder, device="cpu", context=64)
    options = {"max_new_tokens": 12, "num_draft_tokens": 3}
    drafted = pair.generate("the quick", drafter=f"eagle:{out},threshold=0", **options)
    assert drafted.text == pair.generate("the quick", verifier="none", max_new_tokens=12).text and drafted.stats.drafted


def test_mistakes_are_told(target: ModelRunner, folder: Path, tmp_path: Path):
    def says(*more: str) -> str:
        return str(CliRunner().invoke(app, ["head", "train", str(folder), "--out", str(tmp_path), *more]).exception)

    assert "--problems" in says("--prompts", "pocket")
    assert "no task 'nothing'" in says("--prompts", "nothing", "--problems", "3")
    assert "give 1 or more" in says("--prompts", "pocket", "--problems", "3", "--steps", "0")
    with pytest.raises(BadRequest, match="layers 0"):
        layers_of(target, "1,9")
    with pytest.raises(BadRequest, match="give numbers"):
        layers_of(target, "low")
    assert layers_of(target, "") == (2, 1, 0)
