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
from dataclasses import dataclass
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


@dataclass
class World:
    """A run in numbers, [repeats, problems] each; `own`: of the arm, else of the target alone."""

    steps: Any
    length: Any
    identical: Any
    own_length: Any
    rounds: Any
    right: Any
    own_right: Any
    capped: Any
    accepted: Any
    invalid: Any
    refused: Any
    seconds: Any
    own_seconds: Any

    @staticmethod
    def draw(rng: np.random.Generator, n: int, batch: int, repeats: int, ease: float) -> World:
        size = (repeats, n)
        hard = rng.normal(size=n)
        steps = np.broadcast_to(2 + rng.poisson(np.exp(1 + 0.5 * hard)), size)
        length = np.ceil(steps * 4 * rng.lognormal(0, 0.25, size))
        identical = rng.random(size) < 0.2 + 0.2 * ease
        own_length = np.where(identical, length, np.ceil(length * rng.lognormal(0, 0.2, size)))
        rounds = np.ceil(own_length / (4 * rng.lognormal(0, 0.2, n)))
        right = rng.random(size) < 1 / (1 + np.exp(0.8 * hard + rng.normal(size=n) - ease))
        invalid = rng.binomial(steps, 0.2, size)
        return World(
            steps, length, identical, own_length, rounds, right,
            own_right=np.where(right, rng.random(size) > 0.3, rng.random(size) < 0.1),
            capped=rng.random(size) < 1 / (1 + np.exp(1 + ease - hard)),
            accepted=rng.binomial(steps, np.broadcast_to(rng.beta(2 + 2 * ease, 1.5, n), size)),
            invalid=invalid,
            refused=rng.binomial(invalid, np.broadcast_to(rng.beta(3, 2, n), size)),
            seconds=shared(rng, length, batch),
            own_seconds=shared(rng, 2 * rounds, batch),
        )  # fmt: skip

    def totals(self) -> dict[str, tuple[float, float]]:
        """What each figure is the ratio of."""
        n, right, seconds = self.right.size, self.own_right.sum(), self.own_seconds.sum()
        wrongly = (self.invalid - self.refused).sum()
        return {
            "accuracy": (right, n),
            "cap_rate": (self.capped.sum(), n),
            "identical_outputs": (self.identical.sum(), n),
            "steps_accepted": (self.accepted.sum() + wrongly, self.steps.sum() + self.invalid.sum()),
            "invalid_refused": (self.refused.sum(), self.invalid.sum()),
            "tau_interval": (self.own_length.sum(), self.rounds.sum()),
            "length_ratio": (self.own_length.sum(), self.length.sum()),
            "passes_ratio": (self.length.sum(), self.rounds.sum()),
            "retention": (right, self.right.sum()),
            "accuracy_difference": (right - float(self.right.sum()), n),
            "seconds_per_problem": (seconds, n),
            "seconds_per_correct": (seconds, right),
            "time_ratio": (self.seconds.sum(), seconds),
            "target_time_ratio": (self.seconds.sum(), seconds),
        }

    def samples(self) -> Iterator[dict[str, Any]]:
        """The run as its folder would have it."""
        for r, i in np.ndindex(*self.right.shape):
            both = {"problem": f"p/{i}", "index": i, "repeat": r, "group": None}
            length, own_length, rounds = (int(x[r, i]) for x in (self.length, self.own_length, self.rounds))
            tokens = list(range(length))
            yield both | sample("none", tokens, self.seconds[r, i], length, self.right[r, i], False, [])
            steps, accepted, invalid, refused = (
                int(x[r, i]) for x in (self.steps, self.accepted, self.invalid, self.refused)
            )
            kinds = {("accepted", None): accepted, ("rejected", None): steps - accepted}
            kinds |= {("rejected", False): refused, ("accepted", False): invalid - refused}
            judged = [{"outcome": outcome, "valid": valid} for (outcome, valid), k in kinds.items() for _ in range(k)]
            own = tokens if self.identical[r, i] else list(range(1, own_length + 1))
            yield both | sample(
                "fly", own, self.own_seconds[r, i], rounds, self.own_right[r, i], self.capped[r, i], judged
            )


def shared(rng: np.random.Generator, cost: Any, batch: int) -> Any:
    """[repeats, n] each problem's share of what its batch takes: the longest decides, and others cost a little."""
    found = np.empty_like(cost)
    for begin in range(0, cost.shape[1], batch):
        own = cost[:, begin : begin + batch]
        noise = rng.lognormal(0, 0.05, len(own))
        found[:, begin : begin + batch] = ((own.max(1) + 0.05 * own.sum(1)) * noise / own.shape[1])[:, None]
    return found


def sample(
    arm: str, tokens: list[int], seconds: float, rounds: int, right: Any, capped: Any, judged: list[dict[str, Any]]
) -> dict[str, Any]:
    stats = {
        "rounds": rounds, "drafted": len(tokens), "accepted": len(tokens) - rounds, "relaxed": 0, "tau": 1.0,
        "tokens": len(tokens), "target_passes": rounds, "histogram": {}, "accepted_per_position": [],
        "drafted_per_position": [], "seconds": {"score": 0.5 * seconds, "verify": 0.1 * seconds},
    }  # fmt: skip
    return {
        "arm": arm, "tokens": tokens, "correct": bool(right), "finish_reason": "length" if capped else "stop",
        "seconds": float(seconds), "drafted_steps": judged, "stats": stats,
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
        worlds = [World.draw(rng, n, batch, repeats, ease) for _ in range(runs // len(EASE))]
        every = [w.totals() for w in worlds]
        every += [World.draw(rng, n, batch, repeats, ease).totals() for _ in range(truth_from // n)]
        truth = {name: sum(t[name][0] for t in every) / sum(t[name][1] for t in every) for name in every[0]}
        for world in worlds:
            for name, found in intervals(list(world.samples()), batch):
                if name in truth:
                    hits = held.setdefault(name, [])
                    if found is not None and found["low"] is not None:
                        hits.append(found["low"] <= truth[name] <= found["high"])
    return {
        name: {
            "coverage": round(float(np.mean(hits)), 4) if hits else None,
            "none_given": round(1 - len(hits) / (runs // len(EASE) * len(EASE)), 4),
        }
        for name, hits in held.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=1000, help="simulated runs of each size")
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
