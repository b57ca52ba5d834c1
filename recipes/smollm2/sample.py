"""Texts that a target writes itself after public prompts, to distil a draft from. A run that was cut goes on.

PYTHONPATH=. python3 -m recipes.smollm2.sample TARGET --prompts gsm8k/train.jsonl --out texts.jsonl
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import semspec
from semspec.options import Options
from semspec.pair import Pair
from semspec.text.tokenizer import encode

FIELDS = ("question", "prompt", "text", "instruction", "Body")  # where data sets have their questions
HEATS = (0.0, 0.7, 1.0)  # in turn: a draft has to know the favourites and what else is written


def question_of(row: dict[str, Any]) -> str | None:
    turns = row.get("turns")
    if isinstance(turns, list) and turns:
        return str(turns[0])
    return next((str(row[name]) for name in FIELDS if row.get(name)), None)


def questions_in(paths: Sequence[Path], seed: int) -> list[str]:
    found = []
    for path in paths:
        for line in path.read_text(encoding="utf-8").splitlines():
            question = question_of(json.loads(line)) if line.strip() else None
            found += [question] if question else []
    if not found:
        raise SystemExit(f"no prompts found; rows need one of {', '.join(FIELDS)} or turns")
    return random.Random(seed).sample(found, len(found))


def sample(pair: Pair, questions: list[str], texts: int, out: Path, batch: int, tokens: int) -> int:
    """Append until there are so many; returns how many there are."""
    out.parent.mkdir(parents=True, exist_ok=True)
    done = len(out.read_text(encoding="utf-8").splitlines()) if out.exists() else 0
    with out.open("a", encoding="utf-8") as file:
        while done < texts:
            numbers = range(done, min(done + batch, texts))
            chats = [[{"role": "user", "content": questions[i % len(questions)]}] for i in numbers]
            options = [
                Options(verifier="none", temperature=HEATS[i % 3], seed=i, max_new_tokens=tokens) for i in numbers
            ]
            for chat, result in zip(chats, pair.generate(chats, options), strict=True):
                file.write(json.dumps({"prompt": encode(pair.tokenizer, chat), "tokens": result.tokens}) + "\n")
            file.flush()
            done = numbers[-1] + 1
            print(f"{done} of {texts} texts", flush=True)
    return done


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", help="a checkpoint folder or a .gguf file")
    parser.add_argument("--prompts", type=Path, action="append", required=True, help="a .jsonl file; may be repeated")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--texts", type=int, default=6000)
    parser.add_argument("--tokens", type=int, default=192, help="longest text, without its prompt")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--device", default="auto")
    args = parser.parse_args(arguments)
    pair = semspec.load(args.target, device=args.device, slots=args.batch, context=args.context)
    sample(pair, questions_in(args.prompts, 0), args.texts, args.out, args.batch, args.tokens)


if __name__ == "__main__":
    main()
