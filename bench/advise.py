"""Does a benchmark measure what `semspec advise` says? Three pairs: pocket; SmolLM2 with lookups and, if one is given,
a head; a draft as large as its target, which cannot pay.

    python bench/advise.py --pair pocket --pair twin
    python bench/advise.py --pair smollm2 --data DATA --problems 4 --tokens 48     # Spec-Bench prompts; `make smollm2`
    python bench/advise.py --pair smollm2 --target MODEL --drafter eagle:HEAD --data DATA --problems 8 --tokens 48
    python bench/advise.py --pair pocket --splits 200 --problems 60    # how often, over random halves of one run

Advice comes from some problems, the benchmark from others, with the methods and lengths that were advised. Seconds are
this process's CPU time on a CPU, which other work on the machine disturbs less, and the clock's on a GPU. The last line
is JSON: for every method the predicted speedup, the measured one, and whether it is inside. One draw of problems says
little of how often that is so: with `--splits` all problems are answered once, and again and again advice comes from
some of them and is held against as many others.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from semspec import tasks
from semspec.advise.advice import advise, times
from semspec.advise.measure import ALONE, EVERYTHING, Measured, candidates, measure
from semspec.advise.predict import predict
from semspec.bench.folder import load_run, surroundings
from semspec.bench.run import Bench, Config
from semspec.loop import cost_profile
from semspec.pair.loading import load

PAIRS: dict[str, tuple[str, str | None, str]] = {  # target, draft, task
    "pocket": ("pocket", None, "pocket"),
    "twin": ("pocket", str(Path(cost_profile.__file__).parent.parent / "pocket/models/target"), "pocket"),
    "smollm2": (".models/SmolLM2-135M-Instruct.Q4_1.gguf", None, "spec-bench:turns=1"),
}
SIZES = (8, 12, 24)  # of problems that are advised from


def check(name: str, args: argparse.Namespace) -> dict[str, Any]:
    target, draft, task = PAIRS[name]
    target, problems, tokens, device, data = args.target or target, args.problems, args.tokens, args.device, args.data
    draft = args.draft or draft
    pair = load(target, draft, device=device, slots=1)
    clock = time.process_time if pair.target.device.type == "cpu" else time.perf_counter
    pair.executor.clock = clock
    prompts = [p.prompt for p in tasks.make(task, data).problems(problems, 0)]
    tried = candidates(pair, 0.0, ["margin"], args.drafter or ())
    found = measure(pair, prompts, tried, clock=clock, max_new_tokens=tokens)
    if args.splits:
        shares = {str(n): inside(found, n, args.splits) for n in SIZES if 2 * n <= problems}
        print(f"{name:8} {json.dumps(shares)}", flush=True)
        return {"pair": name, "splits": args.splits, "inside": shares}
    advice = advise(found, target, draft, pair.target.device.type, 0.0, 0.1)
    advised = {
        f"{p.candidate.rule}:k={p.draft_tokens},drafter={p.candidate.drafter}": p
        for p in advice.predictions
        if p.candidate.rule != EVERYTHING
    }
    config = Config(
        task, list(advised), problems, target, draft, str(data) if data else None, seed=1, max_new_tokens=tokens,
        controls=False,
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        Bench(config, pair, clock).run(Path(folder))
        _, samples = load_run(Path(folder))
    seconds = {arm: sum(s["seconds"] for s in samples if s["arm"] == arm) for arm in ("none", *advised)}
    rows = []
    for method, p in advised.items():
        speedup = seconds["none"] / seconds[method]
        within = bool(p.speedup.low <= speedup <= p.speedup.high)
        rows.append({"method": method, "predicted": p.speedup.as_dict(), "measured": speedup, "inside": within})
        print(
            f"{name:8} {method:34} predicted {times(p.speedup)}, measured {speedup:.2f}x{'' if within else '  OUTSIDE'}"
        )
    print(f"{name:8} {advice.headline}", flush=True)
    return {"pair": name, "pays": advice.pays, "headline": advice.headline, "methods": rows}


def inside(found: Measured, n: int, splits: int) -> dict[str, float]:
    """By method, at the draft length that was run: in which share of draws a benchmark of n prompts lies within what is
    predicted from n others."""
    rng, total = np.random.default_rng(n), len(found.answers[ALONE])
    hits = dict.fromkeys((c for c in found.answers if c != ALONE), 0)
    for _ in range(splits):
        order = rng.permutation(total)
        given, others = order[:n], order[n : 2 * n]
        some = {c: [answers[i] for i in given] for c, answers in found.answers.items()}
        for p in predict(replace(found, answers=some))[1]:
            alone, drafted = (sum(found.answers[c][i].seconds for i in others) for c in (ALONE, p.candidate))
            told = p.by_length[p.candidate.draft_tokens]
            hits[p.candidate] += bool(told.low <= alone / drafted <= told.high)
    return {f"{c.rule}:k={c.draft_tokens},drafter={c.drafter}": count / splits for c, count in hits.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pair", action="append", choices=PAIRS, help="default: all")
    parser.add_argument("--target", help="another file or folder of the pair's target")
    parser.add_argument("--draft", help="another draft model of the pair")
    parser.add_argument("--drafter", action="append", help="a drafter to try besides, e.g. eagle:HEAD")
    parser.add_argument("--data", type=Path, help="folder with the data sets")
    parser.add_argument("--problems", type=int, default=12)
    parser.add_argument("--tokens", type=int, default=128, help="longest answer")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--splits", type=int, help="draws of problems to advise from; nothing else is measured")
    args = parser.parse_args()
    found = [check(name, args) for name in args.pair or PAIRS]
    print(json.dumps({**surroundings(), "problems": args.problems, "tokens": args.tokens, "pairs": found}))


if __name__ == "__main__":
    main()
