"""The figures of `probe.metrics` for redrawn problems, hundreds of draws at once. Intervals come from these.

Steps of one problem are not independent trials, so what is drawn, with replacement, are problems: a draw says how often
each is in it. Nearly every figure follows from sums over rows, and these from sums over each problem's rows, which are
made once. A problem drawn twice is two problems: pairs within a prefix are made within each copy.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from semspec.probe.metrics import BINS, LIKELY, NAN, TINY, numbered, refused_by_rank, wins_within

DRAWS = 400


class Bootstrap:
    """Draws of N rows' problems."""

    def __init__(self, problems: Sequence[str], prefixes: Sequence[str], draws: int = DRAWS, seed: int = 0) -> None:
        self.problem, self.prefix = numbered(problems), numbered(prefixes)  # [N]
        count = int(self.problem.max()) + 1
        drawn = torch.randint(count, (draws, count), generator=torch.Generator().manual_seed(seed))
        ones = torch.ones(draws, count, dtype=torch.double)
        self.times = torch.zeros_like(ones).scatter_add_(1, drawn, ones)  # [D, P] how often each problem is drawn

    def figures(
        self, said: Tensor, labels: Tensor, valid: Tensor | None = None, scores: Tensor | None = None
    ) -> dict[str, Tensor]:
        """What `metrics.summary` finds in each draw [D]; not a number where a draw has no such figure."""
        scores = said if scores is None else scores
        found = self._errors(said.double(), labels.double()) | {"ece": self._ece(said.double(), labels.double())}
        kinds = {"": labels >= LIKELY} | ({} if valid is None else {"valid_": valid})
        for kind, positive in kinds.items():
            found[f"{kind}auroc"] = self._by_rank(auroc_by_rank, scores, positive)
            found[f"{kind}within_prefix_auroc"] = self._within(scores, positive)
        if valid is not None:
            found["wrong_refused"] = self._by_rank(refused_by_rank, scores, valid)
        return found

    def _sums(self, rows: Tensor) -> Tensor:
        """[N, x] -> [x, D]"""
        each = torch.zeros(self.times.shape[1], rows.shape[1], dtype=torch.double)
        return (self.times @ each.index_add_(0, self.problem, rows)).T

    def _errors(self, said: Tensor, labels: Tensor) -> dict[str, Tensor]:
        x, y = said - said.mean(), labels - labels.mean()  # small numbers, whose squares can be subtracted
        columns = torch.stack([torch.ones_like(x), x, y, x * x, y * y, x * y, (said - labels).square()], 1)
        n, x1, y1, x2, y2, xy, wrong = self._sums(columns)
        spread_x, spread_y, both = x2 - x1 * x1 / n, y2 - y1 * y1 / n, xy - x1 * y1 / n
        return {
            "mse": wrong / n,
            "r2": 1 - _ratio(wrong, spread_y),
            "correlation": _ratio(both, (spread_x.clamp_min(0) * spread_y.clamp_min(0)).sqrt()),
        }

    def _ece(self, said: Tensor, labels: Tensor) -> Tensor:
        place = (said * BINS).long().clamp(0, BINS - 1)
        off = torch.zeros(len(said), BINS, dtype=torch.double).scatter_(1, place[:, None], (said - labels)[:, None])
        return self._sums(off).abs().sum(0) / self._sums(torch.ones_like(off[:, :1]))[0]

    def _within(self, scores: Tensor, positive: Tensor) -> Tensor:
        wins, pairs = self._sums(torch.stack(wins_within(scores, positive, self.prefix), 1))
        return _ratio(wins, pairs)

    def _by_rank(self, figure: Callable[[Tensor, Tensor], Tensor], scores: Tensor, positive: Tensor) -> Tensor:
        """What follows from how many negatives and positives have each score, across problems: each draw by itself."""
        values, rank = scores.double().unique(return_inverse=True)
        side = rank + len(values) * positive
        counts = (torch.bincount(side, times[self.problem], minlength=2 * len(values)) for times in self.times)
        return torch.stack([figure(*each.view(2, -1)) for each in counts])


def auroc_by_rank(bad: Tensor, good: Tensor) -> Tensor:
    """From how many have each score [S], the lowest first."""
    below = bad.cumsum(0) - bad / 2  # ties count half
    return _ratio(good @ below, good.sum() * bad.sum())


def interval(figures: Tensor) -> list[float] | None:
    """The 2.5 and 97.5 percent points over draws; None where a draw has no figure."""
    if figures.isnan().any():
        return None
    return [round(float(p), 4) for p in figures.quantile(torch.tensor([0.025, 0.975], dtype=figures.dtype))]


def _ratio(top: Tensor, bottom: Tensor) -> Tensor:
    """Where nothing is left to divide by, but for rounding, there is no figure."""
    return torch.where(bottom > TINY, top / bottom.clamp_min(TINY), NAN)
