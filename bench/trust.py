"""How far can measures without right answers be trusted, and does calibration keep its promise? On the pocket pair,
where right answers are known.

    python -m bench.trust --out runs/trust --problems 400 --processes 16 --result results/trust-DATE.json
    python -m bench.trust --out runs/trust --problems 400 --analyse --judge http://HOST/v1 --judge-model NAME

One run of 20 methods and settings on problems of the split `probe`, with the measures and controls of prompts without
answers. Then, from its samples: each measure's rank correlation with accuracy over the methods, with an interval over
problems; a planted fault, one digit of the answer swapped in 2 % of the target's texts; and calibrations of each rule,
with answers and without, on 200 random splits of the problems: chosen on one half, judged by the other.

Judge models that were asked (`--judge`) are measures, too. `--judge planted` asks none, but a server of this benchmark
that knows the right answers: it shows what a useful judge would look like.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy import stats

import semspec
from bench import trust_judge
from semspec.bench.agreement import WORDS
from semspec.bench.arms import BASELINE, DRAFT
from semspec.bench.calibrate import bounded, loosest_safe
from semspec.bench.folder import Sample, key_of, load_run, surroundings, write_json
from semspec.bench.likelihood import likelihoods, summed_up
from semspec.bench.measures import JUDGE, MEANING, NUMBER, compare_measures, values_of
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
SPLITS, CONFIDENCE = 200, 0.95
LOSSES, SHARES = (0.03, 0.05, 0.1), (0.25, 0.5)
Outcomes = dict[str, dict[str, list[float]]]  # measure -> arm -> value of each problem


def config(problems: int) -> Config:
    return Config(
        task="pocket:split=probe", methods=METHODS, n=problems, seed=901, batch=16, max_new_tokens=400, context=1024,
        device="cpu", dtype="float32", controls=True, resamples=3,
    )  # fmt: skip


def correlations(run: dict[str, Any], samples: list[Sample], extra: Any) -> dict[str, Any]:
    """Of each measure's loss with the loss of right answers, over the methods; intervals from resampled problems. None
    where all methods lose the same. An arm's mean is over the problems where its value is known, as in tables."""
    arms = [arm["name"] for arm in run["arms"] if arm["role"] in ("method", "draft")]
    correct = {key_of(s): float(s["correct"]) for s in samples}
    rng, found = np.random.default_rng(0), {}
    words = values_of(run, samples, {})[MEANING]
    for name, values in {**values_of(run, samples, extra), WORDS: words}.items():
        problems = [p for arm, p, _ in map(key_of, samples) if arm == BASELINE and (arm, p, 0) in values]
        table, right = (
            np.array([[seen[BASELINE, p, 0] - seen.get((arm, p, 0), np.nan) for p in problems] for arm in arms])
            for seen in (values, correct)
        )
        drawn = [rng.integers(0, table.shape[1], table.shape[1]) for _ in range(1000)]
        ranks = [known for d in drawn if (known := _rank(table[:, d], right[:, d])) is not None]
        low, high = np.quantile(ranks, [0.025, 0.975]).tolist() if ranks else (None, None)
        rank = _rank(table, right)
        found[name] = {"spearman": rank, "low": low, "high": high, "methods": len(arms), "problems": len(problems)}
    return found


def _rank(ours: np.ndarray, right: np.ndarray) -> float | None:
    known = ~np.isnan(ours)
    some = known.any(1)
    means = np.where(known, ours, 0.0).sum(1)[some] / known.sum(1)[some], right.mean(1)[some]
    if any(np.ptp(one) == 0 for one in means):
        return None
    return float(stats.spearmanr(*means).statistic)


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


def separated(run: dict[str, Any], samples: list[Sample], extra: Any) -> dict[str, Any]:
    """By measure: whether `random`, and the draft alone, can be told from the target."""
    about = compare_measures(run, samples, Margin(), extra)[1]
    return {name: {what: one[what] for what in ("separates_random", "separates_draft")} for name, one in about.items()}


def careless_choice(losses: Sequence[Sequence[float]], bound: float) -> int | None:
    """The loosest whose mean loss on these problems is under the bound."""
    return max((i for i, one in enumerate(losses) if np.mean(one) < bound), default=None)


