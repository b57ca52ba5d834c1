"""The recipe for a draft of a target's own layers, in tiny form: texts, training, and a draft that loads."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest
import torch

import semspec
from recipes.smollm2 import distil, rounded, sample
from semspec.model.source import Source
from semspec.types import Score
from tests.checkpoints import make_model, save


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(make_model("llama3.1"), tmp_path_factory.mktemp("target"))


def test_the_teacher_is_the_target(target: Path) -> None:
    teacher = distil.teacher_of(str(target), torch.device("cpu"))
    runner = Source.find(target).load("cpu", "float32", 1, 64)
    tokens = [5, 9, 3, 17, 40]
    slot = runner.acquire()
    (rows,) = runner.score([Score(runner, slot, tokens, 5)])
    with torch.no_grad():
        wanted = teacher(torch.tensor([tokens])).logits[0]
    assert torch.allclose(rows.logits, wanted, atol=1e-4)


def test_a_student_has_the_layers_it_was_given(target: Path) -> None:
    teacher = distil.teacher_of(str(target), torch.device("cpu"))
    student, own = distil.student_of(teacher, [2, 0]), teacher.state_dict()
    kept = student.state_dict()
    assert torch.equal(kept["model.layers.0.mlp.up_proj.weight"], own["model.layers.2.mlp.up_proj.weight"])
    assert torch.equal(kept["model.layers.1.self_attn.q_proj.weight"], own["model.layers.0.self_attn.q_proj.weight"])
    assert student.config.num_hidden_layers == 2
    whole = distil.student_of(teacher, [0, 1, 2])
    assert distil.divergence(teacher, whole, torch.tensor([[1, 2, 3]]), torch.ones(1, 2, dtype=torch.bool))[0] < 1e-6
    with pytest.raises(SystemExit, match="give some of 0 to 2"):
        distil.student_of(teacher, [3])


def test_only_what_the_target_wrote_is_learnt(tmp_path: Path) -> None:
    rows = [
        {"prompt": 3, "tokens": [1, 2, 3, 4, 5]},
        {"prompt": 1, "tokens": [6, 7, 8, 9]},
        {"prompt": 1, "tokens": [1, 2]},
    ]
    (tmp_path / "texts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    texts = distil.read_texts(tmp_path, 4)
    assert texts == [([6, 7, 8, 9], 1)], "a text cut inside its prompt, or of one token, teaches nothing"
    texts = distil.read_texts(tmp_path, 9)
    ids, counts = next(distil.batches(texts, 2, distil.random.Random(0)))
    learnt = sorted(token for row, count in zip(ids, counts, strict=True) for token in row[1:][count].tolist())
    assert learnt == [4, 5, 7, 8, 9]


def test_from_prompts_to_a_draft(target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts, texts, out = tmp_path / "prompts.jsonl", tmp_path / "texts", tmp_path / "draft"
    words = ("sky", "fox", "one", "two", "red", "dog", "cat", "sun")
    subjects = [f"the {a} {b}" for a in words for b in words]
    prompts.write_text("".join(json.dumps({"question": subject}) + "\n" for subject in subjects))
    common = [str(target), "--prompts", str(prompts), "--out", str(texts), "--tokens", "24", "--temperature", "1"]
    for wanted in ("6", "64"):  # the second goes on with what the first has written
        sample.main([*common, "--slots", "16", "--context", "128", "--device", "cpu", "--problems", wanted])
    rows = [json.loads(line) for line in (texts / "texts.jsonl").read_text().splitlines()]
    assert len(rows) == 64 and all(len(row["tokens"]) > row["prompt"] > 0 for row in rows)
    with pytest.raises(SystemExit):
        sample.main([str(target), "--out", str(texts)])  # how many it writes itself has to be said

    seconds = itertools.count(step=1.0)
    monkeypatch.setattr(distil.train, "__defaults__", (0, lambda: next(seconds)))  # 60 steps to the minute
    options = ["--texts", str(texts), "--out", str(out), "--layers", "0,-1", "--minutes", "1", "--batch", "16"]
    distil.main([str(target), *options, "--device", "cpu", "--rate", "3e-3"])
    card = json.loads((out / "distilled.json").read_text())
    assert card["layers"] == [0, 2] and card["after"]["kl"] < 0.7 * card["before"]["kl"], "it has learnt"

    pair = semspec.load(str(target), draft=str(out), device="cpu")
    alone = pair.generate("the sky", verifier="none", max_new_tokens=30)
    drafted = pair.generate("the sky", verifier="exact", num_draft_tokens=3, max_new_tokens=30)
    assert drafted.tokens == alone.tokens and drafted.stats.drafted > 0


def test_rounding_leaves_few_values_and_the_extremes() -> None:
    weight = torch.randn(6, 64, generator=torch.Generator().manual_seed(0))
    found = rounded.rounded(weight, 2, 16)
    for row, own in zip(found.unflatten(1, (-1, 16)).flatten(0, 1), weight.reshape(-1, 16), strict=True):
        step = (own.max() - own.min()) / 3
        assert len(row.unique()) <= 4 and torch.isclose(row.min(), own.min()) and torch.isclose(row.max(), own.max())
        assert (row - own).abs().max() <= step / 2 + 1e-6
    assert torch.equal(rounded.rounded(torch.ones(2, 16), 3, 8), torch.ones(2, 16)), "no spread, nothing to round"
    assert torch.allclose(rounded.rounded(weight, 8, 16), weight, atol=0.02)


def test_a_rounded_draft_loads_and_differs_in_its_layers_only(target: Path, tmp_path: Path) -> None:
    rounded.main([str(target), "--bits", "2", "--group", "16", "--out", str(tmp_path)])
    pair = semspec.load(str(target), draft=str(tmp_path), device="cpu", dtype="float32", context=64)
    exact = pair.generate("a b c", verifier="exact", num_draft_tokens=4, max_new_tokens=24)
    assert exact.tokens == pair.generate("a b c", verifier="none", max_new_tokens=24).tokens
    teacher = distil.teacher_of(str(target), torch.device("cpu")).state_dict()
    draft = distil.teacher_of(str(tmp_path), torch.device("cpu")).state_dict()
    changed = {name for name, own in teacher.items() if not torch.allclose(own, draft[name], atol=0.01)}
    assert changed and all(".layers." in name and "norm" not in name for name in changed)
    for options, said in ((["--bits", "9"], "give 1 to 8"), (["--group", "7"], "which it must divide")):
        with pytest.raises(SystemExit, match=said):
            rounded.main([str(target), *options, "--out", str(tmp_path)])
