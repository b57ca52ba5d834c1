"""What does the test behind `semspec calibrate` need, and is it ever wrong more often than it may be?

    python -m bench.betting --result results/betting-DATE.json    # two minutes on one core

Draws of made-up calibrations: the target is right on 95 % of the problems, a method loses a share of these answers and
gains some of the others. How often is "it loses less than the bound" shown, where it loses nothing, half the bound, or
the bound itself, which may be shown in 5 % of draws at most? And how many problems does a bound need at least?
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np

from semspec.bench.calibrate import excess_p
from semspec.bench.folder import surroundings, write_json
from semspec.statistics import PURSES

RIGHT, CONFIDENCE, DRAWS = 0.95, 0.95, 2000
SPLITS = {"in use": PURSES, "cap 0.9": ((1.0, 0.9),), "cap 0.5": ((1.0, 0.5),), "half each": ((0.5, 0.9), (0.5, 0.5))}
# bound, share of right answers that is lost, share of wrong ones that is gained, problems
CASES = [
    (0.05, 0.025, 0.0, 1000), (0.05, 0.025, 0.0, 3000), (0.05, 0.025, 0.0, 10_000), (0.05, 0.01, 0.0, 400),
    (0.05, 0.0, 0.0, 120), (0.05, 0.0, 0.2, 120), (0.03, 0.01, 0.0, 1000), (0.01, 0.0, 0.0, 500),
    (0.01, 0.002, 0.0, 3000), (0.05, 0.05, 0.0, 200), (0.05, 0.05, 0.0, 3000), (0.05, 0.06053, 0.2, 1000),
    (0.01, 0.01, 0.0, 1000),
]  # fmt: skip


def losses(rng: np.random.Generator, bound: float, lost: float, gained: float, n: int) -> Any:
    """What a method loses beyond the bound, by problem, as `calibrate` counts it."""
    right = (rng.random(n) < RIGHT).astype(float)
    keeps = np.where(right > 0, rng.random(n) >= lost, rng.random(n) < gained)
    return right - keeps - bound * right


def fewest(bound: float, purses: Any) -> int:
    n = 8
    while excess_p([-bound] * n, 0.0, 1 - bound, purses) > 1 - CONFIDENCE:
        n += 1
    return n


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--result", type=Path)
    parser.add_argument("--draws", type=int, default=DRAWS)
    given = parser.parse_args()
    shown = []
    for case in CASES:
        rng, counts = np.random.default_rng(5), dict.fromkeys(SPLITS, 0)
        for _ in range(given.draws):
            values = losses(rng, *case)
            for name, purses in SPLITS.items():
                counts[name] += excess_p(values, 0.0, 1 - case[0], purses) <= 1 - CONFIDENCE
        named = dict(zip(("bound", "lost", "gained", "problems"), case, strict=True))
        shown.append({**named, "shown": {name: count / given.draws for name, count in counts.items()}})
    found = {
        "draws": given.draws, "confidence": CONFIDENCE, "right": RIGHT, "shown": shown,
        "fewest": {f"{b:g}": {name: fewest(b, p) for name, p in SPLITS.items()} for b in (0.01, 0.02, 0.03, 0.05, 0.1)},
    }  # fmt: skip
    print(json.dumps(found, indent=1))
    if given.result:
        write_json(given.result, {**surroundings(), **found})


if __name__ == "__main__":
    main()
