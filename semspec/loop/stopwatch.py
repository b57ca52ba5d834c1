"""How long something takes, captures of graphs apart.

A capture takes as long as tens of passes, and is made once for each size. Who learns from seconds what drafts cost must
not count it, or the first rounds of every size would say that drafts never pay.
"""

from __future__ import annotations

from collections.abc import Callable

from semspec.model.graphs import captured_seconds


class Stopwatch:
    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._began, self._captured = clock(), captured_seconds()

    def read(self) -> tuple[float, float]:
        """Seconds until now without captures, and those of captures."""
        whole = self._clock() - self._began
        captured = min(captured_seconds() - self._captured, whole)
        return whole - captured, captured
