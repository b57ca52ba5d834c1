"""How often do the intervals of `semspec bench` hold the truth? 95 % is what they say.

    python -m bench.coverage --out results    # a quarter of an hour on one core

Runs of a made-up world go through `summarise` and `compare_to` as real ones do. Problems differ in difficulty: hard
ones are longer, have more reasoning steps and are solved less often. Repeats of a problem are alike. A batch of
problems takes about as long as its longest, and all of them share that time. The truth of a figure is the ratio of its
expected totals over many runs of the same size and batch. Shares of a few problems take few values, so the coverage of
one truth says little: it is averaged over tasks from hard to easy. All figures with an interval are counted but
`loop_rate` and the accuracy of groups, which are computed as `cap_rate` and `accuracy` are.

Fewer than two complete batches have no interval of seconds ("none_given"). Right answers compared by pairs have wider
intervals than needed where few pairs differ, as at 12 problems: narrower ones would be wrong where an arm only loses.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np

from semspec.bench.compare_to import compare_to
from semspec.bench.summary import summarise

PROBLEMS, BATCHES, REPEATS = (12, 50, 200), (1, 8, 32), (1, 3)
ARM = {"verifier": "fly", "lossless": False, "num_draft_tokens": 8}
RUN_ARMS = [{"name": "none", "role": "target"} | ARM, {"name": "fly", "role": "method"} | ARM]
EASE = (0.0, 0.5, 1.0, 1.5, 2.0)  # tasks from hard to easy; coverage is averaged over them
TRUTH = 20_000  # problems more from which the truth is known
Totals = dict[str, tuple[float, float]]  # figure -> what its ratio is made of


def world(
    rng: np.random.Generator, n: int, batch: int, repeats: int, ease: float
) -> tuple[list[dict[str, Any]], Totals]:
    """The samples of one run, and the totals of which its figures are ratios."""
    size = (repeats, n)
    hard = rng.normal(size=n)
    steps = 2 + rng.poisson(np.exp(1 + 0.5 * hard))
    length = np.ceil(steps * 4 * rng.lognormal(0, 0.25, size))
    identical = rng.random(size) < 0.2 + 0.2 * ease
    own_length = np.where(identical, length, np.ceil(length * rng.lognormal(0, 0.2, size)))
    rounds = np.ceil(own_length / (4 * rng.lognormal(0, 0.2, n)))
    right = rng.random(size) < 1 / (1 + np.exp(0.8 * hard + rng.normal(size=n) - ease))
    own_right = np.where(right, rng.random(size) > 0.3, rng.random(size) < 0.1)
    capped = rng.random(size) < 1 / (1 + np.exp(1 + ease - hard))
    accepted = rng.binomial(steps, np.broadcast_to(rng.beta(2 + 2 * ease, 1.5, n), size))
    invalid = rng.binomial(steps, 0.2, size)
    refused = rng.binomial(invalid, np.broadcast_to(rng.beta(3, 2, n), size))
    seconds, own_seconds = (shared(rng, cost, batch) for cost in (length, 2 * rounds))
    samples = []
    for r, i in np.ndindex(*size):
        both = {"problem": f"p/{i}", "index": i, "repeat": r, "group": None}
        tokens = list(range(int(length[r, i])))
        samples.append(both | sample("none", tokens, seconds[r, i], int(length[r, i]), bool(right[r, i]), False, []))
        judged = [{"fate": "accepted" if k < accepted[r, i] else "refused", "valid": None} for k in range(steps[i])]
        judged += [
            {"fate": "refused" if k < refused[r, i] else "accepted", "valid": False} for k in range(invalid[r, i])
        ]
        own = tokens if identical[r, i] else list(range(1, int(own_length[r, i]) + 1))
        samples.append(
            both
            | sample(
                "fly", own, own_seconds[r, i], int(rounds[r, i]), bool(own_right[r, i]), bool(capped[r, i]), judged
            )
        )
    verified = float(repeats * steps.sum() + invalid.sum())
    totals = {
        "accuracy": (own_right.sum(), own_right.size),
        "cap_rate": (capped.sum(), capped.size),
        "identical_outputs": (identical.sum(), identical.size),
        "steps_accepted": (accepted.sum() + (invalid - refused).sum(), verified),
        "invalid_refused": (refused.sum(), invalid.sum()),
        "tau_interval": (own_length.sum(), rounds.sum()),
        "length_ratio": (own_length.sum(), length.sum()),
        "passes_ratio": (length.sum(), rounds.sum()),
        "retention": (own_right.sum(), right.sum()),
        "accuracy_difference": (own_right.sum() - float(right.sum()), right.size),
        "seconds_per_problem": (own_seconds.sum(), own_seconds.size),
        "seconds_per_correct": (own_seconds.sum(), own_right.sum()),
        "time_ratio": (seconds.sum(), own_seconds.sum()),
        "target_time_ratio": (seconds.sum(), own_seconds.sum()),
    }
    return samples, {name: (float(top), float(bottom)) for name, (top, bottom) in totals.items()}


def shared(rng: np.random.Generator, cost: Any, batch: int) -> Any:
    """[repeats, n] each problem's share of what its batch takes: the longest decides, and others cost a little."""
    found = np.empty_like(cost)
    for begin in range(0, cost.shape[1], batch):
        own = cost[:, begin : begin + batch]
        noise = rng.lognormal(0, 0.05, len(own))
        found[:, begin : begin + batch] = ((own.max(1) + 0.05 * own.sum(1)) * noise / own.shape[1])[:, None]
    return found


