"""The first passes of a process are slow; nobody should wait for them."""

from __future__ import annotations

import time

from semspec.options import Options
from semspec.pair import Pair

TOKENS = 24  # generated before the first request comes


def warm_up(pair: Pair) -> float:
    """Makes passes of both models. The last ones measure what a token costs the target alone, in seconds."""
    prompt = [min(1, pair.target.vocab - 1)] * 8
    count = min(TOKENS, pair.target.capacity - len(prompt))
    seconds = 0.0
    for verifier in pair.warm_up_verifiers:
        options = Options(verifier=verifier, max_new_tokens=count, ignore_eos=True)
        (ticket,) = pair.submit([(prompt, options)])
        start = time.perf_counter()
        pair.executor.run()
        seconds = (time.perf_counter() - start) / count
        if ticket.task.error is not None:
            raise ticket.task.error
    return seconds