def splits(table: np.ndarray, bound: float, most: float, seed: int) -> dict[str, Any]:
    """Settings by problems of losses: chosen on one half of the problems, judged by the other, again and again. A half
    is noisy, so a good choice may look broken there; `surely` is beyond that noise, by a one-sided test at 5 %.
    `careless` takes the loosest that looks good."""
    rng, half = np.random.default_rng(seed), table.shape[1] // 2
    count = dict.fromkeys(("broken", "broken_surely", "careless_broken", "careless_broken_surely", "none_safe"), 0)
    chosen = [0] * len(table)
    for _ in range(SPLITS):
        order = rng.permutation(table.shape[1])
        seen, unseen = table[:, order[:half]].tolist(), table[:, order[half:]]
        careful = loosest_safe(seen, bound, CONFIDENCE, most)
        count["none_safe"] += careful is None
        for name, at in (("broken", careful), ("careless_broken", careless_choice(seen, bound))):
            if at is not None and unseen[at].mean() > bound:
                count[name] += 1
                count[f"{name}_surely"] += bool(
                    stats.ttest_1samp(unseen[at], bound, alternative="greater").pvalue < 0.05
                )
        if careful is not None:
            chosen[careful] += 1
    losses = (table.mean(1) - bound).round(4).tolist()  # on all problems; above 0: beyond the bound
    return {**count, "splits": SPLITS, "losses": losses, "chosen": chosen}


def outcomes_of(run: dict[str, Any], samples: list[Sample], extra: Any) -> Outcomes:
    """What every arm got on every problem: all that calibrations need, so other splits need no run."""
    values = {"accuracy": {key_of(s): float(s["correct"]) for s in samples},
              NUMBER: bounded(NUMBER, values_of(run, samples, extra)[NUMBER])}  # fmt: skip
    arms = [arm["name"] for arm in run["arms"] if arm["role"] in ("target", "method", "draft")]
    found: Outcomes = {}
    for name, seen in values.items():
        problems = sorted({key[1] for key in seen})
        problems = [p for p in problems if all((arm, p, 0) in seen for arm in arms)]
        found[name] = {arm: [round(seen[arm, p, 0], 4) for p in problems] for arm in arms}
    return found


def calibrations(outcomes: Outcomes) -> dict[str, Any]:
    """With answers and without, at several bounds, for every rule with more than one setting. A bound just below the
    loss of a setting is the hardest for a calibrator; `random` has settings that lose much. Bounds are shares: of the
    target's right answers, or of its distance to the draft."""
    lost = {
        name: {arm: np.array(arms[BASELINE]) - np.array(seen) for arm, seen in arms.items()}
        for name, arms in outcomes.items()
    }
    right, number, own = lost["accuracy"], lost[NUMBER], np.array(outcomes["accuracy"][BASELINE])
    found: dict[str, Any] = {}
    for rule, methods in LADDERS.items():
        found[rule] = {}
        table = np.stack([right[m] for m in methods])
        lost_shares = table.mean(1) / max(own.mean(), 1e-12)
        hardest = [round(one - 0.005, 4) for one in lost_shares.tolist() if one > LOSSES[0]]
        for loss in (*LOSSES, *hardest):
            found[rule][f"with answers, {loss:g}"] = splits(table - loss * own, 0.0, 1 - loss, 1)
        for share in SHARES:
            beyond = np.stack([number[m] - share * number[DRAFT] for m in methods])
            found[rule][f"without, {share:g}"] = splits(beyond, 0.0, 1.0, 2)
    return found


def run_share(problems: int, part: int, parts: int, out: Path) -> Path:
    """Every process answers its own share of the problems with all arms; a run that was cut goes on."""
    torch.set_num_threads(1)
    bench = Bench(config(problems))
    bench.problems = bench.problems[part::parts]
    bench.run(
        out, lambda done, total: print(f"share {part}: {done} of {total}", flush=True) if done % 25 == 0 else None
    )
    return out


