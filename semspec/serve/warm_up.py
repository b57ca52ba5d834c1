"""The first passes of a process are slow; nobody should wait for them."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from itertools import combinations
from math import inf
from statistics import median

import torch

from semspec.loop.passes import Growth
from semspec.options import Options
from semspec.pair import Pair
from semspec.types import Score

TOKENS = 24  # generated before the first request comes
DRAFT_TOKENS = 4  # of a draft meanwhile; automatic lengths would learn from text that nobody asked for
BUDGETS = (1024, 2048, 4096, 8192)  # tokens in one pass that a GPU tries
MAX_PASS_SECONDS = 0.3  # that prompts of others may add to a decoding sequence's pass
GROWTH_SECONDS = 3.0  # spent on reading one text, to see what its pieces cost,
PIECES = 4  # of which there are so many at least


def warm_up(pair: Pair) -> float:
    """Makes passes of both models. The last ones measure what a token costs the target alone, in seconds."""
    prompt = [min(1, pair.target.vocab_size - 1)] * 8
    count = min(TOKENS, pair.target.max_seq_len - len(prompt))
    seconds = 0.0
    for verifier in pair.warm_up_verifiers:
        options = Options(verifier=verifier, num_draft_tokens=DRAFT_TOKENS, max_new_tokens=count, ignore_eos=True)
        (ticket,) = pair.submit([(prompt, options)])
        start = time.perf_counter()
        pair.executor.run()
        seconds = (time.perf_counter() - start) / count
        if ticket.task.error is not None:
            raise ticket.task.error
    return seconds


def measure_budget(pair: Pair, clock: Callable[[], float] = time.perf_counter) -> None:
    """As many tokens in one pass as keep nobody waiting for long: large chunks of a prompt are faster, but far into a
    long text they have to be smaller. On a CPU the budget stays what it is: there rounding depends on the size of a
    pass, and no text may depend on a clock."""
    target = pair.target
    if target.device.type == "cpu":
        return
    slot = target.acquire()

    def read(count: int) -> float:
        start = clock()
        target.score([Score(target, slot, [min(1, target.vocab_size - 1)] * count, 1)])[0].logits.cpu()
        return clock() - start

    try:
        for count in (n for n in BUDGETS if n <= target.max_seq_len):
            seconds = 0.0
            for _ in range(2):  # the first may compile something
                seconds = read(count)
                target.truncate(slot, 0)
            if seconds > MAX_PASS_SECONDS:
                break
            pair.executor.budget = count
        pair.executor.growth = measure_growth(read, pair.executor.budget, target.max_seq_len)
    except torch.OutOfMemoryError:  # weights and the cache leave little; what went before is what there is memory for
        gc.collect()
        torch.cuda.empty_cache()
    finally:
        target.truncate(slot, 0)
        target.release(slot)


def measure_growth(read: Callable[[int], float], budget: int, capacity: int) -> Growth:
    """From pieces of a text, one after the other: a line through their seconds, by medians, since any of them may be
    the first that compiles something."""
    count, taken = max(min(budget, capacity // PIECES), 1), list[float]()
    while (len(taken) + 1) * count <= capacity and (sum(taken) < GROWTH_SECONDS or len(taken) < PIECES):
        taken.append(read(count))
    slope = median([(b - a) / (j - i) for (i, a), (j, b) in combinations(enumerate(taken), 2)] or [0.0])
    first = median([seconds - slope * i for i, seconds in enumerate(taken)] or [0.0])
    if first <= 0.0:  # nothing that could be measured
        return Growth()
    reach = max(count * first / slope - count / 2, 1.0) if slope > 0 else inf
    return Growth(reach, MAX_PASS_SECONDS * Growth(reach).cost(0, count) / first)
