"""Training heads: drafting in training is drafting, an interrupted run ends as any other, exported heads work."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from click.testing import Result
from safetensors.torch import load_file
from typer.testing import CliRunner

import semspec
from semspec.cli.main import app
from semspec.errors import BadRequest
from semspec.head_fit import texts as written
from semspec.head_fit.checkpoint import Checkpoint, Training
from semspec.head_fit.export import export, frequent, layers_of, size_of, tau_of
from semspec.head_fit.texts import Text, read
from semspec.head_fit.train import Trainer
from semspec.model import ModelRunner
from semspec.model.heads.eagle import EagleHead
from semspec.model.heads.runner import HeadRunner
from semspec.model.prefix_cache import PrefixCache
from semspec.types import Score, ScoreOutput
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
    ids = frequent(texts, target.vocab_size, vocab)
    training = Training(LAYERS, **{"steps": 6, "batch": 4, "length": 32, "depth": 3, "rate": 3e-3} | how)  # type: ignore[arg-type]
    return Trainer(target, texts, ids, size_of(target, LAYERS, len(ids)), training, folder)


def test_every_step_of_the_training_is_what_the_exported_head_drafts(
    target: ModelRunner, texts: list[Text], tmp_path: Path
):
    """Step j at position i against a draft that began at i - j, with the same tokens, through the runner."""
    made = trainer(target, texts, tmp_path, vocab=40, depth=4)
    for parameter in made.module.parameters():  # bfloat16 keeps these
        parameter.data = parameter.data.bfloat16().float()
    export(made, tmp_path, "x", target.vocab_size, 128, [0.5], "counting")
    text = texts[1]
    batch = made.batch([text])
    logits = made.module(batch.embedded, batch.states, torch.arange(len(text.tokens) - 2), 4)
    runner = HeadRunner(EagleHead.load(tmp_path, target), target.vocab_size, target.max_seq_len)
    hidden = made._read([text])[0].states
    for begin in (0, 2, 7):
        slot = runner.acquire()
        runner.observe(slot, {i: h[: begin + 1] for i, h in hidden.items()})
        feed = text.tokens[: begin + 2]
        for j in range(4):
            (rows,) = runner.score([Score(runner, slot, feed, 1)])
            feed = [text.tokens[begin + 2 + j]]
            torch.testing.assert_close(rows.logits[0, made.ids], logits[j][begin + j], atol=2e-4, rtol=1e-4)


def test_texts_read_together_are_those_read_alone(target: ModelRunner, texts: list[Text], tmp_path: Path):
    """As on a GPU: new ones in as few passes as slots allow, each once, whatever the order and however often."""
    alone, made = trainer(target, texts, tmp_path), trainer(target, texts, tmp_path)
    made.together, passes, whole = 5, list[int](), made._pass

    def counted(some: list[Text]) -> object:
        passes.append(len(some))
        return whole(some)

    made._pass = counted  # type: ignore[assignment, method-assign]
    asked = [texts[i] for i in (3, 0, 3, 5, 1, 2, 0)]
    found = made._read(asked)
    assert passes == [3, 2] and target.free == 3, "five texts, three slots"
    for ours, theirs in zip(found, alone._read(asked), strict=True):
        for layer, states in theirs.states.items():
            torch.testing.assert_close(ours.states[layer], states, atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(ours.chances, theirs.chances, atol=1e-5, rtol=1e-4)
    made._read(texts[:6])
    assert passes == [3, 2, 1], "the others are remembered"


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


@pytest.mark.parametrize("kind", ["room for all", "few pages", "remembered"])
def test_texts_of_one_pass_are_read_as_each_alone(
    folder: Path, target: ModelRunner, texts: list[Text], tmp_path: Path, kind: str
):
    """However many there is room for; and a pass that fails keeps no slot."""
    made, some = trainer(target, texts, tmp_path), texts[:6]
    alone = made._read(some)
    runner = ModelRunner.load(folder, device="cpu", slots=6, context=128, tokens=256 if kind == "few pages" else None)
    passes, score = list[int](), runner.score
    made.target, made.cached, made.together = PrefixCache(runner) if kind == "remembered" else runner, {}, 6

    def counted(requests: Sequence[Score]) -> list[ScoreOutput]:
        passes.append(len(requests))
        return score(requests)

    runner.score = counted  # type: ignore[method-assign]
    for one, other in zip(made._read(some), alone, strict=True):
        for layer, states in other.states.items():
            torch.testing.assert_close(one.states[layer], states, atol=1e-5, rtol=1e-4)
        assert torch.equal(one.likely[:, 0], other.likely[:, 0])
    assert max(passes) > 1 and made.target.free == 6

    def fails(requests: Sequence[Score]) -> list[ScoreOutput]:
        raise RuntimeError("out of memory")

    runner.score, made.cached = fails, {}  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="out of memory"):
        made._read(some)
    assert made.target.free == 6


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
    (out / "texts.json").write_text("")  # a full disk
    assert "texts.json is damaged" in str(CliRunner().invoke(app, command).exception)
    (out / "texts.json").unlink()
    assert CliRunner().invoke(app, command).exit_code == 0
    card = (out / "README.md").read_text()
    assert "64 of 320 tokens" in card and "| draft token | 1 | 2 |" in card
    pair = semspec.load(folder, device="cpu", context=64)
    options = {"max_new_tokens": 12, "num_draft_tokens": 3}
    drafted = pair.generate("the quick", drafter=f"eagle:{out},threshold=0", **options)
    assert drafted.text == pair.generate("the quick", verifier="none", max_new_tokens=12).text and drafted.stats.drafted


@pytest.fixture
def counting(folder: Path, texts: list[Text], tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """`counting(problems, *options)` runs the command on so many prompts; what the "target writes" is counting, and
    with other prompts it counts elsewhere, so that the most frequent tokens are others."""

    def write(pair: object, asked: list[str], *_: object) -> list[Text]:
        return [texts[i % 24] if i < 24 else Text([i % 7 + 60] * 30, 2) for i in range(len(asked))]

    monkeypatch.setattr(written, "write", write)
    data = tmp_path / "prompts.jsonl"
    data.write_text("".join(json.dumps({"prompt": f"number {i}"}) + "\n" for i in range(60)))

    def run(problems: int, *more: str) -> Result:
        command = ["head", "train", str(folder), "--prompts", str(data), "--out", str(tmp_path / "head")]
        command += [
            "--depth",
            "2",
            "--device",
            "cpu",
            "--context",
            "128",
            "--rate",
            "0.003",
            "--length",
            "32",
            "--batch",
            "4",
        ]
        options = ["--problems", str(problems), "--draft-vocab", "12", "--layers", "1,2,2", "--steps", "30", *more]
        return CliRunner().invoke(app, [*command, *options])

    return run


def ids_of(head: Path) -> list[int]:
    return (load_file(head / "model.safetensors")["d2t"] + torch.arange(12)).tolist()


def tau_said(result: Result) -> float:
    assert result.exit_code == 0, result.exception
    return float(re.findall(r"(\S+) tokens a round; use", result.output)[0])


def test_more_texts_give_a_trained_head_no_other_tokens(counting, texts: list[Text], tmp_path: Path):
    """The tokens are chosen once. More texts alone change nothing and say so; with more steps they are learnt from."""
    head = tmp_path / "head"
    first = counting(24)
    ids, weights, card = ids_of(head), load_file(head / "model.safetensors"), (head / "README.md").read_text()
    assert set(range(20, 29)) <= set(ids)
    same = counting(60)
    assert "36 further texts teach it nothing; give more --steps" in same.output and tau_said(same) > 1
    now = load_file(head / "model.safetensors")
    assert all(now[key].equal(weights[key]) for key in weights) and (head / "README.md").read_text() == card
    further = counting(60, "--steps", "60")
    assert tau_said(further) > 0 and ids_of(head) == ids
    begun = Checkpoint.read(head)
    assert begun is not None and (begun.done, len(begun.losses), len(begun.texts)) == (60, 60, 60)
    assert begun.ids.tolist() == ids
    assert tau_said(counting(24, "--steps", "60")) >= tau_said(first)  # the old texts' share is not forgotten


def test_tokens_that_are_chosen_anew_are_refused(counting, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A planted fault: the command forgets what it began with, as it once did."""
    counting(24)
    before = (tmp_path / "head" / "model.safetensors").read_bytes()
    whole = Checkpoint.read
    monkeypatch.setattr(Checkpoint, "read", lambda folder, device=None: whole(folder, device) if device else None)
    for options in ([], ["--steps", "60"]):
        result = counting(60, *options)
        assert "other tokens" in str(result.exception)
    (tmp_path / "head" / "model.safetensors").unlink()  # without a head to compare with, the training itself refuses
    assert "is of a head of another size or with other tokens" in str(counting(60, "--steps", "60").exception)
    assert not (tmp_path / "head" / "model.safetensors").exists() and before


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--draft-vocab", "13"], "with draft-vocab 12; give the same, or another --out"),
        (["--ffn", "65"], "with ffn 128"),
        (["--layers", "0,1,2"], r"with layers \(1, 2, 2\)"),
        (["--depth", "3", "--batch", "2"], "with batch 4, depth 2"),
        (["--steps", "20"], "has 30 steps behind it and 20 are asked for"),
    ],
)
def test_other_sizes_are_refused_before_any_work(
    counting, tmp_path: Path, options: list[str], said: str, monkeypatch: pytest.MonkeyPatch
):
    counting(24)
    monkeypatch.setattr("semspec.pair.loading.load", lambda *_, **__: pytest.fail("a model was loaded"))
    assert re.search(said, str(counting(24, *options).exception))


