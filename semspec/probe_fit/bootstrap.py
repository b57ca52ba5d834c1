"""The figures of `probe.metrics` for resampled problems, hundreds of draws at once. Intervals come from these.

Steps of one problem are not independent trials, so problems are drawn, with replacement: a draw says how often each is
in it. Nearly every figure follows from sums over rows, and these from sums over each problem's rows, which are made
once. A problem drawn twice is two problems: pairs within a prefix are made within each copy.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from semspec.probe.metrics import BINS, LIKELY, NAN, TINY, numbered, refused_by_rank, wins_within


class Resampled:
    """N rows of `problems` problems, in draws [D, P] that say how often each problem is in a draw."""

    def __init__(self, problems: Sequence[str], prefixes: Sequence[str]) -> None:
        self.problem, self.prefix = numbered(problems), numbered(prefixes)  # [N]
        self.problems = int(self.problem.max()) + 1

    def figures(
        self,
        draws: Tensor,
        predicted: Tensor,
        labels: Tensor,
        valid: Tensor | None = None,
        scores: Tensor | None = None,
    ) -> dict[str, Tensor]:
        """What `metrics.summary` finds in each draw [D]; not a number where a draw has no such figure."""
        scores = predicted if scores is None else scores
        x, y = predicted.double(), labels.double()
        found = self._errors(draws, x, y) | {"ece": self._ece(draws, x, y)}
        kinds = {"": labels >= LIKELY} | ({} if valid is None else {"valid_": valid})
        for kind, positive in kinds.items():
            wins, pairs = self._sums(draws, torch.stack(wins_within(scores, positive, self.prefix), 1))
            found[f"{kind}auroc"] = self._by_rank(draws, auroc_by_rank, scores, positive)
            found[f"{kind}within_prefix_auroc"] = _ratio(wins, pairs)
        if valid is not None:
            found["wrong_refused"] = self._by_rank(draws, refused_by_rank, scores, valid)
        return found

    def _sums(self, draws: Tensor, rows: Tensor) -> Tensor:
        """[D, P], [N, x] -> [x, D]"""
        each = torch.zeros(self.problems, rows.shape[1], dtype=torch.double)
        return (draws @ each.index_add_(0, self.problem, rows)).T

    def _errors(self, draws: Tensor, predicted: Tensor, labels: Tensor) -> dict[str, Tensor]:
        x, y = predicted - predicted.mean(), labels - labels.mean()  # small numbers, whose squares can be subtracted
        columns = torch.stack([torch.ones_like(x), x, y, x * x, y * y, x * y, (predicted - labels).square()], 1)
        n, x1, y1, x2, y2, xy, wrong = self._sums(draws, columns)
        spread_x, spread_y, both = x2 - x1 * x1 / n, y2 - y1 * y1 / n, xy - x1 * y1 / n
        return {
            "mse": wrong / n,
            "r2": 1 - _ratio(wrong, spread_y),
            "correlation": _ratio(both, (spread_x.clamp_min(0) * spread_y.clamp_min(0)).sqrt()),
        }

    def _ece(self, draws: Tensor, predicted: Tensor, labels: Tensor) -> Tensor:
        bins = (predicted * BINS).long().clamp(0, BINS - 1)
        off = torch.zeros(len(predicted), BINS, dtype=torch.double)
        off.scatter_(1, bins[:, None], (predicted - labels)[:, None])
        return self._sums(draws, off).abs().sum(0) / self._sums(draws, torch.ones_like(off[:, :1]))[0]

    def _by_rank(
        self, draws: Tensor, figure: Callable[[Tensor, Tensor], Tensor], scores: Tensor, positive: Tensor
    ) -> Tensor:
        """What follows from how many negatives and positives have each score, across problems: each draw by itself."""
        values, rank = scores.double().unique(return_inverse=True)
        side = rank + len(values) * positive
        counts = (torch.bincount(side, times[self.problem], minlength=2 * len(values)) for times in draws)
        return torch.stack([figure(*each.view(2, -1)) for each in counts])


def auroc_by_rank(bad: Tensor, good: Tensor) -> Tensor:
    """From how many have each score [S], the lowest first."""
    below = bad.cumsum(0) - bad / 2  # ties count half
    return _ratio(good @ below, good.sum() * bad.sum())


def _ratio(top: Tensor, bottom: Tensor) -> Tensor:
    """Where nothing is left to divide by, but for rounding, there is no figure."""
    return torch.where(bottom > TINY, top / bottom.clamp_min(TINY), NAN)
