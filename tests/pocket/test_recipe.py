"""The recipe end to end, tiny and on the CPU: tokenizer, data, training, export, measuring."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from recipes.pocket import data, export, sampler
from recipes.pocket.calibrate import estimate
from recipes.pocket.measure import Bench, measure
from recipes.pocket.model import document_mask
from recipes.pocket.statistics import Share, bars, table
from recipes.pocket.tokenizer import QuickEncoder, save_tokenizer, train_tokenizer
from recipes.pocket.train import parse, train
from semspec.pocket import DRAFT_HABITS, TARGET_HABITS, prompt
from semspec.pocket.wording import example


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tokenizer, rows of both habits, and three models trained for a few steps."""
    folder = tmp_path_factory.mktemp("pocket")
    save_tokenizer(train_tokenizer(data.tokenizer_texts(500)), folder / "tokenizer")
    for habit in ("target", "draft"):
        data.make(folder, habit, examples=60)
        data.make(folder, habit, examples=4, long=True)
    for size, habit in (("tiny", "target"), ("tiny_moe", "target"), ("tiny", "draft")):
        words = ["--size", size, "--habit", habit, "--data", folder, "--out", folder / f"{size}_{habit}"]
        words += ["--total-minutes", 10, "--batch", 4, "--long-batch", 1, "--max-steps", 4, "--log-every", 2]
        train(parse([str(word) for word in words]))
    return folder


def test_tokenizer(made: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(str(made / "tokenizer"))
    quick = QuickEncoder(tokenizer)
    for seed in range(30):
        task, solution = example(seed, DRAFT_HABITS)
        text = prompt(task.text) + solution + "<|end|>"
        tokens = tokenizer.encode(text, add_special_tokens=False)
        assert quick(text) == tokens
        assert tokenizer.decode(tokens) == text
        chat = [{"role": "user", "content": task.text}, {"role": "assistant", "content": solution}]
        assert tokenizer.apply_chat_template(chat, tokenize=False) == text
        assert tokenizer.apply_chat_template(chat[:1], tokenize=False, add_generation_prompt=True) == prompt(task.text)
    for text in ("Ünï 1234 x\n\n\n y  z'\n", "7.\n\nNext"):
        assert tokenizer.decode(tokenizer.encode(text)) == text
    pieces = tokenizer.tokenize("So 123 + 45 = 168.\n\nNow")
    assert not any(sum(letter.isdigit() for letter in piece) > 1 for piece in pieces)
    assert ".ĊĊ" in pieces
    assert tokenizer.eos_token == "<|end|>" and tokenizer.pad_token_id == 0


def test_rows_hold_whole_documents(made: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(str(made / "tokenizer"))
    found = data.documents(QuickEncoder(tokenizer), "target", range(60))
    rows = data.pack(found, data.ROW)
    user, end = tokenizer.convert_tokens_to_ids(["<|user|>", "<|end|>"])
    plain = rows & (data.LEARN - 1)
    assert (plain == user).sum() == 60 and (rows == (end | data.LEARN)).sum() == 60
    assert (rows != 0).sum() == sum(map(len, found))
    mask = document_mask(torch.from_numpy(plain[:1].astype("int64")), user)[0, 0]
    start = int((plain[0] == user).nonzero()[0][1]) if (plain[0] == user).sum() > 1 else 0
    assert mask[start, start] and not mask[start, :start].any()


@pytest.mark.parametrize("name", ["tiny_target", "tiny_moe_target"])
def test_transformers_loads_what_we_export(made: Path, name: str) -> None:
    folder = made / name / "export"
    ours = export.load(folder)
    theirs = AutoModelForCausalLM.from_pretrained(str(folder), dtype=torch.float32)
    assert type(theirs).__name__ == ("MixtralForCausalLM" if "moe" in name else "LlamaForCausalLM")
    tokens = torch.randint(6, 400, (2, 40), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        assert torch.allclose(ours(tokens), theirs(tokens).logits, atol=2e-4)
    log = json.loads((folder / "training_log.json").read_text())
    assert log["log"][-1]["step"] == 4 and log["log"][-1]["loss"] < log["log"][0]["loss"] + 1


def test_split_weights_load_and_join(made: Path, tmp_path: Path) -> None:
    model = export.load(made / "tiny_target" / "export")
    export.save(model, tmp_path, 1, 0, shard_mb=0.1)
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    tokens = torch.arange(6, 30)[None]
    with torch.inference_mode():
        before = AutoModelForCausalLM.from_pretrained(str(tmp_path), dtype=torch.float32)(tokens).logits
        export.join(tmp_path)
        after = AutoModelForCausalLM.from_pretrained(str(tmp_path), dtype=torch.float32)(tokens).logits
    assert torch.equal(before, after) and [one.name for one in tmp_path.glob("*.safetensors")] == ["model.safetensors"]


def test_sampler_agrees_with_full_passes(made: Path) -> None:
    """Lock-step greedy writing over prompts of different lengths gives what one pass a token would."""
    model = export.load(made / "tiny_target" / "export")
    prompts = [list(range(6, 6 + length)) for length in (3, 11, 7)]
    written = sampler.write(model, prompts, 12, 0, stop={1}, batch=2)
    for given, tail in zip(prompts, written, strict=True):
        text = list(given)
        with torch.inference_mode():
            for _ in tail:
                text.append(int(model(torch.tensor([text]))[0, -1].argmax()))
        assert text[len(given) :] == tail


def test_training_resumes(made: Path) -> None:
    words = (
        f"--size tiny --habit target --data {made} --out {made}/tiny_target --total-minutes 10 --batch 4 --long-batch 1"
    )
    log = train(parse([*words.split(), "--max-steps", "6", "--resume", "--log-every", "2"]))
    assert [entry["step"] for entry in log["log"]] == [2, 4, 6]  # type: ignore[attr-defined]


def test_measure_runs(made: Path) -> None:
    target, draft = (export.load(made / name / "export") for name in ("tiny_target", "tiny_draft"))
    tokenizer = AutoTokenizer.from_pretrained(str(made / "tiny_target" / "export"))
    figures = measure(Bench(target, draft, tokenizer), problems=4, samples=2)
    assert len(bars(figures)) == 8 and "lossless tau" in table(figures)
    assert 1 <= figures["lossless"]["tau"] <= 9


def test_measure_gives_full_marks_to_the_generator(made: Path) -> None:
    """The world's own solutions are all right and valid, and a model speculating on itself is never refused."""
    model = export.load(made / "tiny_target" / "export")
    bench = Bench(model, model, AutoTokenizer.from_pretrained(str(made / "tokenizer")))
    pairs = [example(seed, TARGET_HABITS, split="test") for seed in range(20)]
    tasks, solutions = [task for task, _ in pairs], [bench.encode(text + "<|end|>") for _, text in pairs]
    figures = bench.quality(tasks, solutions)
    assert figures["correct"].value == 1 and figures["invalid"].value == 0
    lossless = bench.tau(tasks, solutions)
    assert lossless["agreement"] > 0.999 and lossless["tau"] > 8


def test_calibrated_habits_are_far_enough_apart() -> None:
    figures = estimate(TARGET_HABITS, DRAFT_HABITS, problems=60)
    assert 2.5 <= figures["lossless_tau"] <= 4.5
    assert figures["greedy_mismatch_then_six_matches"] >= 0.3
    assert figures["open_next_meaning"] >= 0.3


def test_interval() -> None:
    low, high = Share(90, 100).interval
    assert 0.82 < low < 0.9 < high < 0.95
