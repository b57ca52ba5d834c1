"""The first passes of a process are slow; nobody should wait for them."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable

import torch

from semspec.options import Options
from semspec.pair import Pair
from semspec.types import Score

TOKENS = 24  # generated before the first request comes
DRAFT_TOKENS = 4  # of a draft meanwhile; automatic lengths would learn from text that nobody asked for
BUDGETS = (1024, 2048, 4096, 8192)  # tokens in one pass that a GPU tries
MAX_PASS_SECONDS = 0.3  # that who is writing waits for a pass with others' prompts in it


def warm_up(pair: Pair) -> float:
    """Makes passes of both models. The last ones measure what a token costs the target alone, in seconds."""
    prompt = [min(1, pair.target.vocab - 1)] * 8
    count = min(TOKENS, pair.target.capacity - len(prompt))
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
    """As many tokens in one pass as keep nobody waiting for long: prompts are read faster in large pieces. On a CPU the
    budget stays what it is: there rounding depends on the size of a pass, and no text may depend on a clock."""
    target = pair.target
    if target.device.type == "cpu":
        return
    slot = target.acquire()
    try:
        for count in (n for n in BUDGETS if n <= target.capacity):
            seconds = 0.0
            for _ in range(2):  # the first may compile something
                start = clock()
                target.score([Score(target, slot, [min(1, target.vocab - 1)] * count, 1)])[0].logits.cpu()
                seconds = clock() - start
                target.truncate(slot, 0)
            if seconds > MAX_PASS_SECONDS:
                break
            pair.executor.budget = count
    except torch.OutOfMemoryError:  # weights and the cache leave little; what went before is what there is memory for
        gc.collect()
        torch.cuda.empty_cache()
    finally:
        target.release(slot)
