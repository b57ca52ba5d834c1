"""How many threads a model should have on this CPU now, and whether anything can be timed on it.

Threads share a pass and wait for each other several times in each layer. Where other work takes a core away, all of
them wait for the one that lost it: with two threads on a busy machine a small model is ten times slower than with one.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from semspec.types import Decode, Runner, Sampling, Score

VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")  # who sets one of these has chosen
ROWS = (1, 5)  # tokens of the passes that are timed: one, and a short draft
MAX_REPEATS = 5
SECONDS = 0.5  # about as long as this may take; a large model is timed once, and gains by threads anyway
ROW_SECONDS = 0.25  # the same for what a further token takes
BATCHES = (1, 2, 4, 8)  # sequences that decode together when draft tokens are timed,
BATCH_TEXT = 64  # and tokens before them
BATCH_TOKENS = 4
MIN_SECONDS = 1e-9  # against division by zero
SAMPLE = (1024, 1024)  # weights that are rearranged to see how reading will go
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


@contextmanager
def threads_for_reading(device: torch.device) -> Iterator[None]:
    """While weights are read and rearranged, one thread if that is faster at the moment; then as many as before. On a
    busy machine a file is read several times faster so."""
    many = torch.get_num_threads()
    if device.type != "cpu" or many == 1 or any(os.environ.get(name) for name in VARIABLES):
        yield
        return
    some = torch.ones(SAMPLE, dtype=torch.uint8)
    try:
        torch.set_num_threads(faster(lambda: some.int().float().sum(), many))
        yield
    finally:
        torch.set_num_threads(many)


def faster(work: Callable[[], object], many: int, clock: Callable[[], float] = time.perf_counter) -> int:
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


def row_cost(runner: Runner, clock: Callable[[], float] = time.process_time) -> float | None:
    """What a further token takes in a pass that checks a draft, in passes of one token, on a CPU: from next to nothing
    to nearly a pass, by the format of the weights. None: not known.

    By this process's own time, which other work on the machine disturbs less: only a ratio is wanted."""
    if runner.device.type != "cpu" or runner.max_seq_len <= 1 + ROWS[1]:
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


def step_costs(draft: Runner, target: Runner, clock: Callable[[], float] = time.process_time) -> dict[int, float]:
    """What a draft token of so many sequences takes, in tokens of the target of as many, on a CPU: sequences share what
    a pass takes, and a small model has less to share. Empty: one sequence runs at a time, or it is not known."""
    found: dict[int, float] = {}
    runners, began = (draft, target), clock()
    room = min(min(runner.free for runner in runners), BATCHES[-1])
    short = any(runner.max_seq_len < BATCH_TEXT + BATCH_TOKENS for runner in runners)
    if room < 2 or short or any(runner.device.type != "cpu" for runner in runners):
        return found
    held: dict[int, list[int]] = {i: [] for i in range(len(runners))}
    try:
        for count in (n for n in BATCHES if n <= room):
            longest = [(None, BATCH_TEXT + BATCH_TOKENS)] * count
            if any(runner.lacks_room(longest, held[i]) for i, runner in enumerate(runners)):
                break  # a small pool of pages
            for i, runner in enumerate(runners):
                new = [runner.acquire() for _ in range(count - len(held[i]))]
                held[i] += new
                runner.score([Score(runner, slot, [1] * BATCH_TEXT, 1) for slot in new])
            taken = [min(_decode(runner, held[i], clock) for _ in range(2)) for i, runner in enumerate(runners)]
            found[count] = taken[0] / max(taken[1], MIN_SECONDS)
            if 2 * (clock() - began) > SECONDS:  # twice as many would take longer
                break
    finally:
        for i, runner in enumerate(runners):
            for slot in held[i]:
                runner.release(slot)
    return found


def _decode(runner: Runner, slots: list[int], clock: Callable[[], float]) -> float:
    """Seconds of a few tokens for each."""
    start = clock()
    runner.decode([Decode(runner, slot, [1], BATCH_TOKENS, Sampling(), 0) for slot in slots])
    seconds = clock() - start
    for slot in slots:
        runner.truncate(slot, BATCH_TEXT)
    return seconds


def _passes(runner: Runner, slot: int) -> None:
    for rows in ROWS:
        if rows < runner.max_seq_len:
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
