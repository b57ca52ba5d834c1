"""Shares with intervals, and the bars a pair must meet to be an instrument."""

from __future__ import annotations

from dataclasses import dataclass
from math import sqrt
from typing import Any


@dataclass(frozen=True)
class Share:
    """So many of so many, with Wilson's 95 % interval, which stays honest near 0 and 1."""

    hits: int
    total: int

    @property
    def value(self) -> float:
        return self.hits / self.total if self.total else float("nan")

    @property
    def interval(self) -> tuple[float, float]:
        if not self.total:
            return 0.0, 1.0
        z, n = 1.96, self.total
        middle = (self.value + z * z / (2 * n)) / (1 + z * z / n)
        half = z * sqrt(self.value * (1 - self.value) / n + z * z / (4 * n * n)) / (1 + z * z / n)
        return max(0.0, middle - half), min(1.0, middle + half)

    def as_dict(self) -> dict[str, Any]:
        low, high = self.interval
        return {"share": self.value, "low": low, "high": high, "hits": self.hits, "total": self.total}

    def __str__(self) -> str:
        low, high = self.interval
        return f"{100 * self.value:.1f} % [{100 * low:.1f}, {100 * high:.1f}]"


def bars(figures: dict[str, Any]) -> list[dict[str, Any]]:
    """Each bar: what was measured, between which limits it must lie, and whether it does."""
    target, draft = figures["target T 0.6"], figures["draft T 0.6"]
    limits: list[tuple[str, Any, float, float]] = [
        ("target correct", target["correct"], 0.90, 1.0),
        ("draft correct", draft["correct"], 0.50, 0.75),
        ("target invalid steps", target["invalid"], 0.0, 0.012),
        ("draft invalid steps", draft["invalid"], 0.04, 0.08),
        ("lossless tau at K=8", figures["lossless"]["tau"], 2.5, 4.5),
        ("greedy mismatches followed by six matches", figures["six_after_mismatch"], 0.30, 1.0),
        ("prefixes where the majority meaning holds under 90 %", figures["open_meaning"], 0.30, 1.0),
        ("valid draft steps worded differently", figures["worded_differently"], 1 / 3, 1.0),
    ]
    out = []
    for name, found, low, high in limits:
        value = found.value if isinstance(found, Share) else found
        out.append({"bar": name, "found": found, "low": low, "high": high, "met": low <= value <= high})
    return out


def table(figures: dict[str, Any]) -> str:
    """The bars, then everything else that was measured, for people."""
    lines = []
    for bar in bars(figures):
        found = bar["found"] if isinstance(bar["found"], Share) else f"{bar['found']:.2f}"
        verdict = "met " if bar["met"] else "MISSED"
        lines.append(f"{verdict:7}{bar['bar']:54}{found!s:26} wanted {bar['low']:.3g} to {bar['high']:.3g}")
    lines.append("")
    for name, entry in figures.items():
        if isinstance(entry, Share):
            lines.append(f"{name}: {entry}")
            continue
        for key, value in entry.items():
            if isinstance(value, dict):
                value = "  ".join(f"{steps}: {share}" for steps, share in value.items())
            lines.append(f"{name}, {key}: {value if not isinstance(value, float) else f'{value:.3f}'}")
    return "\n".join(lines)
