"""How many threads a model should have on this CPU now, and whether anything can be timed on it.

Threads share a pass and wait for each other several times in each layer. Where other work takes a core away, all of
them wait for the one that lost it: with two threads on a busy machine a small model is ten times slower than with one.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable

import torch

from semspec.types import Runner, Score

VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")  # who sets one of these has chosen
ROWS = (1, 5)  # tokens of the passes that are timed: one, and a short draft
MAX_REPEATS = 5
SECONDS = 0.5  # about as long as this may take; a large model is timed once, and gains by threads anyway
ROW_SECONDS = 0.25  # the same for what a further token takes
MIN_SECONDS = 1e-9  # against division by zero
GAIN = 0.9  # one thread has to be this much faster to be taken
BUSY = 0.7  # of its time a single thread should get a core


def choose_threads(runner: Runner) -> None:
    """Give torch one thread if passes of this model are faster with it at the moment."""
    many = torch.get_num_threads()
    if runner.device.type != "cpu" or many == 1 or any(os.environ.get(name) for name in VARIABLES):
        return
    slot = runner.acquire()
    try:
        torch.set_num_threads(faster(lambda: _passes(runner, slot), many))
    finally:
        runner.release(slot)


def faster(work: Callable[[], None], many: int, clock: Callable[[], float] = time.perf_counter) -> int:
    """1 or `many`, by turns, so that what else the machine does falls on both alike."""
    taken: dict[int, list[float]] = {1: [], many: []}
    began = clock()
    work()  # the first time is slower than all others
    while len(taken[1]) < MAX_REPEATS and (not taken[1] or clock() - began < SECONDS):
        for threads, times in taken.items():
            torch.set_num_threads(threads)
            start = clock()
            work()
            times.append(clock() - start)
    one, several = (statistics.median(taken[threads]) for threads in (1, many))
    return 1 if one < GAIN * several else many


def row_cost(runner: Runner, clock: Callable[[], float] = time.perf_counter) -> float | None:
    """What a further token takes in a pass that checks a draft, in passes of one token, on a CPU: from next to nothing
    to nearly a pass, by the format of the weights. None: not known."""
    if runner.device.type != "cpu" or runner.capacity <= 1 + ROWS[1]:
        return None
    taken: dict[int, list[float]] = {rows: [] for rows in ROWS}
    slot, began = runner.acquire(), clock()
    try:
        while len(taken[1]) < MAX_REPEATS and (not taken[1] or clock() - began < ROW_SECONDS):
            for rows, times in taken.items():
                start = clock()
                runner.score([Score(runner, slot, [1] * rows, rows)])
                times.append(clock() - start)
                runner.truncate(slot, 0)
    finally:
        runner.release(slot)
    one, several = (min(times) for times in taken.values())  # what else the machine does only adds
    return min(max((several / max(one, MIN_SECONDS) - 1) / (ROWS[1] - 1), 0.0), 1.0)


def _passes(runner: Runner, slot: int) -> None:
    for rows in ROWS:
        if rows < runner.capacity:
            runner.score([Score(runner, slot, [1] * rows, 1)])
            runner.truncate(slot, 0)


def share_of_core(seconds: float = 0.05) -> float:
    """How much of a core one thread of this process gets at the moment, of 1."""
    began, used = time.perf_counter(), time.thread_time()
    while (passed := time.perf_counter() - began) < seconds:
        pass
    return min(1.0, (time.thread_time() - used) / passed)


def busy() -> str:
    """A warning for whoever is about to time something here; empty if there is no need."""
    share = share_of_core()
    if share >= BUSY:
        return ""
    return f"this machine is busy: one thread gets {share:.0%} of a core, so times and speedups mean little now"
