"""The plane of accuracy and speed for step rules, from files of results: curves over thresholds, and single rules.

    python bench/steps_plane.py results/steps-plane-2026-11-15.json results/semantic-thresholds-2026-11-15.json \\
        results/semantic-thresholds-b-2026-11-15.json OUT.png

Speed is against the target alone in the same run, so that runs of different days can share a picture.
"""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

CURVES = {
    "semantic:tau=": ("semantic, over tau", "#c2571a"),
    "semantic+:least=": ("semantic+:sample=true,rewrite=sampling, over its threshold", "#1a66c2"),
}
LOWEST, STEP = 85.0, 0.55  # of the picture, in per cent; what is below is told in words. STEP: a line of text
NAMES = {"none": "target alone", "draft": "draft alone"}


def arms_of(path: str) -> dict[str, Any]:
    return {name: arm for run in json.loads(Path(path).read_text())["runs"] for name, arm in run["arms"].items()}


def place(arm: dict[str, Any]) -> tuple[float, float]:
    return (arm["time_ratio"] or {"value": 1.0})["value"], 100 * arm["accuracy"]["share"]


def beside(points: dict[str, tuple[float, float]], near: float = 0.07) -> dict[str, int]:
    """How many lines below its point each label goes, so that those of neighbours do not lie on each other."""
    placed: list[tuple[float, float]] = []
    lines = {}
    for name, (x, y) in sorted(points.items(), key=lambda item: -item[1][1]):
        line = 0
        while any(abs(math.log10(x / other)) < near and abs(y - STEP * line - high) < STEP for other, high in placed):
            line += 1
        placed.append((x, y - STEP * line))
        lines[name] = line
    return lines


def main(rules: str, thresholds: str, best: str, out: str) -> None:
    single, swept = arms_of(rules), arms_of(thresholds)
    figure, axes = plt.subplots(figsize=(10, 6.5), dpi=110)
    for prefix, (label, colour) in CURVES.items():
        points = sorted((float(n.removeprefix(prefix)), *place(a)) for n, a in swept.items() if n.startswith(prefix))
        ends = f"{label}: {points[0][0]:g} to {points[-1][0]:g}"
        axes.plot([x for _, x, _ in points], [y for *_, y in points], "o-", color=colour, label=ends, ms=5, zorder=3)
    found = {n: place(a) for n, a in single.items() if n not in ("semantic", "semantic+")}  # those are on the curves
    now = arms_of(best)
    points = sorted(place(a) for n, a in now.items() if n.startswith("semantic+"))
    axes.plot(
        *zip(*points, strict=True), "o-", color="#0b8a5a", ms=5, label="semantic+, over its threshold: 0.3 to 0.998"
    )
    below = {name: found.pop(name) for name in list(found) if found[name][1] < LOWEST}
    told = "; ".join(f"{NAMES.get(name, name)}: {x:.1f} times, {y:.0f} %" for name, (x, y) in below.items())
    axes.text(0.99, 0.02, f"below: {told}", transform=axes.transAxes, ha="right", size=9)
    lines = beside(found)
    for name, (x, y) in found.items():
        step = name in ("oracle", "none", "draft")
        axes.plot(x, y, "D" if step else "s", color="#333333" if step else "#8a8a8a", ms=5)
        axes.annotate(
            NAMES.get(name, name.split(":")[0]),
            (x, y - STEP * lines[name]),
            (7, -3),
            textcoords="offset points",
            size=8.5,
            color="#333333",
        )
    axes.set_xscale("log")
    axes.set_xticks([0.7, 1, 1.5, 2, 2.5, 3], ["0.7", "1", "1.5", "2", "2.5", "3"])
    axes.minorticks_off()
    axes.set_ylim(LOWEST, 100.2)
    axes.set_xlim(right=3.2)
    axes.set_xlabel("times as fast as the target alone (right is better)")
    axes.set_ylabel("right answers, % (up is better)")
    axes.grid(alpha=0.25)
    axes.legend(loc="lower left", frameon=False)
    figure.tight_layout()
    figure.savefig(out)


if __name__ == "__main__":
    main(*sys.argv[1:])