def test_a_worse_head_is_not_written_over_a_better_one(counting, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    first, file = counting(24), tmp_path / "head" / "model.safetensors"
    better = file.read_bytes()

    def spoil(self: Trainer, number: int) -> float:
        self.module.lm_head.weight.data.neg_()
        return 0.0

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "step", spoil)
        worse = counting(24, "--steps", "31")
    assert "and stays. Train on with more --steps" in worse.output and tau_said(worse) == tau_said(first)
    assert file.read_bytes() == better
    file.unlink()  # as it says
    assert tau_said(counting(24, "--steps", "31")) < tau_said(first) and file.exists()


def test_a_head_without_its_training_is_not_written_over(counting, tmp_path: Path):
    counting(24)
    (tmp_path / "head" / "training.pt").unlink()
    assert "its training is not there" in str(counting(24, "--draft-vocab", "13").exception)
    assert "its training is not there" in str(counting(60).exception)  # other tokens
    (tmp_path / "head" / "model.safetensors").write_bytes(b"no tensors")
    assert "cannot be read" in str(counting(24).exception)


def test_a_training_of_another_target_other_texts_or_another_version_is_refused(
    target: ModelRunner, texts: list[Text], tmp_path: Path
):
    def says(texts: list[Text]) -> str:
        with pytest.raises(BadRequest) as told:
            trainer(target, texts, tmp_path, vocab=12, steps=2).run(lambda done, total: None)
        return str(told.value)

    trainer(target, texts, tmp_path, vocab=12, steps=1).run(lambda done, total: None)
    assert "with other texts than those" in says([texts[1], texts[0], *texts[2:]])
    begun = Checkpoint.read(tmp_path)
    assert begun is not None
    begun.target = "llama-1x2-3"
    begun.save(tmp_path)
    assert "for another target (llama-1x2-3)" in says(texts)
    torch.save({"how": {}, "done": 3}, tmp_path / "training.pt")
    assert "has no size, ids" in says(texts) and "of this version; delete it" in says(texts)
    (tmp_path / "training.pt").write_bytes(b"nothing")
    assert "cannot be read" in says(texts)


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
