"""Part of bench/trust.py: judge models held against right answers. What was said is kept in the run's folder, so a cut
run goes on, and to analyse needs no judge.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bench.planted_judge import NAME, planted_judge
from semspec.bench.agreement import Values
from semspec.bench.folder import Sample, key_of
from semspec.bench.judge_model import JudgeModel, Kept, Opinion, digest, kept, verdicts
from semspec.bench.run import Bench

MEASURE = "judge: {}"
ORDERS = "took the first", "took the second", "tie", "unreadable"
PREFERENCES = "right", "wrong", "neither"


@contextmanager
def judge_at(where: str | None, model: str, problems: int, parallel: int, bench: Bench) -> Iterator[JudgeModel | None]:
    """`where`: a server's address, or that of none, `planted`."""
    if where == NAME:
        with planted_judge(bench.problems) as url:
            yield JudgeModel(url, NAME, problems, parallel)
    else:
        yield None if where is None else JudgeModel(where, model, problems, parallel)


def measures(folder: Path, run: Mapping[str, Any], samples: Sequence[Sample]) -> dict[str, Values]:
    """Of every model that was ever asked, each a measure of its own."""
    roles = {arm["name"]: arm["role"] for arm in run["arms"]}
    models = dict.fromkeys(line.model for line in kept(folder))
    return {MEASURE.format(model): verdicts(folder, samples, roles, model) for model in models}


def habits(folder: Path, samples: Sequence[Sample], values: Mapping[str, Values]) -> dict[str, Any]:
    """By judge: how it replies, what it costs, and how often it prefers the right one of a right and a wrong answer."""
    found, by_key = {}, {key_of(s): s for s in samples}
    for model in dict.fromkeys(line.model for line in kept(folder)):
        asked = [(line, line.opinion) for line in kept(folder) if line.model == model and line.opinion]
        problems = {problem for _, problem, _ in values[MEASURE.format(model)]}
        found[model] = {
            "problems": len(problems), "pairs_asked": len(asked), "requests": 2 * len(asked),
            "tokens_read": sum(opinion.tokens[0] for _, opinion in asked),
            "tokens_written": sum(opinion.tokens[1] for _, opinion in asked),
            "replies": _shares([_said(reply) for _, opinion in asked for reply in opinion.replies], ORDERS),
            # "Took the first" in both orders, or the second: the place decided, not the answer.
            "orders_contradict": sum(set(o.replies) <= {0.0, 1.0} and o.value == 0.5 for _, o in asked),
            "of_right_and_wrong": _shares(list(_preferences(asked, by_key)), PREFERENCES),
        }  # fmt: skip
    return found


def _said(reply: float | None) -> str:
    return ORDERS[3] if reply is None else {1.0: ORDERS[0], 0.0: ORDERS[1]}.get(reply, ORDERS[2])


def _preferences(asked: Sequence[tuple[Kept, Opinion]], by_key: Mapping[Any, Sample]) -> Iterator[str]:
    """Of each pair that was read and of which one is right: which was preferred."""
    for line, opinion in asked:
        _, problem, repeat = line.key
        ours, theirs = by_key.get(line.key), by_key.get(("none", problem, repeat))
        if not ours or not theirs or line.texts not in (None, digest(ours, theirs)):  # of answers that were made again
            continue
        if bool(ours["correct"]) != bool(theirs["correct"]) and opinion.value is not None:
            right = opinion.value if ours["correct"] else 1 - opinion.value
            yield PREFERENCES[0] if right > 0.5 else PREFERENCES[1] if right < 0.5 else PREFERENCES[2]


def _shares(seen: Sequence[str], names: Sequence[str]) -> dict[str, Any]:
    return {"of": len(seen)} | {name: seen.count(name) / len(seen) if seen else None for name in names}
