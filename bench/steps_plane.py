"""The plane of accuracy and speed for step rules, from files of results: curves over thresholds, and single rules.

    python bench/steps_plane.py results/semantic-cpu-2026-11-15.json results/semantic-thresholds-2026-11-15.json OUT.png

Speed is against the target alone in the same run, so that runs of different days can share a picture.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

CURVES = {
    "semantic:tau=": ("semantic, over tau", "#c2571a"),
    "semantic+:least=": ("semantic+, over its threshold", "#1a66c2"),
}
SHIFTS = {
    "oracle": (-6, 9),
    "sampling:k=4": (-4, 9),
    "sampling:k=8": (-52, -16),
    "fly:k=15": (-10, -17),
    "none": (-36, -17),
}
NAMES = {"none": "target alone", "draft": "draft alone"}


def arms_of(path: str) -> dict[str, Any]:
    return {name: arm for run in json.loads(Path(path).read_text())["runs"] for name, arm in run["arms"].items()}


def place(arm: dict[str, Any]) -> tuple[float, float]:
    return (arm["time_ratio"] or {"value": 1.0})["value"], 100 * arm["accuracy"]["share"]


def main(rules: str, thresholds: str, out: str) -> None:
    single, swept = arms_of(rules), arms_of(thresholds)
    figure, axes = plt.subplots(figsize=(9, 5.2), dpi=110)
    for prefix, (label, colour) in CURVES.items():
        points = sorted((float(n.removeprefix(prefix)), *place(a)) for n, a in swept.items() if n.startswith(prefix))
        axes.plot([x for _, x, _ in points], [y for *_, y in points], "o-", color=colour, label=label, ms=5)
        for threshold, x, y in points:
            axes.annotate(
                f"{threshold:g}", (x, y), (0, 7), textcoords="offset points", color=colour, size=8, ha="center"
            )
    for name, arm in single.items():
        if name in ("semantic", "semantic+"):
            continue  # they are on the curves
        x, y = place(arm)
        low, high = (100 * arm["accuracy"][end] for end in ("low", "high"))
        axes.errorbar(x, y, [[y - low], [high - y]], fmt="s", color="#555555", ms=5, alpha=0.8, elinewidth=0.8)
        shift = SHIFTS.get(name, (8, -3))
        axes.annotate(NAMES.get(name, name), (x, y), shift, textcoords="offset points", size=9)
    axes.set_xscale("log")
    axes.set_xticks([0.8, 1, 1.5, 2, 3, 5], ["0.8", "1", "1.5", "2", "3", "5"])
    axes.minorticks_off()
    axes.set_xlabel("times as fast as the target alone (right is better)")
    axes.set_ylabel("right answers, % (up is better)")
    axes.grid(alpha=0.25)
    axes.legend(loc="lower left", frameon=False)
    figure.tight_layout()
    figure.savefig(out)


if __name__ == "__main__":
    main(*sys.argv[1:])
