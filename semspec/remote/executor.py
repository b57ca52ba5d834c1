"""Answers the calls of all sequences, each as soon as its server has. What `loop.Executor` is for models in here."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Coroutine
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass
from typing import Any

from semspec.loop.live_tasks import LiveTasks
from semspec.loop.stats import Stats
from semspec.loop.work import Task
from semspec.remote.answers import Answer
from semspec.remote.model import BACKGROUND
from semspec.types import Event

WAIT_SECONDS = 0.02  # that a tick waits at most, so that whoever ticks can do something else


@dataclass(slots=True, eq=False)
class Call:
    """What a sequence asks of a server. Answer: an Answer, or the error is raised inside the sequence."""

    make: Callable[[], Coroutine[Any, Any, Answer]]
    to: str = "target"  # or draft


class CallExecutor(LiveTasks):
    """As many sequences as there are slots run at a time, each at its server's pace; others wait."""

    budget = 0  # tokens of a pass, and there are none

    def __init__(self, slots: int, clock: Callable[[], float] = time.perf_counter) -> None:
        super().__init__()
        self.slots, self.clock = slots, clock
        self._waiting: deque[Task] = deque()
        self._calls: dict[Task, tuple[Future[Answer], Call, float]] = {}
        self._answered = threading.Event()

    @property
    def free(self) -> int:
        return self.slots - len(self._calls)

    def submit(self, decoding: Any, stats: Stats) -> Task:
        with self.lock:
            self._waiting.append(task := super().submit(decoding, stats))
        return task

    def tick(self) -> None:
        """Take the answers that have come; if none has, wait a little for one."""
        with self.exclusive():
            self._answered.clear()
            self._drop_discarded()
            idle = not self._advance() and bool(self._calls)
        if idle:
            self._answered.wait(WAIT_SECONDS)  # others may submit or cancel meanwhile
            with self.exclusive():
                self._advance()

    def _advance(self) -> bool:
        found = False
        for task, (future, call, began) in list(self._calls.items()):
            if future.done() and task in self._calls:
                del self._calls[task]
                found = True
                seconds = self.clock() - began
                task.stats.seconds["draft" if call.to == "draft" else "score"] += seconds
                task.stats.target_passes += call.to == "target"
                task.stats.calls[call.to] += 1
                error = CancelledError() if future.cancelled() else future.exception()
                self._resume(task, None if error else future.result(), error)
        while self._waiting and self.free > 0:
            found = True
            self._waiting.remove(task := self._choose(self._waiting))
            task.started = True
            self._resume(task, None, None)
        return found

    def _resume(self, task: Task, answer: Answer | None, error: BaseException | None) -> None:
        """Send a sequence its answer and take its events, up to its next call."""
        start = self.clock()
        try:
            asked: Any = task.decoding.send(answer) if error is None else task.decoding.throw(error)
            while isinstance(asked, Event):
                task.events.append(asked)
                asked = next(task.decoding)
        except StopIteration:
            return self._end(task)
        except Exception as failure:  # fails this sequence only
            return self._end(task, failure)
        finally:
            task.stats.seconds["host"] += self.clock() - start
        future = BACKGROUND.start(asked.make())
        self._calls[task] = (future, asked, self.clock())
        future.add_done_callback(lambda _: self._answered.set())

    def _free(self, task: Task) -> None:
        if task in self._waiting:
            self._waiting.remove(task)
        if call := self._calls.pop(task, None):  # given up, which closes the connection
            call[0].cancel()
        task.decoding.close()
