"""What rounds take, by the length of their drafts: for one sequence, learnt while it runs."""

from __future__ import annotations

from collections import deque

from semspec.loop.recent import clipped, median

RECENT = 15  # measurements of one length that are kept; their median counts, so outliers do not,
FEW = 3  # and the least of so few: what else the machine does only adds
PRIOR_SLOPE = 0.1  # seconds of a further token in a target pass, in passes, before any was measured
PACE_ROUNDS = 7  # whose median tells how fast the machine is now
PACE_ASKED = 28  # between two rounds of the target alone that are made only to know its pace
BELIEVED = 1.5  # times slower than the target alone was last, by rounds with drafts only
SLOWEST = 1e-3  # of clocks that stand still
RIDGE = 8.0  # tokens squared: regularises the slope of the target's seconds towards 0


class Seconds:
    """Seconds by draft length: the median of recent rounds, and a linear fit for lengths not measured."""

    def __init__(self, through_zero: bool = False, prior_slope: float = PRIOR_SLOPE) -> None:
        """`through_zero`: the line has 0 seconds at 0 tokens; `prior_slope`: of it, in passes, before any length was
        timed."""
        self.through_zero, self.prior_slope = through_zero, prior_slope
        self.recent: dict[int, deque[float]] = {}
        self.median: dict[int, float] = {}  # of the recent ones
        self.mean_length = self.mean_seconds = self.slope = 0.0  # the line

    @property
    def timed(self) -> bool:
        """Whether a draft of any length has been timed."""
        return any(n > 0 for n in self.median)

    def add(self, n: int, seconds: float) -> None:
        expected = self.of(n) if n in self.median or (n and self.timed) else 0.0
        recent = self.recent.setdefault(n, deque(maxlen=RECENT))
        recent.append(clipped(seconds, expected))
        self.median[n] = median(recent) if len(recent) > FEW else min(recent)
        self._fit([(m, seconds, len(self.recent[m])) for m, seconds in self.median.items() if m])

    def of(self, n: int) -> float:
        """Expected seconds of a draft of n tokens."""
        if n == 0 and 0 in self.median:  # another kind of pass, which is not on the line
            return self.median[0]
        line = max(self.mean_seconds + self.slope * (n - self.mean_length), 0.0)
        weight = len(self.recent.get(n, ()))
        return (line + weight * self.median[n]) / (1 + weight) if weight else line

    def _fit(self, points: list[tuple[int, float, int]]) -> None:
        """Least squares over (length, seconds, weight)."""
        weight = sum(w for *_, w in points)
        if not points:
            self.mean_seconds = self.median[0]
            self.slope = 0.0 if self.through_zero else self.prior_slope * self.median[0]
        elif self.through_zero:
            self.slope = sum(s * w for _, s, w in points) / sum(n * w for n, _, w in points)
        else:
            self.mean_length = sum(n * w for n, _, w in points) / weight
            self.mean_seconds = sum(s * w for _, s, w in points) / weight
            variance = sum(w * (n - self.mean_length) ** 2 for n, _, w in points)
            covariance = sum(w * (n - self.mean_length) * (s - self.mean_seconds) for n, s, w in points)
            self.slope = max(covariance / (variance + RIDGE), 0.0)


class Pace:
    """How much slower all passes are than when they were first measured, since others use the machine, too. Seconds
    are divided by it, or lengths that are seldom measured would seem to become better or worse.

    Where only rounds with drafts have become slow, that is what drafts cost and no pace of the machine. So they are
    believed up to a limit, and beyond it a round of the target alone has to say the same."""

    def __init__(self) -> None:
        self.now = 1.0
        self._alone = 1.0  # what the last round of the target alone said
        self._seen = deque[float](maxlen=PACE_ROUNDS)
        self._wanted, self._rounds = 1.0, PACE_ASKED

    def follow(self, seconds: float, usual: float, alone: bool) -> None:
        """After a pass that takes `usual` at pace 1; `alone`: one of the target without a draft."""
        pace = max(seconds / usual, SLOWEST)
        self._seen.append(pace)
        self._rounds += 1
        if alone:
            self._alone = pace
        if len(self._seen) == PACE_ROUNDS:
            self._wanted = median(self._seen)
            self.now = min(self._wanted, BELIEVED * max(self._alone, 1.0))

    def ask(self) -> bool:
        """Whether the target alone should be timed now."""
        asked = self._wanted > self.now and self._rounds >= PACE_ASKED
        if asked:
            self._rounds = 0
        return asked
