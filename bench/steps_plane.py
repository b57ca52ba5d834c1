"""The plane of accuracy and speed for step rules, from files of results: curves over thresholds, and single rules.

    python bench/steps_plane.py results/steps-plane-b-2026-11-15.json results/semantic-thresholds-2026-11-15.json \\
        results/semantic-thresholds-c-2026-11-15.json OUT.png

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
    "semantic": ("tau", "#c2571a"),
    "semantic+": ("least", "#0b8a5a"),
}  # each swept option, its colour
LOWEST, STEP = 85.0, 0.55  # of the picture, in per cent; what is below is listed in words. STEP: a line of text
NAMES = {"none": "target only", "draft": "draft only", "least": "threshold"}  # files have the option's former name


def arms_of(path: str) -> dict[str, Any]:
    return {name: arm for run in json.loads(Path(path).read_text())["runs"] for name, arm in run["arms"].items()}


def position(arm: dict[str, Any]) -> tuple[float, float]:
    return (arm["time_ratio"] or {"value": 1.0})["value"], 100 * arm["accuracy"]["share"]


def beside(points: dict[str, tuple[float, float]], near: float = 0.07) -> dict[str, int]:
    """How many lines below its point (or above) each label goes, so that no two lie on each other."""
    placed: list[tuple[float, float]] = []
    lines = {}
    for name, (x, y) in sorted(points.items(), key=lambda item: -item[1][1]):
        close = [high for other, high in placed if abs(math.log10(x / other)) < near]
        free = (
            line
            for line in (0, -1, 1, -2, 2, -3, 3)
            if all(abs(y - STEP * line - high) > STEP - 0.01 for high in close)
        )
        lines[name] = next(free, 4)
        placed.append((x, y - STEP * lines[name]))
    return lines


def main(rules: str, taus: str, leasts: str, out: str) -> None:
    single, swept = arms_of(rules), {"semantic": arms_of(taus), "semantic+": arms_of(leasts)}
    figure, axes = plt.subplots(figsize=(10, 6.5), dpi=110)
    for rule, (option, colour) in CURVES.items():
        prefix = f"{rule}:{option}="
        arms = {n: a for n, a in swept[rule].items() if n.startswith(prefix)}
        points = sorted((float(n.removeprefix(prefix)), *position(a)) for n, a in arms.items())
        ends = f"{rule}, {NAMES.get(option, option)} from {points[0][0]:g} to {points[-1][0]:g}"
        axes.plot([x for _, x, _ in points], [y for *_, y in points], "o-", color=colour, label=ends, ms=5, zorder=3)
        axes.plot(*position(single[rule]), "*", color=colour, ms=13, zorder=4, label=f"{rule} default")
    found = {n: position(a) for n, a in single.items() if n not in CURVES}
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
    axes.set_xlabel("speedup over the target alone (right is better)")
    axes.set_ylabel("correct answers, % (up is better)")
    axes.grid(alpha=0.25)
    axes.legend(loc="lower left", frameon=False)
    figure.tight_layout()
    figure.savefig(out)


if __name__ == "__main__":
    main(*sys.argv[1:])
