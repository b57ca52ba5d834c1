"""Which tiles products with quantised weights should have: every matrix of some models by many cuts, at 1 and 9 rows.

    python bench/gpu_tune_quantised.py --processes 14 --out tune.json     # compiled side by side, then timed one by one

Prints, for each matrix, what `QuantisedConfig.of` takes and the best cuts found. Write what wins into it; before that,
`bench/gpu.py --only quantised --cuts tune.json` times whole passes with them.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, replace
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from bench.gpu_checks_quantised import noise
from semspec.bench.shapes import SHAPES
from semspec.model.config import Shape
from semspec.model.kernels.quantised import QuantisedConfig, prepare, quantised_product
from semspec.model.kernels.tiles import Card, card_of
from semspec.model.quantised import Kind, QuantisedLinear

LAYOUTS: dict[Kind, tuple[int, int, bool, bool]] = {"fp8": (1, 0, False, False), "int4": (1, 128, True, False)}
MODELS = {"32B": ("32B/1.5B", 0), "1.5B": ("32B/1.5B", 1), "70B": ("70B/8B", 0), "8B": ("70B/8B", 1)}
Case = tuple[str, Kind, str, tuple[int, int], bool, bool]  # model, kind, matrix, (outputs, inputs), in parts, gated


def cases(models: list[str], kinds: list[Kind]) -> Iterator[Case]:
    for model, kind in product(models, kinds):
        pair, which = MODELS[model]
        s = Shape.of(SHAPES[pair][which])
        heads = s.heads * s.head_dim
        yield model, kind, "qkv", (heads + 2 * s.kv_heads * s.head_dim, s.width), False, False
        yield model, kind, "out", (s.width, heads), True, False
        yield model, kind, "gate and up", (2 * s.ffn, s.width), False, True
        yield model, kind, "down", (s.width, s.ffn), True, False


def cuts(case: Case) -> list[QuantisedConfig]:
    """What is taken now first; then others that fit."""
    _, kind, _, (outputs, inputs), parts, gated = case
    halves, card = 2 if kind == "int4" else 1, card_of(torch.device("cuda"))
    taken = QuantisedConfig.of((outputs, inputs // halves), 9, card, parts, gated, 128 if halves == 2 else 256, halves)
    found = [taken]
    depths = (128,) if halves == 2 else (128, 256)
    for columns, depth, warps, stages in product((32, 64, 128) if parts else (16, 32, 64), depths, (2, 4, 8), (4, 6)):
        bytes_each = columns * (2 if gated else 1) + 2 * halves * 16
        for splits in (1, 2, 4, 8) if parts else (1,):
            programs = outputs // (2 if gated else 1) / columns * splits
            few = not 0.9 <= programs / card.processors <= (6 if parts else 16)
            if few or stages * depth * bytes_each > card.shared or columns // warps not in (8, 16):
                continue
            if parts and inputs // halves // splits < 2 * depth:
                continue
            found.append(QuantisedConfig(16, columns, depth, splits, warps, stages))
    return list(dict.fromkeys([*found, replace(taken, stages=taken.stages + 1), replace(taken, stages=2)]))


def one_of(case: Case) -> QuantisedLinear:
    linear = noise(case[1], case[3], LAYOUTS[case[1]], torch.device("cuda"))
    linear.bias = None
    prepare(linear)
    return linear


def launch(case: Case, linear: QuantisedLinear, x: torch.Tensor, cut: QuantisedConfig) -> None:
    made = quantised_product(x, linear, case[4], "silu" if case[5] else None, cut=cut)
    assert made is not None


def compile_share(jobs: list[tuple[Case, QuantisedConfig]]) -> int:
    """Each once, so that its binary is in the cache on the disk."""
    known: dict[Case, QuantisedLinear] = {}
    for case, cut in jobs:
        if case not in known:
            known = {case: one_of(case)}
        x = torch.randn(9, case[3][1], device="cuda", dtype=torch.bfloat16)
        try:
            launch(case, known[case], x, cut)
        except Exception as error:
            print(case[:3], cut, str(error)[:80], flush=True)
    torch.cuda.synchronize()
    return len(jobs)


def timed(case: Case, rows: int, repeats: int) -> list[tuple[float, QuantisedConfig]]:
    """Microseconds of each cut, from graphs over many times the L2 cache."""
    read = case[3][0] * case[3][1] // (2 if case[1] == "int4" else 1)
    copies = max(2, min(24, int(4e8 // read)))
    linears = [one_of(case) for _ in range(copies)]
    x = torch.randn(rows, case[3][1], device="cuda", dtype=torch.bfloat16)
    found = []
    for cut in cuts(case):
        try:
            for linear in linears:
                launch(case, linear, x, cut)
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                for linear in linears:
                    launch(case, linear, x, cut)
            graph.replay()
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            best = float("inf")
            for _ in range(repeats):
                begin.record()
                graph.replay()
                end.record()
                end.synchronize()
                best = min(best, begin.elapsed_time(end) * 1e3 / copies)
            found.append((best, cut))
        except Exception as error:
            print(case[:3], cut, str(error)[:80], flush=True)
    return found


def use(path: Path) -> None:
    """Take the best cuts of a report instead of what `QuantisedConfig.of` says."""
    found, before = {}, QuantisedConfig.of
    for row in json.loads(path.read_text()):
        (_, _kind, _, (outputs, inputs)), halves = row["case"], 2 if row["case"][1] == "int4" else 1
        key = outputs, inputs // halves, halves, row["parts"], row["gated"]
        found[key] = QuantisedConfig(**row["best"][0]["cut"])

    def of(
        size: tuple[int, int], rows: int, card: Card, split: bool, gated: bool, depth: int, halves: int, item: int = 2
    ) -> QuantisedConfig:
        known = found.get((*size, halves, split, gated)) if rows <= 16 else None
        return known or before(size, rows, card, split, gated, depth, halves, item)

    QuantisedConfig.of = staticmethod(of)  # type: ignore[method-assign]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="32B,1.5B")
    parser.add_argument("--kinds", default="fp8,int4")
    parser.add_argument("--processes", type=int, default=14)
    parser.add_argument("--rows", default="9")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--compile-only", action="store_true")
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    todo = list(cases(asked.models.split(","), asked.kinds.split(",")))
    jobs = [(case, cut) for case in todo for cut in cuts(case)]
    print(f"{len(jobs)} cuts of {len(todo)} matrices", flush=True)
    with ProcessPoolExecutor(asked.processes, get_context("spawn")) as pool:
        list(pool.map(compile_share, [jobs[i :: asked.processes] for i in range(asked.processes)]))
    if asked.compile_only:
        return
    report: list[dict[str, Any]] = []
    for rows, case in product([int(n) for n in asked.rows.split(",")], todo):
        taken, *_ = found = timed(case, rows, asked.repeats)
        found.sort(key=lambda one: one[0])
        read = case[3][0] * case[3][1] / (2 if case[1] == "int4" else 1)
        name = " ".join(case[:3])
        print(f"{name}, {rows} rows: {taken[0]:.1f} us, {read / taken[0] / 1e6:.2f} TB/s: {taken[1]}")
        for time, cut in found[:4]:
            print(f"    {time:.1f} us, {read / time / 1e6:.2f} TB/s: {cut}", flush=True)
        best = [{"us": time, "cut": asdict(cut)} for time, cut in found[:12]]
        report.append(
            {
                "case": [*case[:3], list(case[3])],
                "rows": rows,
                "taken": taken[0],
                "parts": case[4],
                "gated": case[5],
                "best": best,
            }
        )
    if asked.out:
        asked.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
