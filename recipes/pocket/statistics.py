"""Shares with intervals, and the bars a pair must meet to be an instrument."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import Any

from semspec.bench.statistics import Share


@dataclass
class Cycles:
    """Lossless speculation on numbers only: at each position the draft's token has a known acceptance probability."""

    tokens: int = 0
    cycles: int = 0
    accepted: int = 0
    tested: int = 0
    agreement: float = 0.0

    def play(self, chances: list[float], k: int, rng: Random) -> None:
        """One text, in cycles of `k` proposals."""
        self.tokens += len(chances)
        self.agreement += sum(chances)
        position = 0
        while position < len(chances):
            self.cycles += 1
            for _ in range(k):
                if position >= len(chances):
                    break
                self.tested += 1
                if rng.random() >= chances[position]:
                    break
                self.accepted += 1
                position += 1
            position += 1  # the target's own token: a correction, or the one after a full draft

    def figures(self) -> dict[str, float]:
        """Tokens per target pass, acceptance per tested proposal, and per token of the text."""
        return {
            "tau": self.tokens / self.cycles,
            "accepted": self.accepted / self.tested,
            "agreement": self.agreement / self.tokens,
        }


AHEAD = 16


def six_follow(match: list[bool]) -> bool | None:
    """Whether six matches follow the first mismatch; None where there is none, or no six tokens after it."""
    first = match.index(False) if False in match else len(match)
    return all(match[first + 1 : first + 7]) if first + 6 < len(match) else None


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
