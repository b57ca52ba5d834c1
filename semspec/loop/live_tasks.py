"""The sequences of an executor: from other threads, and from destructors, they come and go between its ticks."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

from semspec.loop.stats import Stats
from semspec.loop.work import Task
from semspec.types import SequenceGenerator


class LiveTasks(ABC):
    """Threads may share one: `lock` is held while anything changes."""

    def __init__(self) -> None:
        self.tasks: list[Task] = []
        self._discarded, self._busy = deque[Task](), 0  # and how often the lock is held
        self.lock = threading.RLock()
        self._choose: Callable[[Sequence[Task]], Task] = lambda waiting: waiting[0]

    def choose_by(self, choose: Callable[[Sequence[Task]], Task]) -> None:
        """Who is started next, of those that wait in order of arrival; by default the first."""
        self._choose = choose

    def submit(self, decoding: SequenceGenerator, stats: Stats) -> Task:
        """Add a sequence. Nothing runs before the next tick."""
        task = Task(decoding, stats)
        with self.lock:
            self.tasks.append(task)
        return task

    @abstractmethod
    def tick(self) -> None: ...

    def run(self) -> None:
        """Tick until every sequence is done."""
        while self.tasks:
            self.tick()

    def run_all(self, decodings: Iterable[SequenceGenerator]) -> None:
        """Run these to their ends, as one batch; the first failure is everybody's."""
        work = [self.submit(decoding, Stats()) for decoding in decodings]
        try:
            while not all(task.done for task in work):
                self.tick()
        finally:
            for task in work:
                self.cancel(task)
        for task in work:
            if task.error is not None:
                raise task.error

    def cancel(self, task: Task) -> None:
        """Stop a sequence wherever it is; what it held is free when this returns."""
        with self.exclusive():
            if getattr(task.decoding, "gi_running", False):  # from inside its own round, by a referee, say
                self._discarded.append(task)
            else:
                self._end(task)

    def discard(self, task: Task) -> None:
        """Cancel without blocking, for destructors, which may run in the middle of a tick; then at the next tick."""
        self._discarded.append(task)
        self.between_ticks(self._drop_discarded)

    def between_ticks(self, action: Callable[[], None]) -> None:
        """Do this if nobody holds the lock, without blocking; else not at all."""
        if not self._busy and self.lock.acquire(blocking=False):
            try:
                action()
            finally:
                self.lock.release()

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        """Hold the lock; meanwhile destructors, which may run in this very thread, only leave a note."""
        with self.lock:
            self._busy += 1
            try:
                yield
            finally:
                self._busy -= 1

    def _drop_discarded(self) -> None:
        for _ in range(len(self._discarded)):
            self.cancel(self._discarded.popleft())

    def _end(self, task: Task, error: Exception | None = None) -> None:
        """A sequence is done, with this error if it has failed."""
        if not task.done:
            task.done, task.error = True, error
            self.tasks.remove(task)
            self._free(task)

    @abstractmethod
    def _free(self, task: Task) -> None:
        """Give back what a sequence held, and forget what it asked for."""
