"""Settings of a rule that `calibrate` tries, from the strictest to the loosest.

One option's values are in that order as they are given. Several options together have no such order by themselves: all
combinations are ordered by their speed, on problems that no loss is tested on, so that the order says nothing of those.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from math import prod
from pathlib import Path

from semspec import verify
from semspec.bench.folder import RunFolder
from semspec.bench.run import Bench
from semspec.errors import BadRequest
from semspec.pair.result import Result

PILOT = 16  # problems on which combinations are tried to see how fast they are
MOST = 64  # combinations; each is run on all problems
FORM = "theta=0.6,0.3; of several options together: theta=0.6,0.3;window=8,6"
# Strictest first. Rules of other packages, and other options, are given by the user.
LADDERS: dict[str, tuple[str, tuple[float, ...]]] = {
    "fly": ("theta", (0.9, 0.6, 0.45, 0.3, 0.15, 0)),
    "typical": ("epsilon", (0.5, 0.3, 0.09, 0.03, 0.01)),
    "topk": ("delta", (0.1, 0.3, 0.6, 0.9)),
    "margin": ("ratio", (0.9, 0.5, 0.3, 0.1, 0.03)),
    "threshold": ("single", (0.5, 0.3, 0.1, 0.05, 0.02)),
    "ensemble": ("weight", (0.9, 0.7, 0.5, 0.3)),
    "cascade-rule": ("alpha", (0.02, 0.05, 0.1, 0.2, 0.4)),
    "adaptive": ("scale", (0.25, 0.5, 1, 2)),
    "mars": ("ratio", (0.98, 0.95, 0.9, 0.8, 0.6)),
    "regret": ("budget", (0.25, 0.5, 1, 2, 4)),
    "ears": ("tolerance", (0.05, 0.1, 0.3, 0.5)),
    "csd": ("ratio", (0.3, 0.1, 0.03, 0.01)),
    "random": ("rate", (0.02, 0.05, 0.1, 0.25, 0.5)),
    "semantic": ("tau", (1, 0.9, 0.7, 0.5, 0.3)),
    "semantic+": ("threshold", (0.98, 0.95, 0.9, 0.8, 0.5, 0.2)),
    "specreason": ("threshold", (9, 8, 7, 5, 3)),
    "likely-step": ("threshold", (-0.05, -0.1, -0.2, -0.5, -1)),
    "glimprouter": ("threshold", (0.1, 0.25, 0.5, 1, 2)),
    "confspec": ("sure", (0.99, 0.95, 0.9, 0.7)),
    "random-step": ("rate", (0.05, 0.1, 0.3, 0.7)),
}


def candidates(rule: str, values: str | None) -> list[str]:
    """Methods, the strictest first. `values` names an option and what it takes, as "theta=0.6,0.3", or several with
    semicolons between them: then all combinations, those first that are strict by most options."""
    name, _, shared = rule.partition(":")
    if verify.make(name).lossless:
        raise BadRequest(f"{name!r} is lossless: there is nothing to calibrate; use it as it is")
    if values is None:
        if name not in LADDERS:
            raise BadRequest(
                f"there is no list of settings for {name!r}; give one, the strictest first: --values OPTION=V1,V2"
            )
        taken = {LADDERS[name][0]: [f"{value:g}" for value in LADDERS[name][1]]}
    else:
        taken = _taken(values)
    if (count := prod(map(len, taken.values()))) > MOST:
        raise BadRequest(f"--values has {count} combinations, and each is run on all problems; give {MOST} at most")
    ranked = sorted(product(*(range(len(steps)) for steps in taken.values())), key=sum)
    settings = [[f"{o}={taken[o][i]}" for o, i in zip(taken, ranks, strict=True)] for ranks in ranked]
    return [f"{name}:" + ",".join([*filter(None, [shared]), *one]) for one in settings]


def several(values: str | None) -> bool:
    """Whether they are of several options, so that only speed can order them."""
    return values is not None and len(_taken(values)) > 1


def _taken(values: str) -> dict[str, list[str]]:
    taken: dict[str, list[str]] = {}
    for part in filter(str.strip, values.split(";")):
        option, _, text = part.partition("=")
        steps = list(dict.fromkeys(value.strip() for value in text.split(",") if value.strip()))
        if not steps or not option.strip():
            raise BadRequest(f"--values is {values!r}; give an option and its values, the strictest first: {FORM}")
        if option.strip() in taken:
            raise BadRequest(f"--values has {option.strip()!r} twice; give all its values at once, with commas between")
        taken[option.strip()] = steps
    if not taken:
        raise BadRequest(f"--values is {values!r}; give an option and its values, the strictest first: {FORM}")
    return taken


def order_by_speed(bench: Bench, out: Path) -> None:
    """Put a bench's methods in the order of their speed, the slowest first, by some of its problems, which are then no
    part of the run. A run that goes on has its order already."""
    total = len(bench.problems)
    if total <= PILOT:
        raise BadRequest(
            f"{PILOT} problems order the candidates and are not tested; there are {total}, give more with --problems"
        )
    taken = {i * total // PILOT for i in range(PILOT)}  # from everywhere, since files are often sorted
    pilot, rest = ([p for i, p in enumerate(bench.problems) if (i in taken) == wanted] for wanted in (True, False))
    methods, known = bench.config.methods, ((RunFolder(out).before() or {}).get("config") or {}).get("methods", ())
    if sorted(known) == sorted(methods):
        methods = list(known)
    else:
        arms = {arm.name: arm for arm in bench.arms}
        speeds = {name: tokens_per_pass(bench.tried(arms[name], pilot)) for name in methods}
        methods = sorted(methods, key=lambda name: speeds[name])  # of equal ones the stricter stays before the looser
    bench.problems = rest
    bench.config = replace(bench.config, methods=methods)
    place = {name: i for i, name in enumerate(methods)}
    bench.arms.sort(key=lambda arm: place.get(arm.name, -1))  # the target and other controls stay before them


def tokens_per_pass(results: Sequence[Result]) -> float:
    """Of the target: the same on any machine, and whatever else it is doing."""
    return sum(r.stats.tokens for r in results) / max(1, sum(r.stats.target_passes for r in results))
