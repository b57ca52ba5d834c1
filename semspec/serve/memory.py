"""Memory of this process. Passes of many sizes leave glibc's heaps full of holes; trimming gives those back."""

from __future__ import annotations

import ctypes
import os
import time
from pathlib import Path

TRIM_SECONDS = 10.0  # between two trims; one takes some milliseconds
_malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # only glibc has it
_trimmed = 0.0


def trim() -> None:
    """Give free memory back to the system, now and then."""
    global _trimmed
    if _malloc_trim is not None and time.monotonic() - _trimmed > TRIM_SECONDS:
        _malloc_trim(0)
        _trimmed = time.monotonic()


def resident_mib() -> int | None:
    """MiB of memory that this process has; None where that cannot be read."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except OSError:
        return None
    return pages * os.sysconf("SC_PAGE_SIZE") >> 20
