"""Passes on different devices, made at the same time: while one half of the sequences drafts, the other is checked.

Runners on one device have nothing to win by that, and none of this runs for them. A thread makes calls of a runner and
nothing else; all that the executor knows is changed between them, by the thread that holds its lock.
"""

from __future__ import annotations

import threading
from collections import defaultdict, deque
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from math import ceil
from statistics import median
from typing import Any, TypeVar

from semspec.loop.costs import RECENT
from semspec.loop.passes import MAX_ROUND_TOKENS, drafts
from semspec.loop.work import Task, Work
from semspec.types import Runner

AGAIN = 256  # ticks after which the way that has been slower is tried again

Made = TypeVar("Made")
Call = Callable[[], Any]
Pass = Generator[Call, Any, Made]  # yields calls of one runner, and is sent what they return, or their errors

_beside = threading.local()


def is_beside() -> bool:
    """Whether this thread makes a pass beside the one that holds the executor's lock."""
    return getattr(_beside, "inside", False)


class SideBySide:
    """Makes passes, each on a device of its own."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._threads: ThreadPoolExecutor | None = None  # theirs end with it

    def make(self, passes: Sequence[Pass[Made]]) -> tuple[list[Made], list[float]]:
        """What they return, and the share of the time that each has taken."""
        made: dict[int, Made] = {}
        spent = [0.0] * len(passes)
        calls = {i: call for i, one in enumerate(passes) if (call := _next(one, made, i)) is not None}
        while calls:
            outcomes = self._made(list(calls.values()))
            following = dict[int, Call]()
            for i, (result, error, seconds) in zip(calls, outcomes, strict=True):
                spent[i] += seconds
                if (call := _next(passes[i], made, i, result, error)) is not None:
                    following[i] = call
            calls = following
        whole = sum(spent)
        return [made[i] for i in range(len(passes))], [s / whole if whole else 1 / len(spent) for s in spent]

    def _made(self, calls: list[Call]) -> list[tuple[Any, Exception | None, float]]:
        """The last in this thread. Whatever happens, none is under way when this returns."""
        *others, own = calls
        futures = list[Future[tuple[Any, Exception | None, float]]]()
        try:
            if others and self._threads is None:
                self._threads = ThreadPoolExecutor(thread_name_prefix="pass")
            futures = [self._threads.submit(self._elsewhere, call) for call in others if self._threads is not None]
            mine = self._timed(own)
        finally:
            _finish(futures)
        return [*(future.result() for future in futures), mine]

    def _elsewhere(self, call: Call) -> tuple[Any, Exception | None, float]:
        _beside.inside = True
        return self._timed(call)

    def _timed(self, call: Call) -> tuple[Any, Exception | None, float]:
        start = self._clock()
        try:
            return call(), None, self._clock() - start
        except Exception as error:
            return None, error, self._clock() - start


def _next(one: Pass[Made], made: dict[int, Made], i: int, result: Any = None, error: Exception | None = None) -> Any:
    """The next call of a pass; None: it has ended."""
    try:
        return one.send(result) if error is None else one.throw(error)
    except StopIteration as end:
        made[i] = end.value
        return None


def _finish(futures: Sequence[Future[Any]]) -> None:
    """Wait for all, also through an interrupt: what they write into must not be given back before."""
    interrupt: BaseException | None = None
    while not all(future.done() for future in futures):
        try:
            wait(futures)
        except BaseException as error:
            interrupt = error
    if interrupt is not None:
        raise interrupt


def beside(drafting: Sequence[Work]) -> Runner | None:
    """The runner on another device that checks what is drafted here."""
    here, task = drafting[0].request, drafting[0].task
    elsewhere = (runner for runner, _ in task.slots if runner.device != here.runner.device)
    return next(elsewhere, None) if here.drafting else None


class Alternation:
    """Whether the halves of a batch take turns. Both ways are measured: a pass over half as many sequences may take as
    long as one over all, and then two of them beside two drafts take longer than one draft and one pass, in turn."""

    def __init__(self) -> None:
        # Of a round of all, by way and size of the batch.
        self._seconds: dict[tuple[bool, int], deque[float]] = defaultdict(lambda: deque(maxlen=RECENT))
        self._asked = 0
        self._last: tuple[bool, int] | None = None
        self._now: tuple[bool, int] | None = None

    def begin(self) -> None:
        """A tick begins."""
        self._last, self._now = self._now, None

    def halves(
        self, drafting: list[Work], target: Runner, checking: list[Work], tasks: Sequence[Task]
    ) -> list[list[Work]] | None:
        """What the draft and the target do beside each other; None: the target waits for the drafts of all. So it does
        during a prefill, or rounds would have to wait for two chunks of it. Of `tasks` the older come first: the
        oldest has to move, since it is the one that others give way to."""
        drafters = {item.task for item in drafting}
        checks = [item for item in checking if item.task not in drafters]  # a sequence is in one pass at a time
        sequences = len(drafters) + len({item.task for item in checks})
        prompts = any(item.waiting > MAX_ROUND_TOKENS for item in (*drafting, *checking))
        if prompts or sequences < 2 or drafts(checking):
            return None
        size = sequences.bit_length()
        self._now = (self._alternate(target, size), size)
        if not self._now[0]:
            return None
        first = set([task for task in tasks if task in drafters][: ceil(sequences / 2)])
        return [[item for item in drafting if item.task in first], checks]

    def _alternate(self, target: Runner, size: int) -> bool:
        if target.device.type == "cpu":  # rounding depends on the size of a pass there, and no text may on a clock
            return False
        apart, together = self._seconds[True, size], self._seconds[False, size]
        self._asked += 1
        if len(apart) < RECENT or len(together) < RECENT:
            return len(apart) < RECENT
        faster = median(apart) < median(together)
        if self._asked % AGAIN == 0:
            (together if faster else apart).clear()
        return faster

    def end(self, seconds: float) -> None:
        """It has taken so long. The first tick of a way is not counted: sequences are where the other has left them."""
        if self._now is not None and self._now == self._last:
            self._seconds[self._now].append(seconds * (2 if self._now[0] else 1))
