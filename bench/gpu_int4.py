"""Products with weights of four bits: quantised.py against int4.py in several cuts, every matrix of some models.

    python bench/gpu_int4.py --processes 14                       # 32B at 1, 9, 16 and 32 rows, the others at 9
    python bench/gpu_int4.py --models 32B --rows 9 --cuts 24      # which cuts `Int4Config.of` should take

First every variant is compiled and held to float64, in processes of their own, so that one that breaks takes no other
with it. Then those that are right are timed in turns, in graphs over more weights than the second-level cache holds.
Prints a table; the last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, replace
from multiprocessing import get_context
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from torch import Tensor

from bench.gpu_checks_kernels import error
from bench.gpu_checks_quantised import noise
from bench.gpu_tune_quantised import LAYOUTS, Case, cases
from semspec.model.kernels import reference
from semspec.model.kernels.int4 import Int4Config, int4_product
from semspec.model.kernels.quantised import prepare, quantised_product
from semspec.model.kernels.tiles import card_of
from semspec.model.quantised import QuantisedLinear

Job = tuple[Case, int, Int4Config | None]  # rows; None: quantised.py
MOST = 0.02  # off float64, of its size


def wanted(case: Case, rows: int, number: int) -> list[Int4Config]:
    """The best by the rule of thumb, and variants of the very best: registers without a limit, or fewer; loads where
    the assembler puts them; no codes on their way before it may start."""
    _, _, _, size, parts, gated = case
    card = card_of(torch.device("cuda"))
    ordered = sorted(Int4Config.all(size, rows, parts, gated), key=lambda cut: cut.cost(size, card))
    one = ordered[0]
    fewer = 128 if one.registers == 168 else 0
    return list(
        dict.fromkeys(
            [*ordered[:number], replace(one, registers=0), replace(one, registers=fewer), replace(one, ordered=False),
             replace(one, ahead=False)]
        )
    )  # fmt: skip


def jobs(models: list[str], rows: list[int], cuts: int) -> list[Job]:
    made: list[Job] = []
    for model in models:
        for case in cases([model], ["int4"]):
            for count in rows if model == "32B" else [n for n in rows if n == 9 or len(models) == 1]:
                number = cuts if model == "32B" else min(cuts, 2)
                made += [(case, count, cut) for cut in (None, *wanted(case, count, number))]
    return made


def one_of(case: Case, fragments: bool) -> QuantisedLinear:
    torch.manual_seed(1)
    linear = noise("int4", case[3], LAYOUTS["int4"], torch.device("cuda"))
    linear.bias = None
    prepare(linear, fragments=fragments)
    assert linear.fragments == fragments
    return linear


def exact(case: Case, x: Tensor) -> Tensor:
    """Some thousand outputs at a time: float64 of a whole matrix takes 4 GB."""
    torch.manual_seed(1)
    linear = noise("int4", case[3], LAYOUTS["int4"], x.device)
    parts = []
    for begin in range(0, case[3][0], 4096):
        rows = slice(begin, begin + 4096)
        zeros = None if linear.zeros is None else linear.zeros[rows]
        part = replace(linear, codes=linear.codes[rows], scales=linear.scales[rows], zeros=zeros, bias=None)
        parts.append(x.double() @ part.dequantised(torch.float64).T)
    made = torch.cat(parts, 1)
    return reference.act_and_mul(made, "silu") if case[5] else made


def launch(case: Case, linear: QuantisedLinear, x: Tensor, cut: Int4Config | None) -> Tensor:
    activation = "silu" if case[5] else None
    if linear.fragments:
        made = int4_product(x, linear, case[4], activation, cut=cut)
    else:
        made = quantised_product(x, linear, case[4], activation)
    assert made is not None
    return made


def rows_of(case: Case, rows: int) -> Tensor:
    torch.manual_seed(rows)
    return torch.randn(rows, case[3][1], device="cuda", dtype=torch.bfloat16)


def verified(share: list[Job]) -> list[tuple[Job, str]]:
    """What is wrong with each; jobs after one that breaks the device are left out, for another process."""
    found, known = [], dict[tuple[Case, bool], QuantisedLinear]()
    answers = dict[tuple[Case, int], Tensor]()
    for job in share:
        case, rows, cut = job
        try:
            if (case, cut is not None) not in known:
                known = {key: value for key, value in known.items() if key[0] == case}
                known[case, cut is not None] = one_of(case, cut is not None)
            x = rows_of(case, rows)
            if (case, rows) not in answers:
                answers = {(case, rows): exact(case, x)}
            made = launch(case, known[case, cut is not None], x, cut)
            off = error(made.sum(0) if made.dim() == 3 else made, answers[case, rows])
            found.append((job, "" if off < MOST else f"off by {off:.1e}"))
        except Exception as problem:
            found.append((job, f"{type(problem).__name__}: {str(problem)[:300]}"))
            try:
                torch.cuda.synchronize()
            except Exception:
                break
    return found


def shares(todo: list[Job], number: int) -> list[list[Job]]:
    """As even as can be, a matrix at one number of rows in one share where possible."""
    ordered = sorted(range(len(todo)), key=lambda i: (todo[i][0], todo[i][1]))
    size = -(-len(todo) // number)
    return [[todo[i] for i in ordered[begin : begin + size]] for begin in range(0, len(todo), size)]


def verify(todo: list[Job], processes: int, until: float) -> dict[Job, str]:
    told: dict[Job, str] = {}
    for _ in range(3):
        left = [job for job in todo if job not in told]
        if not left or time.time() > until:
            break
        with ProcessPoolExecutor(processes, get_context("spawn")) as pool:
            for future in [pool.submit(verified, share) for share in shares(left, processes)]:
                try:
                    told |= dict(future.result())
                except Exception as problem:  # a process has died: the others' results count, the rest is tried again
                    print("a process ended:", str(problem)[:200], flush=True)
    for (case, rows, cut), problem in told.items():
        if problem:
            print("WRONG", *case[:3], f"{rows} rows", cut or "quantised.py", problem, flush=True)
    return told


def timed(
    case: Case, rows: int, cuts: list[Int4Config | None], repeats: int
) -> Iterator[tuple[Int4Config | None, float]]:
    """Microseconds of each, the median of several turns."""
    read = case[3][0] * case[3][1] // 2
    copies = max(2, min(24, int(4e8 // read)))
    x, graphs = rows_of(case, rows), dict[Int4Config | None, torch.cuda.CUDAGraph]()
    linears = {way: [one_of(case, way) for _ in range(copies)] for way in {cut is not None for cut in cuts}}
    for cut in cuts:
        try:
            launch(case, linears[cut is not None][0], x, cut)
            torch.cuda.synchronize()
            graphs[cut] = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graphs[cut]):
                for linear in linears[cut is not None]:
                    launch(case, linear, x, cut)
        except Exception as problem:
            graphs.pop(cut, None)
            print("FAILED", *case[:3], f"{rows} rows", cut, str(problem)[:200], flush=True)
    found: dict[Int4Config | None, list[float]] = {cut: [] for cut in graphs}
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for turn in range(repeats + 1):
        for cut, graph in graphs.items():
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            if turn:
                found[cut].append(begin.elapsed_time(end) * 1e3 / copies)
    yield from ((cut, statistics.median(times)) for cut, times in found.items())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="32B,1.5B,8B,70B")
    parser.add_argument("--rows", default="9,1,16,32")
    parser.add_argument("--cuts", type=int, default=4)
    parser.add_argument("--processes", type=int, default=14)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=120.0, help="after which nothing new is begun")
    asked = parser.parse_args()
    began, report = time.time(), list[dict[str, object]]()
    todo = jobs(asked.models.split(","), [int(n) for n in asked.rows.split(",")], asked.cuts)
    print(f"{len(todo)} variants", flush=True)
    told = verify(todo, asked.processes, began + asked.seconds / 2)
    print(f"{sum(not problem for problem in told.values())} are right, after {time.time() - began:.0f} s", flush=True)
    sums: dict[tuple[str, int, str], float] = {}
    for case, rows in dict.fromkeys(job[:2] for job in todo):
        right = [cut for c, n, cut in todo if (c, n) == (case, rows) and told.get((c, n, cut), "not run") == ""]
        if time.time() - began > asked.seconds or not right:
            print("left out", *case[:3], f"{rows} rows", flush=True)
            continue
        read = case[3][0] * case[3][1] / 2 * (1 + 4 / 64)  # with a word for each group of 128
        for cut, us in sorted(timed(case, rows, right, asked.repeats), key=lambda one: (one[0] is not None, one[1])):
            told_as = "quantised.py" if cut is None else ", ".join(f"{k} {v}" for k, v in asdict(cut).items())
            print(
                f"{case[0]:>4} {case[2]:>11} {rows:3} rows {us:8.1f} us {read / us / 1e6:5.2f} TB/s  {told_as}",
                flush=True,
            )
            report.append(
                {"matrix": f"{case[0]} {case[2]}", "rows": rows, "us": us, "cut": None if cut is None else asdict(cut)}
            )
            way = (case[0], rows, "before" if cut is None else "best")
            key = (*way[:2], f"{way[2]} {case[2]}")
            sums[key] = min(us, sums.get(key, us))
    for model, rows in dict.fromkeys(key[:2] for key in sums):
        for way in ("before", "best"):
            us = [v for key, v in sums.items() if key[:2] == (model, rows) and key[2].startswith(way)]
            print(f"{model}, {rows} rows: {way} {sum(us):.1f} us for {len(us)} matrices of a layer")
    print(json.dumps(report))


if __name__ == "__main__":
    main()
