"""Counts of a run: histograms by round, from which the rest is derived."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

SECONDS = ("draft", "score", "verify", "host", "capture")  # the last: of graphs on a GPU, once for each size of pass
FORMER = {"rejected": "refused"}  # what records before 2026-11-18 call the outcome of a step


def current_outcomes(counts: Mapping[str, int]) -> Counter[str]:
    """Steps by outcome, of a record of today or before."""
    now = {former: name for name, former in FORMER.items()}
    found: Counter[str] = Counter()
    for name, count in counts.items():
        found[now.get(name, name)] += count
    return found


@dataclass(slots=True)
class Stats:
    """Counts of committed tokens only: tokens == accepted + bonus, always.

    The time of a pass over several sequences is split equally, so that `seconds` of pooled stats add up to wall time.
    """

    drafts: Counter[int] = field(default_factory=Counter)  # draft length -> rounds
    paths: Counter[int] = field(default_factory=Counter)  # the same, of tree drafts by their longest path
    histogram: Counter[int] = field(default_factory=Counter)  # accepted draft tokens -> rounds
    relaxed: int = 0
    bonus: int = 0
    step_outcomes: Counter[str] = field(default_factory=Counter)  # outcome -> reasoning steps; see step_decoder.py
    candidates: Counter[int] = field(default_factory=Counter)  # that were judged for one step -> steps, if several were
    taken_candidates: Counter[int] = field(default_factory=Counter)  # which of them was accepted, from 0 -> steps
    loops: int = 0  # times a lossy rule repeated itself and was replaced by `exact`
    entropy: float = 0.0  # of the target where drafts were verified, in nats, summed over `entropy_tokens`
    entropy_tokens: int = 0
    target_passes: int = 0  # that verified or generated; prefill does not count
    cached_tokens: int = 0  # of the prompt, found in the target's prefix cache
    preempted: int = 0  # times that its cache entries were dropped for older sequences, and recomputed
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(SECONDS, 0.0))
    calls: Counter[str] = field(default_factory=Counter)  # round trips to servers: target, draft; and "draft lost"

    def observe(
        self, drafted: int, accepted: int, relaxed: int = 0, bonus: int = 1, longest: int | None = None
    ) -> None:
        """Record one round. `longest`: tokens on the longest path, of a tree draft."""
        self.drafts[drafted] += 1
        self.paths[drafted if longest is None else longest] += 1
        self.histogram[accepted] += 1
        self.relaxed += relaxed
        self.bonus += bonus

    @property
    def rounds(self) -> int:
        return self.histogram.total()

    @property
    def drafted(self) -> int:
        return sum(n * rounds for n, rounds in self.drafts.items())

    @property
    def accepted(self) -> int:
        return sum(n * rounds for n, rounds in self.histogram.items())

    @property
    def tokens(self) -> int:
        return self.accepted + self.bonus

    @property
    def tau(self) -> float:
        """Mean acceptance length, the bonus token included: 1 + accepted / rounds."""
        return 1.0 + self.accepted / self.rounds if self.rounds else 1.0

    @property
    def proposed(self) -> int:
        """Draft tokens that could have been accepted: of tree drafts, those of the longest path."""
        return sum(n * rounds for n, rounds in self.paths.items())

    @property
    def acceptance_rate(self) -> float:
        """Of the tokens that could have been accepted; of chains, of all that were drafted."""
        return self.accepted / self.proposed if self.proposed else 0.0

    @property
    def acceptance_per_position(self) -> list[float]:
        """Entry i: the share of rounds with a draft token i, on whichever path, in which one was accepted."""
        accepted = self.accepted_per_position
        drafted = self.drafted_per_position
        return [(accepted[i] if i < len(accepted) else 0) / n for i, n in enumerate(drafted)]

    @property
    def mean_entropy(self) -> float | None:
        """None where it was not counted."""
        return self.entropy / self.entropy_tokens if self.entropy_tokens else None

    @property
    def accepted_per_position(self) -> list[int]:
        """Entry i: rounds in which draft token i was accepted."""
        longest = max(self.histogram, default=0)
        return [sum(rounds for n, rounds in self.histogram.items() if n > i) for i in range(longest)]

    @property
    def drafted_per_position(self) -> list[int]:
        """Entry i: rounds in which a draft token i was proposed, on whichever path."""
        longest = max(self.paths, default=0)
        return [sum(rounds for n, rounds in self.paths.items() if n > i) for i in range(longest)]

    def __add__(self, other: Stats) -> Stats:
        def both(name: str) -> Any:
            own, others = getattr(self, name), getattr(other, name)
            return {k: own[k] + others[k] for k in SECONDS} if name == "seconds" else own + others

        return Stats(*(both(f.name) for f in fields(self)))

    @staticmethod
    def pooled(many: Iterable[Stats]) -> Stats:
        return sum(many, Stats())

    def to_dict(self) -> dict[str, Any]:
        return {
            "rounds": self.rounds,
            "steps": self.rounds,  # the former name, for one release
            **{name: getattr(self, name) for name in ("drafted", "accepted", "relaxed", "bonus", "loops", "tokens")},
            "tau": self.tau,
            "acceptance_rate": self.acceptance_rate,
            "drafts": {str(n): self.drafts[n] for n in sorted(self.drafts)},
            "histogram": {str(n): self.histogram[n] for n in sorted(self.histogram)},
            "accepted_per_position": self.accepted_per_position,
            "drafted_per_position": self.drafted_per_position,
            "acceptance_per_position": self.acceptance_per_position,
            "step_outcomes": dict(self.step_outcomes),
            # The same under its former name, for readers of it; goes with the next release.
            "fates": {FORMER.get(name, name): count for name, count in self.step_outcomes.items()},
            **(
                {
                    "candidates": {str(n): self.candidates[n] for n in sorted(self.candidates)},
                    "taken_candidates": {str(n): self.taken_candidates[n] for n in sorted(self.taken_candidates)},
                }
                if self.candidates
                else {}
            ),
            **({"mean_entropy": self.mean_entropy} if self.entropy_tokens else {}),
            "target_passes": self.target_passes,
            "cached_tokens": self.cached_tokens,
            "preempted": self.preempted,
            "seconds": dict(self.seconds),
        } | ({"calls": dict(self.calls)} if self.calls else {})
