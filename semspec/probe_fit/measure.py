"""How good a probe is on rows it was not trained on, and how much better than what is cheaper; with intervals.

For all rows and, where both models wrote some, for each model's alone: the figures of `probe.metrics`, the same of the
baselines, and the difference to each. All intervals are 95 % (BCa), from the same draws of problems, so a difference
is between predictors on the same rows; it is clear if its interval has nothing on the wrong side of 0.
"""

from __future__ import annotations

from collections.abc import Callable
from math import isnan
from typing import Any

import torch
from torch import Tensor

from semspec.probe import metrics
from semspec.probe_fit.bootstrap import Resampled
from semspec.probe_fit.rows import Rows
from semspec.statistics import Array, bootstrap

LOWER_IS_BETTER = ("mse", "ece")
MIN_PROBLEMS = 5  # with fewer there is no interval: their draws are nearly all the same
Predictor = tuple[Tensor, Tensor]  # probabilities [N], and scores to rank by [N]
PARTS = ("test", "test_own_steps", "test_other_steps")


def measure(test: Rows, predicted: Tensor, raw: Tensor, known: Rows) -> dict[str, Any]:
    """All figures on the test rows. Baselines are fitted to the known rows, of the same writers."""
    found: dict[str, Any] = {}
    for name, chosen in zip(PARTS, _writers(test), strict=True):
        if chosen is None:
            continue
        same = dict(zip(PARTS, _writers(known), strict=True))[name]
        part, learnt = test.where(chosen), known if same is None else known.where(same)
        found[name] = _compare(part, predicted[chosen], baselines(learnt, part))
    found["test_uncalibrated"] = metrics.summary(raw, test.labels, test.prefixes, test.valid)
    return found


def _writers(rows: Rows) -> tuple[Tensor | None, ...]:
    """Which rows are all, the model's own, the other's; the latter two only if there are both."""
    every, mixed = torch.ones_like(rows.cross), bool(rows.cross.any() and not rows.cross.all())
    return every, ~rows.cross if mixed else None, rows.cross if mixed else None


def _compare(rows: Rows, predicted: Tensor, others: dict[str, Predictor]) -> dict[str, Any]:
    """A probe's figures with their intervals, and those of its baselines with their differences to the probe's."""
    predictors = {"probe": (predicted, predicted)} | others
    found: dict[str, dict[str, Any]] = {
        name: metrics.summary(p, rows.labels, rows.prefixes, rows.valid, scores)
        for name, (p, scores) in predictors.items()
    }
    own, problems = found.pop("probe"), len(set(rows.problems))
    keys = [key for key in own if key != "n"]
    ends = _intervals(rows, predictors, keys) if problems >= MIN_PROBLEMS else {}
    own["intervals"] = {key: ends.get(("probe", key)) for key in keys}
    for name, figures in found.items():
        figures["intervals"] = {key: ends.get((name, key)) for key in keys}
        figures["difference"] = {
            key: _difference(key, own[key], figures[key], ends.get((name, key, "difference"))) for key in keys
        }
    return own | {"problems": problems, "baselines": found}


def _intervals(
    rows: Rows, predictors: dict[str, Predictor], keys: list[str]
) -> dict[tuple[str, ...], list[float] | None]:
    """(predictor, figure) and (predictor, figure, "difference") -> its interval; None where a draw has no figure."""
    resampled, names = Resampled(rows.problems, rows.prefixes), list[tuple[str, ...]]()

    def figures(counts: Array) -> Array:
        draws = torch.from_numpy(counts)
        drawn = {
            name: resampled.figures(draws, p, rows.labels, rows.valid, scores)
            for name, (p, scores) in predictors.items()
        }
        found: dict[tuple[str, ...], Tensor] = {(name, key): drawn[name][key] for name in drawn for key in keys}
        found |= {(name, key, "difference"): drawn["probe"][key] - drawn[name][key] for name in drawn for key in keys}
        names[:] = list(found)
        return torch.stack(list(found.values())).numpy()

    low, high = bootstrap(resampled.problems, figures)
    return {
        name: None if isnan(a) else [round(float(a), 4), round(float(b), 4)]
        for name, a, b in zip(names, low, high, strict=True)
    }


def _difference(name: str, own: float | None, other: float | None, ends: list[float] | None) -> dict[str, Any]:
    """Probe less baseline."""
    clear = ends is not None and (ends[1] < 0 if name in LOWER_IS_BETTER else ends[0] > 0)
    value = None if own is None or other is None else round(own - other, 4)
    return {"value": value, "interval": ends, "clearly_better": clear}


def baselines(known: Rows, test: Rows) -> dict[str, Predictor]:
    """Cheaper predictors, by least squares: on the mean log-probability; on length and step number; and on these with
    the operation, where the task knows operations. Probabilities are clamped to [0, 1], scores to rank by are not."""
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