def whole_run(out: Path) -> tuple[dict[str, Any], list[Sample]]:
    """The shares as one run; only problems that every arm has answered."""
    parts = sorted(out.glob("share-*"))
    runs = [load_run(part) for part in parts]
    if not runs:
        raise SystemExit(f"{out} has no shares of a run; leave out --analyse")
    run, samples = runs[0][0], [sample for _, some in runs for sample in some]
    answered = [{s["problem"] for s in samples if s["arm"] == arm["name"]} for arm in run["arms"]]
    common = set.intersection(*answered)
    return run, [s for s in samples if s["problem"] in common]


def told(done: int, pairs: int) -> None:
    if done % 50 == 0 or done == pairs:
        print(f"judge: {done} of {pairs} pairs of answers, two requests each", flush=True)


def report(found: dict[str, Any], result: Path | None) -> None:
    print(json.dumps({key: value for key, value in found.items() if key not in ("figures", "outcomes")}, indent=1))
    if result:
        write_json(result, {**surroundings(), **found})


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--problems", type=int, default=400)
    parser.add_argument("--result", type=Path)
    parser.add_argument("--processes", type=int, default=1, help="each answers a share; as before, to go on")
    parser.add_argument(
        "--outcomes", type=Path, help="only calibrations again, from what an earlier result has of a run"
    )
    parser.add_argument("--analyse", action="store_true", help="do not run anything; take what is in the folder")
    parser.add_argument("--judge", help="a server's address up to /v1, or: planted")
    parser.add_argument("--judge-model", default="")
    parser.add_argument("--judge-problems", type=int, help="all by default")
    parser.add_argument("--judge-parallel", type=int, default=32, help="requests at a time")
    given = parser.parse_args()
    if given.outcomes:
        written = json.loads(given.outcomes.read_text())["outcomes"]
        kept = {
            name: {arm: [float(value) for value in text.split()] for arm, text in arms.items()}
            for name, arms in written.items()
        }
        again = {"outcomes_of": given.outcomes.name, "confidence": CONFIDENCE, "calibration": calibrations(kept)}
        report(again, given.result)
        return
    if given.out is None:
        parser.error("say where to keep the run with --out DIR")
    if given.judge not in (None, trust_judge.NAME) and not given.judge_model:
        parser.error("say which model judges with --judge-model NAME")
    if not given.analyse:
        shares = [(given.problems, i, given.processes, given.out / f"share-{i:02}") for i in range(given.processes)]
        with ProcessPoolExecutor(given.processes, get_context("spawn")) as pool:
            list(pool.map(run_share, *zip(*shares, strict=True)))
    run, samples = whole_run(given.out)
    bench = Bench(config(given.problems))
    problems, undamaged = {s["problem"] for s in samples}, list(samples)
    outcomes = outcomes_of(run, undamaged, {})
    plant_damage(run, samples, bench.pair, bench)
    with trust_judge.judge_at(
        given.judge, given.judge_model, given.judge_problems or given.problems, given.judge_parallel, bench
    ) as judge:
        extra, by = outside_measures(given.out, run, samples, judge=judge, progress=told)
    extra.pop(JUDGE, None)  # that is the last one asked
    judges = trust_judge.measures(given.out, run, samples)
    extra |= judges
    found = {
        "problems": len(problems), "encoder": by.get(MEANING, ""), "methods": len(METHODS),
        "correlation": correlations({**run, "arms": run["arms"][:-1]}, undamaged, extra),
        "damage": damage(run, samples, extra), "tells": separated(run, samples, extra),
        "judges": trust_judge.habits(given.out, samples, judges), "confidence": CONFIDENCE,
        "calibration": calibrations(outcomes),
        "accuracy": {
            arm["name"]: float(np.mean([s["correct"] for s in samples if s["arm"] == arm["name"]]))
            for arm in run["arms"]
        },
        "figures": compare_measures(run, samples, Margin(), extra)[0],
        "outcomes": {
            name: {arm: " ".join(f"{value:g}" for value in seen) for arm, seen in arms.items()}
            for name, arms in outcomes.items()
        },
    }  # fmt: skip
    report(found, given.result)


if __name__ == "__main__":
    main()
