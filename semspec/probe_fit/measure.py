"""How good a probe is on rows it was not trained on, and how much better than what is cheaper; with intervals.

For all rows and, where both models wrote some, for each model's alone: the figures of `probe.metrics`, the same of the
baselines, and the difference to each. All intervals are 95 %, from the same draws of problems, so a difference is
between predictors on the same rows; it is clear if its interval has nothing on the wrong side of 0.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from semspec.probe import metrics
from semspec.probe_fit.bootstrap import DRAWS, Bootstrap, interval
from semspec.probe_fit.rows import Rows

FEWER = ("mse", "ece")  # figures of which less is better
ENOUGH = 5  # problems without which there is no interval: draws of fewer are nearly all the same
PARTS = ("test", "test_own_steps", "test_other_steps")


def measure(test: Rows, said: Tensor, raw: Tensor, known: Rows, draws: int = DRAWS) -> dict[str, Any]:
    """All figures on the test rows. Baselines are fitted to the known rows, of the same writers."""
    found: dict[str, Any] = {}
    for name, chosen in zip(PARTS, _writers(test), strict=True):
        if chosen is None:
            continue
        same = dict(zip(PARTS, _writers(known), strict=True))[name]
        part, learnt = test.where(chosen), known if same is None else known.where(same)
        found[name] = _compare(part, said[chosen], baselines(learnt, part), draws)
    found["test_uncalibrated"] = metrics.summary(raw, test.labels, test.prefixes, test.valid)
    return found


def _writers(rows: Rows) -> tuple[Tensor | None, ...]:
    """Which rows are all, the model's own, the other's; the latter two only if there are both."""
    every, mixed = torch.ones_like(rows.cross), bool(rows.cross.any() and not rows.cross.all())
    return every, ~rows.cross if mixed else None, rows.cross if mixed else None


def _compare(rows: Rows, said: Tensor, others: dict[str, tuple[Tensor, Tensor]], draws: int) -> dict[str, Any]:
    """A probe's figures with their intervals, and those of its baselines with what they lack."""
    redraws, enough = Bootstrap(rows.problems, rows.prefixes, draws), len(set(rows.problems)) >= ENOUGH

    def of(said: Tensor, scores: Tensor) -> tuple[dict[str, Any], dict[str, Tensor]]:
        drawn = redraws.figures(said, rows.labels, rows.valid, scores)
        figures: dict[str, Any] = metrics.summary(said, rows.labels, rows.prefixes, rows.valid, scores)
        return figures | {"intervals": {k: interval(values) if enough else None for k, values in drawn.items()}}, drawn

    own, drawn = of(said, said)
    found = {}
    for name, other in others.items():
        figures, theirs = of(*other)
        gain = {key: _difference(key, own[key], figures[key], drawn[key] - theirs[key], enough) for key in drawn}
        found[name] = figures | {"difference": gain}
    return own | {"problems": len(set(rows.problems)), "baselines": found}


def _difference(name: str, own: float | None, other: float | None, drawn: Tensor, enough: bool) -> dict[str, Any]:
    """Probe less baseline."""
    bounds = interval(drawn) if enough else None
    clear = bounds is not None and (bounds[1] < 0 if name in FEWER else bounds[0] > 0)
    value = None if own is None or other is None else round(own - other, 4)
    return {"value": value, "interval": bounds, "clearly_better": clear}


def baselines(known: Rows, test: Rows) -> dict[str, tuple[Tensor, Tensor]]:
    """What cheaper predictors say, and how they rank, by least squares: on the mean log-probability; on length and step
    number; and on these with the operation, where the task knows operations.

    Said are probabilities; what lies beyond 0 or 1 still ranks."""
    predictors: dict[str, Callable[[Rows], Tensor]] = {
        "logprob": lambda r: r.logprob[:, None],
        "length_and_step": lambda r: r.surface[:, :2],
    }
    if known.surface.shape[1] > 2:
        predictors["length_step_and_operation"] = lambda r: r.surface
    found = {}
    for name, of in predictors.items():
        columns = [torch.cat([of(r), torch.ones(len(r), 1)], dim=1).double() for r in (known, test)]
        weights = torch.linalg.lstsq(columns[0], known.labels.double()[:, None], driver="gelsd").solution
        scores = (columns[1] @ weights)[:, 0]
        found[name] = (scores.clamp(0, 1).float(), scores)
    return found
