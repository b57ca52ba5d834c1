"""What passes take on this machine, by their size and by the text before them: learnt from the passes of all sequences.

A pass over many tokens is bound by arithmetic, one over few by reading weights, and what lies between is the machine's
own; so nothing is assumed of a curve but straight lines between the sizes that were met. What the text before adds is
taken to be proportional to its tokens. So a batch of long texts tells what the next one, of short texts, will cost.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

from semspec.loop.recent import clipped, median, text_class
from semspec.types import DecodeOutput, Grow, Score

Array = NDArray[np.float64]
RECENT = 9  # measurements of about one size that are kept; their median counts, so outliers do not
BINS = 4  # sizes that are told apart, per doubling
EXACT_SIZES = 9  # up to this every size is
STEADY = 8192.0  # tokens: growth with the text is held to what it was taken for, unless texts differ by more than that
MIN_LEFT = 0.2  # of a measurement, whatever is taken off it for a shorter text
SPREAD = 0.75  # two sizes whose ratio is above this tell no slope
PROMPT_ROW = 0.7  # of a prompt's seconds per token: the least that a further token costs where arithmetic binds
ROUND = 2.0  # ticks of the host's work in a tick with drafts: rules have theirs, too


class Curve:
    """Seconds by size: medians of recent measurements, straight lines between them, and beyond the largest the line
    through it and the one of about half its size. For texts of another length than was measured, the nearest
    measurement and the growth per token of text, which is fitted to all."""

    def __init__(self, like: Curve | None = None, share: float = 1.0) -> None:
        """`like`, `share`: grows as that much of this one, before anything else is known."""
        self._like, self._share = like, share
        self._recent: dict[tuple[int, int], deque[tuple[float, float, float]]] = {}
        self._points: dict[int, dict[int, tuple[float, float, float]]] = {}  # by size and class: size, seconds, text
        self._outlines: dict[int, tuple[Array, Array, Array]] = {}  # by class, until something is added
        self._classes = set[int]()  # of texts that were met
        self.growth = 0.0  # seconds that a further token of text adds
        self.largest = 0.0

    def __bool__(self) -> bool:
        return bool(self._points)

    @property
    def _assumed(self) -> float:
        return self._share * self._like.growth if self._like is not None else 0.0

    def add(self, size: float, seconds: float, text: float = 0.0) -> None:
        """`text`: tokens before the pass, of all its sequences."""
        length = text_class(text)
        known = size <= self.largest and any(length in points for points in self._points.values())
        seconds = clipped(seconds, self.at(size, text).item() if known else 0.0)
        which = round(size) if size <= EXACT_SIZES else EXACT_SIZES + math.ceil(BINS * math.log2(size / EXACT_SIZES))
        recent = self._recent.setdefault((which, length), deque(maxlen=RECENT))
        recent.append((seconds, size, text))
        taken, at, before = median(recent)
        points = self._points.setdefault(which, {})
        if points.get(length) == (at, taken, before):  # mostly: all that is known depends on these medians alone
            return
        points[length] = (at, taken, before)
        self.largest = max(at for points in self._points.values() for at, _, _ in points.values())
        self._outlines.clear()
        self._classes.add(length)
        if len(self._classes) > 1:
            self._fit()
        else:
            self.growth = self._assumed

    def _fit(self) -> None:
        """The growth: least squares with a line over sizes, held to what is assumed where texts hardly differ."""
        points = np.array([point for points in self._points.values() for point in points.values()])
        known = np.column_stack([np.ones(len(points)), points[:, 0], points[:, 2]])
        held = np.array([[0.0, 0.0, STEADY]])  # as good as a measurement that far away
        seconds = np.append(points[:, 1], STEADY * self._assumed)
        self.growth = max(float(np.linalg.lstsq(np.vstack([known, held]), seconds, rcond=None)[0][2]), 0.0)

    def _outline(self, text: float) -> tuple[Array, Array]:
        """Sizes, and seconds with so much text before."""
        length = text_class(text)
        if length not in self._outlines:
            nearest = [points[min(points, key=lambda one: abs(one - length))] for points in self._points.values()]
            sizes, seconds, texts = (np.array(each) for each in zip(*sorted(nearest), strict=True))
            self._outlines[length] = sizes, seconds, texts
        sizes, seconds, texts = self._outlines[length]
        return sizes, np.maximum(seconds + self.growth * (text - texts), MIN_LEFT * seconds)

    def at(self, sizes: ArrayLike, text: float = 0.0) -> Array:
        known, seconds = self._outline(text)
        sizes = np.asarray(sizes, float)
        found = np.asarray(np.interp(sizes, known, seconds))
        if not (sizes > known[-1]).any():  # mostly
            return found
        return np.asarray(found + (self.slope(text) or 0.0) * np.maximum(sizes - known[-1], 0.0))

    def slope(self, text: float = 0.0) -> float | None:
        """Beyond the largest size; None: those that were met are too close to tell."""
        known, seconds = self._outline(text)
        half = int(np.searchsorted(known, known[-1] / 2))
        half = max(half - 1, 0) if known[half] > SPREAD * known[-1] else half
        if known[half] > SPREAD * known[-1]:
            return None
        return max(float((seconds[-1] - seconds[half]) / (known[-1] - known[half])), 0.0)


class PassCosts:
    """Of an executor: what it has to know to choose the lengths of drafts for all its sequences."""

    def __init__(self) -> None:
        self.target_only = Curve()  # a token of each of so many sequences, by the target without drafts
        # A pass of the target over so many tokens, drafts among them, and all but the drafting.
        self.checks = Curve(like=self.target_only)
        self.drafts = Curve()  # a draft token of each of so many sequences
        self._prompts = Recent()  # seconds per token of passes that read prompts,
        self._draft_prompts = Recent()  # and of those of a draft model
        self._host = deque[float](maxlen=RECENT)  # seconds of ticks besides their passes, without drafts
        self.tick = 0
        self.sequences = 0  # that have slots
        self.rows = 0  # of the last pass with drafts
        self.disturbed = 0  # the last tick in which a prompt was read
        self._made: list[tuple[Curve, float, float, int, float]] = []  # passes of this tick, to be completed

    def begin(self, sequences: int) -> None:
        """A tick begins."""
        self.tick += 1
        self.sequences = sequences
        self._made.clear()

    def passed(self, parts: Sequence[Score | DecodeOutput | Grow], seconds: float | None, text: float = 0.0) -> None:
        """The target has made a pass, or several to decode a few tokens. `text`: tokens of all sequences in it.
        `seconds`: None where they tell nothing; what was in the pass is noted all the same."""
        scores = [part for part in parts if isinstance(part, Score)]
        rows = sum(len(part.tokens) for part in scores)
        prompts = any(len(part.tokens) > part.logits_to_keep for part in scores)  # are in it
        if prompts:
            self.disturbed = self.tick
        elif scores:
            self.rows = rows
        if seconds is None:
            return
        if prompts:
            self._prompts.add(seconds / rows, text / len(parts))
        elif scores:
            self._made.append((self.checks, rows, seconds, 1, text))
        else:
            steps = max(len(part.tokens) for part in parts)
            sequences = sum(len(part.tokens) for part in parts) / steps
            self._made.append((self.target_only, sequences, seconds, steps, text))

    def drafted(self, parts: Sequence[Score | DecodeOutput | Grow], seconds: float | None, text: float = 0.0) -> None:
        """A draft model has made a pass, or several."""
        if seconds is None:
            return
        read = sum(len(part.tokens) for part in parts if isinstance(part, Score))
        if read > len(parts) * EXACT_SIZES and all(isinstance(part, Score) for part in parts):
            self._draft_prompts.add(seconds / read, text / len(parts))

    def end(self, seconds: float) -> None:
        """The tick has taken so long besides its passes."""
        for curve, size, spent, steps, text in self._made:
            curve.add(size, (spent + seconds / len(self._made)) / steps, text)
        if self._made and all(curve is self.target_only for curve, *_ in self._made):
            self._host.append(seconds)

    def check(self, rows: ArrayLike, text: float = 0.0, row_cost: float | None = None) -> Array:
        """Seconds of passes with drafts. Where none was as large, a prompt's seconds per token tell: a pass takes these
        at least, or, where a further token was found to cost something (`row_cost`, in passes), these more."""
        rows = np.asarray(rows, float)
        row = PROMPT_ROW * self._prompts.near(text / max(self.sequences, 1))
        alone = self.target_only.at(self.sequences, text).item()
        if not self.checks:
            largest, level = float(self.sequences), alone + ROUND * _median(self._host)
            known = np.full(rows.shape, level)
        else:
            known, largest = self.checks.at(rows, text), self.checks.largest
            level = self.checks.at(largest, text).item()
            untold = row_cost is None and self.checks.slope(text) is None
            if untold and largest > self.sequences:  # the line from a pass without drafts
                slope = max(level - alone, 0.0) / (largest - self.sequences)
                known = known + slope * np.maximum(rows - largest, 0.0)
        if row_cost is None:
            return np.where(rows > largest, np.maximum(known, row * rows), known)
        return np.where(rows > largest, np.maximum(known, level + max(row, row_cost * alone) * (rows - largest)), known)

    def read(self, text: float, share: float) -> float:
        """Seconds in which a draft model reads a token of such a text; before it was timed, so much of the target's."""
        return self._draft_prompts.near(text) or share * self._prompts.near(text)


class Recent:
    """Medians of recent measurements, for texts of about each length."""

    def __init__(self) -> None:
        self._values: dict[int, deque[float]] = {}

    def add(self, value: float, text: float) -> None:
        self._values.setdefault(text_class(text), deque(maxlen=RECENT)).append(value)

    def near(self, text: float) -> float:
        """Of the texts whose length is nearest; 0: there are none."""
        length = text_class(text)
        return _median(self._values[min(self._values, key=lambda one: abs(one - length))]) if self._values else 0.0


def _median(values: deque[float]) -> float:
    return median(values) if values else 0.0
