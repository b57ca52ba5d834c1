"""What passes take on this machine, by their size: learnt from the passes of all sequences together.

A pass over many tokens is bound by arithmetic, one over few by reading weights, and what lies between is the machine's
own; so nothing is assumed of a curve but straight lines between the sizes that were met.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

from semspec.types import DecodeOutput, Score

Array = NDArray[np.float64]
RECENT = 9  # measurements of about one size that are kept; their median counts, so outliers do not
BINS = 4  # sizes that are told apart, per doubling
EXACT_SIZES = 9  # up to this every size is
MAX_SLOWDOWN = 3.0  # seconds are clipped to this many times the expected ones
PROMPT_ROW = 0.7  # of a prompt's seconds per token: the least that a further token costs where arithmetic binds


class Curve:
    """Seconds by size: medians of recent measurements, straight lines between them, and beyond the largest the line
    through it and the one of about half its size."""

    def __init__(self) -> None:
        self._recent: dict[int, deque[tuple[float, float]]] = {}
        self._points: dict[int, tuple[float, float]] = {}
        self.sizes: Array = np.empty(0)
        self.seconds: Array = np.empty(0)
        self.slope = 0.0  # beyond the largest

    def __bool__(self) -> bool:
        return bool(self._points)

    @property
    def largest(self) -> float:
        return float(self.sizes[-1]) if self else 0.0

    def add(self, size: float, seconds: float) -> None:
        known = self and size <= self.largest
        seconds = min(seconds, MAX_SLOWDOWN * self.at(size).item()) if known else seconds
        which = round(size) if size <= EXACT_SIZES else EXACT_SIZES + math.ceil(BINS * math.log2(size / EXACT_SIZES))
        recent = self._recent.setdefault(which, deque(maxlen=RECENT))
        recent.append((seconds, size))
        median, at = sorted(recent)[(len(recent) - 1) // 2]
        self._points[which] = (at, median)
        points = sorted(self._points.values())
        self.sizes, self.seconds = (np.array(each) for each in zip(*points, strict=True))
        half = min(int(np.searchsorted(self.sizes, self.sizes[-1] / 2)), len(points) - 2)
        if half >= 0:
            rise = (self.seconds[-1] - self.seconds[half]) / (self.sizes[-1] - self.sizes[half])
            self.slope = max(float(rise), 0.0)

    def at(self, sizes: ArrayLike) -> Array:
        sizes = np.asarray(sizes, float)
        beyond = np.maximum(sizes - self.largest, 0.0)
        return np.asarray(np.interp(sizes, self.sizes, self.seconds) + self.slope * beyond)


class PassCosts:
    """Of an executor: what it has to know to choose the lengths of drafts for all its sequences."""

    def __init__(self) -> None:
        self.target_only = Curve()  # a token of each of so many sequences, by the target without drafts
        self.checks = Curve()  # a pass of the target over so many tokens, drafts among them, and all but the drafting
        self.drafts = Curve()  # a draft token of each of so many sequences
        self._prompts = deque[float](maxlen=RECENT)  # seconds per token of passes that read prompts
        self.tick = 0
        self.sequences = 0  # that have slots
        self.rows = 0  # of the last pass with drafts
        self.disturbed = 0  # the last tick in which a prompt was read
        self._made: list[tuple[Curve, float, float, int]] = []  # passes of this tick, to be completed

    def begin(self, sequences: int) -> None:
        """A tick begins."""
        self.tick += 1
        self.sequences = sequences
        self._made.clear()

    def passed(self, parts: Sequence[Score | DecodeOutput], seconds: float) -> None:
        """The target has made a pass, or several to decode a few tokens."""
        scores = [part for part in parts if isinstance(part, Score)]
        if not scores:
            steps = max(len(part.tokens) for part in parts)
            self._made.append((self.target_only, sum(len(part.tokens) for part in parts) / steps, seconds, steps))
            return
        rows = sum(len(part.tokens) for part in scores)
        if any(len(part.tokens) > part.keep for part in scores):  # prompts are in it
            self.disturbed = self.tick
            self._prompts.append(seconds / rows)
        else:
            self.rows = rows
            self._made.append((self.checks, rows, seconds, 1))

    def end(self, seconds: float) -> None:
        """The tick has taken so long besides its passes."""
        for curve, size, spent, steps in self._made:
            curve.add(size, (spent + seconds / len(self._made)) / steps)

    def check(self, rows: ArrayLike) -> Array:
        """Seconds of passes with drafts. Where none was as large, a prompt's seconds per token tell."""
        rows = np.asarray(rows, float)
        row = PROMPT_ROW * sorted(self._prompts)[len(self._prompts) // 2] if self._prompts else 0.0
        known = self.checks.at(rows) if self.checks else np.full(rows.shape, self.target_only.at(self.sequences).item())
        return np.where(rows > self.checks.largest, np.maximum(known, row * rows), known)
