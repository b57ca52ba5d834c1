"""Memory of this process: what a server will have at most, and how it stays below that.

Weights are taken at the start; so are keys and values, but a CPU's system gives their memory when it is first written.
Beside them a server has the tensors of a pass and of verification, and what allocators do not give back by themselves:
glibc's heaps are full of holes after passes of many sizes, until they are trimmed, and oneDNN keeps what it has
compiled for every size of pass, by default for a thousand of them.
"""

from __future__ import annotations

import ctypes
import os
import time
from pathlib import Path

from semspec.model.paged_cache import PagedCache
from semspec.model.wrapper import unwrap
from semspec.pair import Pair
from semspec.serve.limits import LONGEST_STEP
from semspec.types import Runner

MIB = 2**20
TRIM_SECONDS = 10.0  # between two trims; one takes some milliseconds
CHECK_SECONDS = 1.0  # between two looks at the limit
LAZY = 160 * MIB  # what is made when it is first needed: probes, tables of tokens, compiled products; and slack
COPIES = 4  # of the logits of a verification: scaled, sorted, as probabilities, their sums
FLOAT = 4  # bytes
M_ARENA_MAX = -8  # glibc's number for it
_libc = ctypes.CDLL(None)
_malloc_trim = getattr(_libc, "malloc_trim", None)  # only glibc has it


def configure() -> None:
    """Call it before the first pass: few heaps, so that few have holes, and few compiled products."""
    os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "64")
    if _malloc_trim is not None and "MALLOC_ARENA_MAX" not in os.environ:
        _libc.mallopt(M_ARENA_MAX, 2)


def working_bytes(pair: Pair, draft_tokens: int) -> int:
    """What passes and verification need at most, on a CPU, beside what there is before the first request."""
    target = pair.target
    if target.device.type != "cpu":
        return LAZY
    rows = target.free * (1 + max(draft_tokens, LONGEST_STEP if pair.draft is not None else 0))
    logits = rows * target.vocab_size * FLOAT * COPIES
    mask = pair.executor.budget * target.max_seq_len * FLOAT  # of a pass over a long context
    return LAZY + logits + mask + sum(_cache_bytes(runner) for runner in (target, pair.draft) if runner is not None)


def _cache_bytes(runner: Runner) -> int:
    """Of keys and values that are here; most of them have not been written yet."""
    cache = getattr(unwrap(runner), "cache", None)
    return cache.nbytes if cache is not None else 0


def cache_tokens(runner: Runner, slots: int) -> int:
    """That all slots hold together, at most."""
    cache = getattr(unwrap(runner), "cache", None)
    return slots * runner.max_seq_len if cache is None else cache.tokens


def pages(pair: Pair | None) -> tuple[int, int]:
    """Pages of both models' pools that are in use, and those that are only remembered; where slots have none, 0."""
    used = remembered = 0
    for runner in (pair.target, pair.draft) if pair is not None else ():
        cache = getattr(unwrap(runner), "cache", None)
        if isinstance(cache, PagedCache):
            used += cache.pages
            remembered += cache.pages_of(getattr(runner, "idle", ()))
    return used, remembered


def expected(pair: Pair, draft_tokens: int) -> dict[str, int | None]:
    """MiB that this process has now, and will have at most."""
    resident = resident_mib()
    working = working_bytes(pair, draft_tokens) // MIB
    return {"resident_mib": resident} | ({} if resident is None else {"at_most_mib": resident + working})


class Trimmer:
    """Gives free memory back to the system: now and then, when there is nothing to do, and above the limit."""

    def __init__(self, at_most_mib: int | None = None) -> None:
        self.at_most_mib = at_most_mib
        self._last, self._idle = 0.0, False

    def __call__(self, idle: bool) -> None:
        self._idle &= idle
        since = time.monotonic() - self._last
        if _malloc_trim is None or since < CHECK_SECONDS:
            return
        above = self.at_most_mib is not None and (resident_mib() or 0) > self.at_most_mib
        if above or since > TRIM_SECONDS or (idle and not self._idle):
            _malloc_trim(0)
            self._last, self._idle = time.monotonic(), idle


def resident_mib() -> int | None:
    """MiB of memory that this process has; None where that cannot be read."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except OSError:
        return None
    return pages * os.sysconf("SC_PAGE_SIZE") // MIB
