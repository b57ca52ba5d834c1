"""How often is an arm that loses just the margin called equivalent? 5 % is what the verdict allows.

    python -m bench.equivalence --out results    # two minutes on one core

Right and wrong answers by enumeration: every pair of counts of answers lost and gained, with its probability. Graded
differences by simulation: noise, and some answers that lose much.
"""

from __future__ import annotations

import argparse
import json
from datetime import date
from functools import lru_cache
from itertools import product
from pathlib import Path

import numpy as np
from scipy import stats

from semspec.bench.tost import equivalence_p
from semspec.bench.verdict import ALPHA

MARGINS, GAINS = (0.01, 0.03, 0.05, 0.1), (0.0, 0.002, 0.005, 0.02)
SIZES = (50, 60, 88, 100, 147, 170, 200, 230, 300, 400, 600, 1000)
GRADED = ((0.03, 0.5, 0.05), (0.03, 0.5, 0.01), (0.03, 0.5, 0.0), (0.1, 0.3, 0.02), (0.02, 1.0, 0.1), (0.02, 1.0, 0.01),
          (0.01, 1.0, 0.01), (0.2, 0.2, 0.05), (0.2, 0.2, 0.01))  # fmt: skip
GRADED_SIZES, DRAWS = (8, 20, 50, 100, 200, 400), 2000
SELDOM = 1e-6  # outcomes that are rarer than that are left out


@lru_cache(None)
def called(gained: int, lost: int, n: int, margin: float) -> bool:
    gaps = [1.0] * gained + [-1.0] * lost + [0.0] * (n - gained - lost)
    p = equivalence_p(gaps, [0.0] * n, margin)
    return p is not None and p < ALPHA


def error(n: int, margin: float, gains: float) -> float:
    """The chance of "equivalent" where the margin and the gains are lost, and the gains gained."""
    total = 0.0
    for lost, chance in enumerate(stats.binom.pmf(np.arange(n + 1), n, margin + gains)):
        if chance < SELDOM:
            continue
        for gained, also in enumerate(stats.binom.pmf(np.arange(n - lost + 1), n - lost, gains / (1 - margin - gains))):
            if also >= SELDOM and called(gained, lost, n, margin):
                total += chance * also
    return float(total)


def graded_error(n: int, rare: float, size: float, noise: float) -> float:
    """The same where that share of answers loses so much, give or take a half, and all have noise."""
    rng, wrong = np.random.default_rng([n, round(1000 * rare), round(1000 * noise)]), 0
    for _ in range(DRAWS):
        gaps = rng.normal(0, noise, n) - size * rng.uniform(0.5, 1.5, n) * (rng.random(n) < rare)
        p = equivalence_p(gaps.tolist(), [0.0] * n, rare * size, size, 1.5 * size)
        wrong += p is not None and p < ALPHA
    return wrong / DRAWS


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="folder for a dated file")
    asked = parser.parse_args()
    right = [
        {"margin": m, "gained": g, "problems": n, "called_equivalent": round(error(n, m, g), 4)}
        for m, g, n in product(MARGINS, GAINS, SIZES)
    ]
    graded = [
        {"spoilt": rare, "loses": size, "noise": noise, "problems": n,
         "called_equivalent": round(graded_error(n, rare, size, noise), 4)}
        for (rare, size, noise), n in product(GRADED, GRADED_SIZES)
    ]  # fmt: skip
    document = {
        "date": date.today().isoformat(),
        "most": {name: max(row["called_equivalent"] for row in rows)
                 for name, rows in (("right or wrong", right), ("graded", graded))},
        "right_or_wrong": right,
        "graded": graded,
    }  # fmt: skip
    print(json.dumps(document["most"]))
    if asked.out:
        (asked.out / f"equivalence-{document['date']}.json").write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
