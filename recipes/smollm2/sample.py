"""Texts that a target writes itself, to distil a draft from, or to train a head on. A run that was cut goes on.

    PYTHONPATH=. python3 -m recipes.smollm2.sample TARGET --problems 16000 --out runs/smollm2

The folder is one that a head's training begins with, too, given the same options:

    semspec head train TARGET --prompts self --problems 16000 --max-new-tokens 256 -t 0.4 --out runs/smollm2
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path

import semspec
from semspec.head_fit import own_prompts, texts
from semspec.options import Options


def said(what: str) -> Callable[[int, int], None]:
    def progress(done: int, total: int) -> None:
        print(f"{done} of {total} {what}", flush=True)

    return progress


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", help="a checkpoint folder or a .gguf file")
    parser.add_argument("--prompts", default=own_prompts.NAME, help="self (the target writes them), a file, or a task")
    parser.add_argument("--problems", type=int, help="number of prompts; all of a file by default")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--tokens", type=int, default=256, help="longest text, without its prompt")
    parser.add_argument("--temperature", type=float, default=0.4, help="between that of greedy text and the usual 0.7")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--slots", type=int, default=32, help="texts written at a time")
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--device", default="auto")
    args = parser.parse_args(arguments)
    own = args.prompts == own_prompts.NAME
    if own and args.problems is None:
        parser.error("say with --problems how many prompts the target writes")
    asked = [] if own else texts.prompts(args.prompts, args.problems, args.seed)
    pair = semspec.load(args.target, device=args.device, slots=args.slots, context=args.context)
    args.out.mkdir(parents=True, exist_ok=True)
    if own:
        asked = own_prompts.write_prompts(pair, args.problems, args.seed, args.out, said("prompts"), args.slots)
    options = Options(
        verifier="none", temperature=args.temperature, seed=args.seed, max_new_tokens=args.tokens
    )  # as `semspec head train` asks for them
    texts.write(pair, asked, args.out, options, said("texts"), args.slots)


if __name__ == "__main__":
    main()
