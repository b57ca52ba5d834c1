"""What a head learns from: prompts, and what the target writes after them, in tokens, kept on the disk."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from semspec.errors import BadRequest
from semspec.options import Options
from semspec.pair import Pair
from semspec.tasks import make
from semspec.tasks.jsonl import JsonLines
from semspec.text.tokenizer import Prompt, encode

FILE = "texts.jsonl"
AT_A_TIME = 4  # prompts for each slot: a slot that is done with a short text takes the next one; then all are kept
FILES = (".jsonl", ".json", ".csv", ".tsv", ".gz", ".txt")


@dataclass(frozen=True, slots=True)
class Text:
    tokens: list[int]
    prompt: int  # how many of them were given


def prompts(data: str, n: int | None, seed: int) -> list[Prompt]:
    """Of a file, or of a task's training problems."""
    task = JsonLines(path=data) if data.endswith(FILES) else make(data).for_fitting()
    return [problem.prompt for problem in task.problems(n, seed)]


def write(
    pair: Pair,
    asked: Sequence[Prompt],
    folder: Path,
    options: Options,
    progress: Callable[[int, int], None],
    slots: int,
) -> list[Text]:
    """The target's answers, some at a time; those in the folder already are not written again."""
    file, about = folder / FILE, folder / "texts.json"
    made = {"first": encode(pair.tokenizer, asked[0]), "most": options.max_new_tokens, "warmth": options.temperature}
    if about.exists() and _read_json(about) != made:
        raise BadRequest(f"{file} has texts of other prompts or options; give the same, or another --out")
    texts = read(file)[: len(asked)]
    if any(text.tokens[: text.prompt] != encode(pair.tokenizer, own) for text, own in zip(texts, asked, strict=False)):
        raise BadRequest(f"{file} has texts of other prompts; give the same in the same order, or another --out")
    replace_text(about, json.dumps(made))
    progress(len(texts), len(asked))
    while len(texts) < len(asked):
        some = list(asked[len(texts) : len(texts) + AT_A_TIME * slots])
        given = [encode(pair.tokenizer, prompt) for prompt in some]
        answers = pair.generate(some, options)
        new = [Text(own + result.tokens, len(own)) for own, result in zip(given, answers, strict=True)]
        with file.open("a") as lines:
            lines.writelines(json.dumps({"tokens": t.tokens, "prompt": t.prompt}) + "\n" for t in new)
        texts += new
        progress(len(texts), len(asked))
    return texts


def read(file: Path) -> list[Text]:
    """All that were written whole; a line that was cut short is removed."""
    if not file.exists():
        return []
    lines = file.read_text().splitlines(keepends=True)
    if lines and not lines[-1].endswith("\n"):
        replace_text(file, "".join(lines := lines[:-1]))
    try:
        rows = [json.loads(line) for line in lines]
        return [Text(list(map(int, row["tokens"])), int(row["prompt"])) for row in rows]
    except (ValueError, KeyError, TypeError) as error:
        raise BadRequest(f"{file} is damaged: {error}; delete it, and its texts are written again") from error


def replace_text(file: Path, text: str) -> None:
    """Whatever interrupts this, the file has either the text it had or this one."""
    new = file.with_name(f"{file.name}.new")
    new.write_text(text)
    new.replace(file)


def _read_json(file: Path) -> Any:
    try:
        return json.loads(file.read_text())
    except ValueError as error:
        raise BadRequest(
            f"{file} is damaged: {error}; give another --out, or delete it and the texts beside"
        ) from error
