"""How far can measures without right answers be trusted, and does calibration keep its promise? On the pocket pair,
where right answers are known.

    .venv/bin/python bench/trust.py --out runs/trust --problems 400 --result results/trust-DATE.json

One run of 20 methods and settings on problems of the split `probe`, with the measures and controls of prompts without
answers. Then, from its samples: each measure's rank correlation with accuracy over the methods, with an interval over
problems; a planted fault, one digit of the answer swapped in 2 % of the target's texts; and 200 calibrations of each
rule, with answers and without, on problems drawn at random from the run's, whose loss on all of them is the truth.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from scipy import stats

import semspec
from semspec.bench.agreement import WORDS, key_of
from semspec.bench.calibrate import bounded, loosest_safe, losses_of
from semspec.bench.folder import Sample, load_run, write_json
from semspec.bench.likelihood import likelihoods, summed_up
from semspec.bench.measures import MEANING, NUMBER, compare_measures, values_of
from semspec.bench.outside import outside_measures
from semspec.bench.run import Bench, Config
from semspec.bench.verdict import Margin
from semspec.text.tokenizer import encode

K = 15
LADDERS = {
    "fly": [f"fly:k={K},theta={v}" for v in (0.6, 0.45, 0.3, 0)],
    "typical": [f"typical:k={K},epsilon={v}" for v in (0.09, 0.01)],
    "topk": [f"topk:k={K},delta={v}" for v in (0.3, 0.6, 0.9)],
    "random": [f"random:k={K},rate={v}" for v in (0.1, 0.25, 0.5, 0.75)],
    "semantic+": [f"semantic+:threshold={v}" for v in (0.95, 0.8, 0.2)],
}
OTHERS = ["random-step:rate=0.7", f"accept-all:k={K}", f"margin:k={K},ratio=0.1", f"cascade-rule:k={K}"]
METHODS = [*(method for ladder in LADDERS.values() for method in ladder), *OTHERS]
DAMAGED, DAMAGE = "one digit swapped", 0.02
DRAWS, CONFIDENCE = 200, 0.95
LOSSES, SHARES = (0.03, 0.045, 0.09, 0.12), (0.25, 0.48)  # some just below what a setting of `random` loses


def config(problems: int) -> Config:
    return Config(
        task="pocket:split=probe", methods=METHODS, n=problems, seed=901, batch=16, max_new_tokens=400, context=1024,
        controls=True, resamples=3,
    )  # fmt: skip


def correlations(run: dict[str, Any], samples: list[Sample], extra: Any) -> dict[str, Any]:
    """Of each measure's loss with the loss of right answers, over the methods; intervals from resampled problems."""
    arms = [arm["name"] for arm in run["arms"] if arm["role"] in ("method", "draft")]
    correct = {key_of(s): float(s["correct"]) for s in samples}
    rng, found = np.random.default_rng(0), {}
    words = values_of(run, samples, {})[MEANING]
    for name, values in {**values_of(run, samples, extra), WORDS: words}.items():
        ours = losses_of(samples, arms, values, None)
        truth = losses_of(
            samples, arms, {key: correct[key] for key in values if key in correct}, None
        )  # on the same problems
        table, right = (np.array([losses[arm] for arm in arms]) for losses in (ours, truth))
        drawn = [rng.integers(0, table.shape[1], table.shape[1]) for _ in range(1000)]
        ranks = [stats.spearmanr(table[:, d].mean(1), right[:, d].mean(1)).statistic for d in drawn]
        low, high = np.nanquantile(ranks, [0.025, 0.975])
        rank = stats.spearmanr(table.mean(1), right.mean(1)).statistic
        found[name] = {"spearman": float(rank), "low": float(low), "high": float(high), "methods": len(arms)}
    return found


def plant_damage(run: dict[str, Any], samples: list[Sample], pair: semspec.Pair, bench: Bench) -> None:
    """An arm that writes what the target writes, but for one digit of the last number in 2 % of the answers."""
    own = [s for s in samples if s["arm"] == "none"]
    every = round(1 / DAMAGE)
    prompts = {p.id: p.prompt for p in bench.problems}
    run["arms"].append(run["arms"][0] | {"name": DAMAGED, "role": "method", "lossless": False})
    for i, sample in enumerate(own):
        made = sample | {"arm": DAMAGED}
        if i % every == every // 2:
            made["text"] = re.sub(r"(\d)(\D*)$", lambda m: f"{(int(m[1]) + 1) % 10}{m[2]}", sample["text"])
            written = pair.tokenizer.encode(made["text"], add_special_tokens=False)
            rows = likelihoods(pair.target, [(encode(pair.tokenizer, prompts[sample["problem"]]), written)], 0.0)
            made |= {"tokens": written, "likelihood": summed_up(rows[0])}
            made["correct"] = bench.task.score(
                next(p for p in bench.problems if p.id == sample["problem"]), made["text"]
            )
        samples.append(made)


