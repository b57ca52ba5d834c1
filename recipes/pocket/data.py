"""Training data: problems and solutions as packed rows of tokens, made by all cores at once.

A row is ROW tokens of whole documents (one problem and its solution each) and padding. A token is an unsigned 16-bit
number whose highest bit says whether it is learnt: only solutions are, since the numbers and names of a prompt are
dice, and predicting dice costs a small model capacity it has better use for. The next bit marks the positions where a
choice of words shows: dice too, which must be learnt but weigh less (`train --dice`). Long documents (the `long`
variant) lie in files of their own with longer rows. Training may start on the first files while more are being made.

    PYTHONPATH=. python3 -m recipes.pocket.data --out /tmp/pocket --examples 1000000
"""

from __future__ import annotations

import argparse
import json
import os
import re
import time
from multiprocessing import get_context
from pathlib import Path

import numpy as np
from transformers import AutoTokenizer

from recipes.pocket.tokenizer import COMMON, OTHER, QuickEncoder, save_tokenizer, train_tokenizer
from semspec.pocket import DRAFT_HABITS, TARGET_HABITS, prompt
from semspec.pocket.chat import END
from semspec.pocket.wording import Trace, example
from semspec.pocket.world import FUNCTIONS

ROW, LONG_ROW = 512, 4608
LEARN, DICE = 0x8000, 0x4000  # bits of a stored token: it counts in the loss; a choice of words shows here
TOKEN = DICE - 1
HABITS = {"target": TARGET_HABITS, "draft": DRAFT_HABITS}


def tokenizer_texts(count: int) -> list[str]:
    """Texts for the tokenizer: both habits, and idle facts, so that no word of the world is left in pieces."""
    texts = []
    for seed in range(count):
        habits = DRAFT_HABITS if seed % 2 else TARGET_HABITS
        task, solution = example(seed, habits, long=seed % 50 == 0)
        texts += [task.text, *re.split("</?think>", solution)]
    return texts


def documents(encode: QuickEncoder, habit: str, seeds: range, long: bool = False) -> list[np.ndarray]:
    """The examples with these seeds as marked tokens."""
    out = []
    for seed in seeds:
        trace: Trace = []
        task, solution = example(seed, HABITS[habit], long=long, trace=trace)
        head = encode(prompt(task.text))
        # The word for an operation also says which one, and that is no dice.
        tail = encode.marked(solution + END, [position for name, _, position in trace if name not in FUNCTIONS], DICE)
        document = np.array(head + tail, np.uint16)
        document[len(head) :] |= LEARN
        out.append(document)
    return out


def pack(found: list[np.ndarray], row: int) -> np.ndarray:
    """Whole documents into rows, each into the fullest open row it fits in. Padding is 0; longer ones are left out."""
    rows: list[list[np.ndarray]] = []
    rows_with: list[list[int]] = [[] for _ in range(row + 1)]  # free tokens -> open rows
    for document in sorted(found, key=len, reverse=True):
        size = len(document)
        if size > row:
            continue
        for free in range(size, row + 1):
            if rows_with[free]:
                number = rows_with[free].pop()
                break
        else:
            number, free = len(rows), row
            rows.append([])
        rows[number].append(document)
        rows_with[free - size].append(number)
    out = np.zeros((len(rows), row), np.uint16)
    for number, parts in enumerate(rows):
        joined = np.concatenate(parts)
        out[number, : len(joined)] = joined
    return out


Job = tuple[str, str, int, int, bool]
"""Folder, habit, first and last seed, long?"""


def _shard(job: Job) -> tuple[str, int, int]:
    """Make one shard; its group, number of rows and of learnt tokens. A shard appears whole or not at all."""
    folder, habit, start, stop, long = job
    encode = QuickEncoder(AutoTokenizer.from_pretrained(str(Path(folder) / "tokenizer")))
    rows = []
    chunk = 200 if long else 4000
    for low in range(start, stop, chunk):
        seeds = range(low, min(low + chunk, stop))
        rows.append(pack(documents(encode, habit, seeds, long), LONG_ROW if long else ROW))
    group = group_name(habit, long)
    found = np.concatenate(rows)
    path = Path(folder) / group / f"{start:08d}.npy"
    np.save(path.with_suffix(".part.npy"), found)
    path.with_suffix(".part.npy").rename(path)
    return group, len(found), int((found >= LEARN).sum())


def group_name(habit: str, long: bool) -> str:
    return f"{habit}_long" if long else habit


def jobs(out: Path, habit: str, examples: int, long: bool) -> list[Job]:
    """Seeds 0 and up of the split `train`, in shards of a few seconds each."""
    size = 500 if long else 12_000
    (out / group_name(habit, long)).mkdir(parents=True, exist_ok=True)
    return [(str(out), habit, low, min(low + size, examples), long) for low in range(0, examples, size)]


def make(out: Path, habit: str, examples: int, long: bool = False) -> None:
    """All shards of one habit, in this process."""
    for job in jobs(out, habit, examples, long):
        _shard(job)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--examples", type=int, default=1_000_000, help="per habit")
    parser.add_argument("--long-examples", type=int, default=0, help="per habit, of the long variant")
    parser.add_argument("--habits", default="target,draft")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--tokenizer-examples", type=int, default=6000)
    parser.add_argument("--other-tokenizer", action="store_true", help="for a draft that exchanges text, not ids")
    arguments = parser.parse_args()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the cores are already busy with whole shards
    folder = arguments.out / "tokenizer"
    if not folder.exists():
        folder.mkdir(parents=True)
        style = OTHER if arguments.other_tokenizer else COMMON
        save_tokenizer(train_tokenizer(tokenizer_texts(arguments.tokenizer_examples), style), folder)
    start = time.perf_counter()
    work = []
    for habit in arguments.habits.split(","):
        work += jobs(arguments.out, habit, arguments.long_examples, long=True)
        work += jobs(arguments.out, habit, arguments.examples, long=False)
    totals: dict[str, list[int]] = {}
    with get_context("spawn").Pool(arguments.workers) as pool:
        for group, rows, learnt in pool.imap(_shard, work):
            counts = totals.setdefault(group, [0, 0])
            counts[0], counts[1] = counts[0] + rows, counts[1] + learnt
    report = {group: {"rows": rows, "learnt_tokens": learnt} for group, (rows, learnt) in totals.items()}
    print(json.dumps({**report, "seconds": round(time.perf_counter() - start, 1)}), flush=True)
    (arguments.out / "data.json").write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
