"""Writes data sets of docs/reproduce-papers.md: benchmarks to data/, DeepSeek's traces to s1k-*.jsonl.

pip install datasets && python -m recipes.papers     # GPQA asks for consent on its page first
"""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from semspec.tasks.acp import AcpProgGen
from semspec.tasks.gpqa import RIGHT, WRONG, Gpqa
from semspec.tasks.mgsm import LABELS, Mgsm

Row = dict[str, Any]
Load = Callable[..., Iterable[Row]]  # datasets.load_dataset

MATH = {
    "math500": ("HuggingFaceH4/MATH-500", "test"),
    "amc23": ("math-ai/amc23", "test"),
    "aime24": ("HuggingFaceH4/aime_2024", "train"),
}
TRACES = {"math": 200, "science": 107}  # problems of each kind
ASK = "Please reason step by step, and put {} within \\boxed{{}}."
GPQA = ("Record ID", "High-level domain", "Question", RIGHT, *WRONG)


def write(path: Path, rows: Iterable[Row]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def write_table(path: Path, rows: Iterable[Row], names: tuple[str, ...]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="", encoding="utf-8") as file:
        table = csv.DictWriter(file, names, extrasaction="ignore")
        table.writeheader()
        table.writerows(rows)


def traces(rows: Iterable[Row], kind: str, most: int) -> list[Row]:
    """Answers from which prefixes can be cut (`--traces`); with `messages`, their problems are a task as well."""
    found: list[Row] = []
    for i, row in enumerate(rows):
        text = row["deepseek_thinking_trajectory"]
        if row["cot_type"] == kind and text.count("\n\n") < 200 and len(found) < most:
            prompt = [{"role": "user", "content": row["question"] + "\n\n" + ASK.format("your final answer")}]
            found.append({"problem": f"s1k/{i}", "prompt": prompt, "messages": prompt, "text": text})
    return found


def main(load: Load, out: Path) -> None:
    for name, (hub, split) in MATH.items():
        rows = [dict(row, problem=row.get("problem") or row.get("question")) for row in load(hub, split=split)]
        write(out / "data" / "math" / f"{name}.jsonl", rows)
    write_table(out / "data" / Gpqa.filename, load("Idavidrein/gpqa", "gpqa_diamond", split="train"), GPQA)
    acp = [
        {name: row[name] for name in ("id", "context", "question", "answer")}
        for row in load("ibm-research/acp_bench", "acp_prog_gen", split="test")
    ]
    write(out / "data" / AcpProgGen.filename, acp)
    for code in LABELS:
        rows = load("juletxara/mgsm", code, split="test")
        lines = [f"{' '.join(row['question'].split())}\t{row['answer_number']}\n" for row in rows]
        path = out / "data" / Mgsm.filename.format(code)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(lines), encoding="utf-8")
    for kind, most in TRACES.items():
        write(out / f"s1k-{kind}.jsonl", traces(load("simplescaling/s1K-1.1", split="train"), kind, most))


if __name__ == "__main__":
    from datasets import load_dataset

    main(load_dataset, Path())
