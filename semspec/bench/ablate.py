"""Ablations: a rule with one of its settings changed at a time, as methods for a bench.

Every method is written out in full, so that the point which all series share is run once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from semspec.errors import BadRequest


@dataclass(frozen=True)
class Ablation:
    base: Mapping[str, Any]  # the settings that a series does not change
    series: Mapping[str, Sequence[Any]]  # setting -> the values it takes
    beside: tuple[str, ...] = ()  # methods to compare with


ABLATIONS = {
    # What the paper (arXiv 2511.22972) varies: window (0, 4, 6), entropy gate (0, 0.3), draft length (15, 25), drafting
    # on several levels, which its other runs have throughout. The other values are ours.
    "fly": Ablation(
        base={"window": 6, "theta": 0.3, "k": 15, "drafter": "cascade"},
        series={
            "window": (0, 2, 4, 6, 8), "theta": (0, 0.1, 0.3, 0.6, 1), "k": (8, 10, 15, 20, 25),
            "drafter": ("cascade", "cascade:earliest=true", "model"),
        },
        beside=("exact:k=15,drafter=cascade",),
    ),
    # Ours: the defaults, then each option switched. What the judge sees is fitted, not an option.
    "semantic+": Ablation(
        base={
            "keep": "true", "rewrite": "exact", "rewrite_tokens": 10, "sample": "false", "lead": 0, "steps": 1,
            "part": "false", "draft_min_p": 0,
        },
        series={
            "keep": ("true", "false"), "rewrite": ("exact", "sampling", "typical", ""), "rewrite_tokens": (10, 5),
            "sample": ("false", "true"), "lead": (0, 1), "steps": (1, 4), "part": ("false", "true"),
            "draft_min_p": (0, 0.4),
        },
        beside=("sampling:k=8",),
    ),
}  # fmt: skip


def ablation(spec: str, every: bool = False) -> list[str]:
    """The methods of a rule's ablation, after those it is compared with; with `every`, all combinations of the series'
    values. A rule may bring settings that all of them share: "semantic+:probes=DIR"."""
    rule, _, shared = spec.partition(":")
    if rule not in ABLATIONS:
        raise BadRequest(f"there is no ablation of {rule!r}; there are some of: {', '.join(ABLATIONS)}")
    base, series = dict(ABLATIONS[rule].base), ABLATIONS[rule].series
    base |= {key: value for key, _, value in (item.partition("=") for item in filter(None, shared.split(",")))}
    if every:
        points = [dict(zip(series, values, strict=True)) for values in product(*series.values())]
    else:
        points = [{}, *({name: value} for name, values in series.items() for value in values)]
    methods = [f"{rule}:" + ",".join(f"{k}={v}" for k, v in {**base, **point}.items()) for point in points]
    return [*ABLATIONS[rule].beside, *dict.fromkeys(methods)]