def damage(run: dict[str, Any], samples: list[Sample], extra: Any) -> dict[str, Any]:
    """By measure: whether the damage is found at 5 %, and the smallest difference that would be."""
    figures, _ = compare_measures(run, samples, Margin(), extra)
    found = {}
    for name, one in figures[DAMAGED].items():
        gap = one["difference"]
        found[name] = {
            "difference": gap["value"], "p": one["p"], "found": bool(one["p"] < 0.05 and gap["value"] < 0),
            "visible_from": (gap["high"] - gap["low"]) / 2,
        }  # fmt: skip
    return found


def careless_choice(losses: Sequence[Sequence[float]], bound: float) -> int | None:
    """The loosest whose mean loss on these problems is under the bound."""
    return max((i for i, one in enumerate(losses) if np.mean(one) < bound), default=None)


def draws(losses: Sequence[Sequence[float]], bound: float, most: float, size: int, seed: int) -> dict[str, Any]:
    """Chosen on problems drawn at random from the run's, again and again; the loss on all of them is then the truth.
    `careless` takes the loosest that looks good."""
    table, rng = np.array(losses), np.random.default_rng(seed)
    truth = table.mean(1)
    count = {"broken": 0, "careless_broken": 0, "none_safe": 0}
    chosen: list[int] = []
    for _ in range(DRAWS):
        seen = table[:, rng.integers(0, table.shape[1], size)].tolist()
        at, loose = loosest_safe(seen, bound, CONFIDENCE, most), careless_choice(seen, bound)
        count["careless_broken"] += bool(loose is not None and truth[loose] > bound)
        count["none_safe"] += at is None
        if at is not None:
            chosen.append(at)
            count["broken"] += bool(truth[at] > bound)
    return {
        **count, "draws": DRAWS, "size": size, "losses": (truth - bound).round(4).tolist(),  # above 0: beyond the bound
        "chosen": [chosen.count(i) for i in range(len(table))],
    }  # fmt: skip


def calibrations(run: dict[str, Any], samples: list[Sample], extra: Any, size: int) -> dict[str, Any]:
    """With answers and without, at several bounds, for every rule with more than one setting."""
    right = {key_of(s): float(s["correct"]) for s in samples}
    number = bounded(NUMBER, values_of(run, samples, extra)[NUMBER])
    found: dict[str, Any] = {}
    for rule, methods in LADDERS.items():
        found[rule] = {}
        for loss in LOSSES:
            losses = losses_of(samples, methods, right, None)
            found[rule][f"with answers, {loss:g}"] = draws([losses[m] for m in methods], loss, 1.0, size, 1)
        for share in SHARES:
            losses = losses_of(samples, methods, number, share)
            found[rule][f"without, {share:g}"] = draws([losses[m] for m in methods], 0.0, 1 + share, size, 2)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--problems", type=int, default=400)
    parser.add_argument("--result", type=Path)
    parser.add_argument("--size", type=int, default=400, help="problems of one calibration")
    parser.add_argument("--analyse", action="store_true", help="do not run anything; take what is in the folder")
    given = parser.parse_args()
    bench = Bench(config(given.problems))
    if not given.analyse:
        bench.run(given.out, lambda done, total: print(f"\r{done} / {total}", end="", flush=True))
    run, samples = load_run(given.out)
    whole = {name: {s["problem"] for s in samples if s["arm"] == name} for name in (arm["name"] for arm in run["arms"])}
    common = set.intersection(*whole.values())
    samples = [s for s in samples if s["problem"] in common]
    plant_damage(run, samples, bench.pair, bench)
    extra, encoder = outside_measures(given.out, run, samples)
    undamaged = [s for s in samples if s["arm"] != DAMAGED]
    found = {
        "problems": len(common), "encoder": encoder, "methods": len(METHODS),
        "correlation": correlations({**run, "arms": run["arms"][:-1]}, undamaged, extra),
        "damage": damage(run, samples, extra), "confidence": CONFIDENCE,
        "calibration": calibrations(run, undamaged, extra, given.size),
        "accuracy": {
            name: float(np.mean([s["correct"] for s in samples if s["arm"] == name])) for name in whole
        },
        "figures": compare_measures(run, samples, Margin(), extra)[0],
    }  # fmt: skip
    print(json.dumps({key: value for key, value in found.items() if key != "figures"}, indent=1))
    if given.result:
        write_json(given.result, found)


if __name__ == "__main__":
    main()
