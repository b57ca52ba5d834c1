"""Prompts that a target writes itself: where users' words begin and end, what is kept, and what is refused."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import semspec
from semspec.cli.main import app
from semspec.errors import BadRequest
from semspec.head_fit.own_prompts import opening, write_prompts
from semspec.head_fit.texts import read
from semspec.options import Options
from tests.checkpoints import make_model, make_tokenizer, save

TEMPLATE = "{% for m in messages %}<eos>{{ m.role }}: {{ m.content }}<eos>\n{% endfor %}"


@dataclass
class Written:
    text: str
    finish_reason: str


class Writer:
    """A pair that says the next number of a few; every fifth text has no end, and it may be interrupted."""

    def __init__(self, subjects: int, calls: int | None = None) -> None:
        self.tokenizer = make_tokenizer()
        self.tokenizer.chat_template = TEMPLATE
        self.subjects, self.calls, self.seeds = subjects, calls, list[int]()

    def generate(self, prompts: list[str], options: list[Options]) -> list[Written]:
        if self.calls is not None:
            self.calls -= 1
            if self.calls < 0:
                raise KeyboardInterrupt
        assert all(p.endswith("user: ") and o.temperature == 1.0 for p, o in zip(prompts, options, strict=True))
        self.seeds += [o.seed or 0 for o in options]
        numbers = [(o.seed or 0) % self.subjects for o in options]
        return [Written(f" Tell me about {n}.\n", "length" if n % 5 == 0 else "stop") for n in numbers]


def made(pair: Any, n: int, folder: Path, seed: int = 0) -> list[str]:
    prompts = write_prompts(pair, n, seed, folder, lambda done, total: None, slots=2)
    assert all(len(messages) == 1 and messages[0]["role"] == "user" for messages in prompts)
    return [str(messages[0]["content"]) for messages in prompts]


def test_prompts_are_new_whole_and_the_same_after_an_interruption(tmp_path: Path) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    whole.mkdir(), parts.mkdir()
    texts = made(writer := Writer(1000), 40, whole)
    assert len(set(texts)) == 40 == len(texts) and len(set(writer.seeds)) == len(writer.seeds)
    assert not any(int(text.split()[-1].strip(".")) % 5 == 0 for text in texts), "one that was cut is no prompt"
    with pytest.raises(KeyboardInterrupt):
        made(Writer(1000, calls=2), 40, parts)
    assert 0 < len((parts / "prompts.jsonl").read_text().splitlines()) < 40
    assert made(Writer(1000), 40, parts) == texts
    assert made(Writer(1000, calls=0), 30, parts) == texts[:30], "nothing is written again"
    assert made(Writer(1000), 40, parts) != made(Writer(1000), 40, parts_of(tmp_path, "other"), seed=1)


def parts_of(folder: Path, name: str) -> Path:
    (folder / name).mkdir()
    return folder / name


def test_a_model_with_little_to_say_is_told(tmp_path: Path) -> None:
    with pytest.raises(BadRequest, match="are new and have an end; give a file of prompts"):
        made(Writer(7), 40, tmp_path)


def test_what_lies_there_is_taken_or_refused(tmp_path: Path) -> None:
    made(Writer(1000), 8, tmp_path)
    with pytest.raises(BadRequest, match="prompts of seed 0; give the same"):
        made(Writer(1000), 8, tmp_path, seed=1)
    (tmp_path / "prompts.jsonl").write_text("[1]\n" * 9)
    with pytest.raises(BadRequest, match="is damaged"):
        made(Writer(1000), 8, tmp_path)


def test_few_are_enough_where_few_are_asked_for(tmp_path: Path) -> None:
    """Of 64 that a model with one subject writes at a time, one is new."""
    (only,) = write_prompts(Writer(2), 1, 0, tmp_path, lambda done, total: None, slots=16)  # type: ignore[arg-type]
    assert only == [{"role": "user", "content": "Tell me about 1."}]


def test_what_was_written_by_half_is_not_gone_on_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = made(Writer(1000), 40, tmp_path)
    file = tmp_path / "prompts.jsonl"
    lines = file.read_text().splitlines(keepends=True)

    def interrupted(self: Path, text: str) -> None:
        with self.open("w") as some:
            some.write(text[: len(text) // 2])
        raise KeyboardInterrupt

    with monkeypatch.context() as broken:
        broken.setattr(Path, "write_text", interrupted)
        with pytest.raises(KeyboardInterrupt):
            made(Writer(1000), 60, tmp_path)
    assert made(writer := Writer(1000), 40, tmp_path) == texts and not writer.seeds, "what was there is there"
    file.write_text("".join(lines[:10]))
    with pytest.raises(BadRequest, match="is damaged: it has 10 prompts of"):
        made(Writer(1000), 40, tmp_path)


def test_where_users_words_begin_and_end() -> None:
    tokenizer = make_tokenizer()
    tokenizer.chat_template = None
    with pytest.raises(BadRequest, match="has no chat template"):
        opening(tokenizer)
    tokenizer.chat_template = TEMPLATE
    before, stops = opening(tokenizer)
    assert before == "<eos>user: " and stops == (tokenizer.eos_token_id,)
    for odd in ("{{ messages[0].content }}{{ messages[0].content }}", "{{ messages[0].content | upper }}", "hello"):
        tokenizer.chat_template = odd
        with pytest.raises(BadRequest, match="repeats or changes what users say"):
            opening(tokenizer)


def test_the_command_needs_no_file(tmp_path: Path) -> None:
    folder, out = save(make_model("llama3"), tmp_path / "target"), tmp_path / "head"
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": TEMPLATE}))
    command = ["head", "train", str(folder), "--prompts", "self", "--out", str(out), "--steps", "2", "--batch", "2"]
    command += ["--depth", "2", "--max-new-tokens", "12", "--device", "cpu", "--slots", "8", "--draft-vocab", "64"]
    with pytest.raises(BadRequest, match="give a number with --problems"):
        CliRunner().invoke(app, command, catch_exceptions=False)
    result = CliRunner().invoke(app, [*command, "--problems", "5"])
    assert result.exit_code == 0, result.output
    pair = semspec.load(folder, device="cpu", context=64)
    prompts = [json.loads(line)["content"] for line in (out / "prompts.jsonl").read_text().splitlines()]
    given = [pair.tokenizer.decode(text.tokens[: text.prompt]) for text in read(out / "texts.jsonl")]
    assert len(given) == 5 and all(own in text for own, text in zip(prompts, given, strict=False))


def test_what_a_text_begins_with_is_not_there_twice() -> None:
    tokenizer = make_tokenizer()
    tokenizer.bos_token = tokenizer.eos_token
    tokenizer.chat_template = TEMPLATE
    adds = tokenizer.encode("a")[:1] == [tokenizer.bos_token_id]
    before, _ = opening(tokenizer)
    assert tokenizer.encode(before).count(tokenizer.bos_token_id) == 1 and before.startswith("<eos>") != adds