def sample(
    arm: str, tokens: list[int], seconds: float, rounds: int, right: bool, capped: bool, judged: list[dict[str, Any]]
) -> dict[str, Any]:
    stats = {
        "steps": rounds, "drafted": len(tokens), "accepted": len(tokens) - rounds, "relaxed": 0, "tau": 1.0,
        "tokens": len(tokens), "target_passes": rounds, "histogram": {}, "accepted_per_position": [],
        "drafted_per_position": [], "seconds": {"score": 0.5 * seconds, "judge": 0.1 * seconds},
    }  # fmt: skip
    return {
        "arm": arm, "tokens": tokens, "correct": right, "finish_reason": "length" if capped else "stop",
        "seconds": float(seconds), "judged": judged, "stats": stats,
    }  # fmt: skip


def intervals(samples: list[dict[str, Any]], batch: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """Every figure of the arm that has an interval."""
    run = {"arms": RUN_ARMS, "config": {"batch": batch}}
    yield from summarise(run, samples)["arms"]["fly"].items()
    yield "passes_ratio", compare_to(run, samples, "none")["fly"]["passes_ratio"]


def simulate(
    n: int, batch: int, repeats: int, runs: int, truth_from: int = TRUTH
) -> dict[str, dict[str, float | None]]:
    """figure -> the share of its intervals that hold the truth, and of runs in which it has none."""
    held: dict[str, list[bool]] = {}
    for task, ease in enumerate(EASE):
        rng = np.random.default_rng([task, n, batch, repeats])
        made = [world(rng, n, batch, repeats, ease) for _ in range(runs // len(EASE))]
        more = [world(rng, n, batch, repeats, ease)[1] for _ in range(truth_from // n)]
        every = [totals for _, totals in made] + more
        for name in every[0]:
            held.setdefault(name, [])
        truth = {name: sum(t[name][0] for t in every) / sum(t[name][1] for t in every) for name in held}
        for samples, _ in made:
            for name, found in intervals(samples, batch):
                if name in held and found is not None and found["low"] is not None:
                    held[name].append(found["low"] <= truth[name] <= found["high"])
    return {
        name: {
            "coverage": round(float(np.mean(hits)), 4) if hits else None,
            "none_given": round(1 - len(hits) / (runs // len(EASE) * len(EASE)), 4),
        }
        for name, hits in held.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=4000, help="simulated runs of each size")
    parser.add_argument("--out", type=Path, help="folder for a dated file")
    asked = parser.parse_args()
    rows = []
    for n in PROBLEMS:
        for batch in BATCHES:
            for repeats in REPEATS:
                rows.append(
                    {
                        "problems": n,
                        "batch": batch,
                        "repeats": repeats,
                        "figures": simulate(n, batch, repeats, asked.runs),
                    }
                )
                print(json.dumps(rows[-1]), flush=True)
    worst = {
        name: [min(found), max(found)]
        for name in rows[0]["figures"]
        if (found := [c for row in rows if (c := row["figures"][name]["coverage"]) is not None])
    }
    document = {"date": date.today().isoformat(), "runs": asked.runs, "lowest_and_highest": worst, "rows": rows}
    if asked.out:
        (asked.out / f"coverage-{document['date']}.json").write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
