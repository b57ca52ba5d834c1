"""Training data: problems and solutions as packed rows of tokens, made by all cores at once.

A row is ROW tokens of whole documents (one problem and its solution each) and padding. A token is an unsigned 16-bit
number whose highest bit says whether it is learnt: only solutions are, since the numbers and names of a prompt are
dice, and predicting dice costs a small model capacity it has better use for. Long documents (the `long` variant) lie
in their own file with longer rows.

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

from recipes.pocket.tokenizer import QuickEncoder, save_tokenizer, train_tokenizer
from semspec.pocket import DRAFT_HABITS, TARGET_HABITS, prompt
from semspec.pocket.chat import END
from semspec.pocket.wording import example

ROW, LONG_ROW = 512, 4608
LEARN = 0x8000  # the highest bit of a stored token: it counts in the loss
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
        task, solution = example(seed, HABITS[habit], long=long)
        head, tail = encode(prompt(task.text)), encode(solution + END)
        document = np.array(head + tail, np.uint16)
        document[len(head) :] |= LEARN
        out.append(document)
    return out


def pack(found: list[np.ndarray], row: int) -> np.ndarray:
    """Whole documents into rows, each into the fullest open row with room. Padding is 0; too long ones are left out."""
    rows: list[list[np.ndarray]] = []
    room_of: list[list[int]] = [[] for _ in range(row + 1)]  # room left -> open rows
    for document in sorted(found, key=len, reverse=True):
        size = len(document)
        if size > row:
            continue
        for room in range(size, row + 1):
            if room_of[room]:
                number = room_of[room].pop()
                break
        else:
            number, room = len(rows), row
            rows.append([])
        rows[number].append(document)
        room_of[room - size].append(number)
    out = np.zeros((len(rows), row), np.uint16)
    for number, parts in enumerate(rows):
        joined = np.concatenate(parts)
        out[number, : len(joined)] = joined
    return out


def _shard(job: tuple[str, str, int, int, bool]) -> np.ndarray:
    folder, habit, start, stop, long = job
    encode = QuickEncoder(AutoTokenizer.from_pretrained(folder))
    rows = []
    chunk = 200 if long else 4000
    for low in range(start, stop, chunk):
        seeds = range(low, min(low + chunk, stop))
        rows.append(pack(documents(encode, habit, seeds, long), LONG_ROW if long else ROW))
    return np.concatenate(rows)


def make(out: Path, habit: str, examples: int, workers: int, long: bool = False, first_seed: int = 0) -> Path:
    """Write the rows of one habit to a file, mixed; seeds `first_seed` and up of the split `train` only."""
    size = max(1, -(-examples // (workers * 4)))
    jobs = [
        (str(out / "tokenizer"), habit, first_seed + low, first_seed + min(low + size, examples), long)
        for low in range(0, examples, size)
    ]
    if workers > 1:
        with get_context("spawn").Pool(workers) as pool:
            parts = pool.map(_shard, jobs, chunksize=1)
    else:
        parts = [_shard(job) for job in jobs]
    rows = np.concatenate(parts)
    np.random.default_rng(5).shuffle(rows)
    path = out / f"{habit}{'_long' if long else ''}.npy"
    np.save(path, rows)
    return path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--examples", type=int, default=1_000_000, help="per habit")
    parser.add_argument("--long-examples", type=int, default=0, help="per habit, of the long variant")
    parser.add_argument("--habits", default="target,draft")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--tokenizer-examples", type=int, default=6000)
    arguments = parser.parse_args()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the cores are already busy with whole shards
    folder = arguments.out / "tokenizer"
    if not folder.exists():
        folder.mkdir(parents=True)
        save_tokenizer(train_tokenizer(tokenizer_texts(arguments.tokenizer_examples)), folder)
    report = {}
    for habit in arguments.habits.split(","):
        for long, count in ((False, arguments.examples), (True, arguments.long_examples)):
            if not count:
                continue
            start = time.perf_counter()
            path = make(arguments.out, habit, count, arguments.workers, long)
            rows = np.load(path, mmap_mode="r")
            report[path.stem] = {
                "examples": count,
                "rows": len(rows),
                "filled": float((rows[:2000] != 0).mean()),
                "learnt": float((rows[:2000] >= LEARN).mean()),
                "seconds": round(time.perf_counter() - start, 1),
            }
            print(json.dumps({path.stem: report[path.stem]}), flush=True)
    (arguments.out / "data.json").write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
