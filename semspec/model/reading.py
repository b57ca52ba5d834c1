"""While weights are read: the threads that are faster now, and memory that is given back when it is no longer needed.

What is read is unpacked and rearranged in pieces of some megabytes. glibc learns from the first ones that are freed to
keep room for such pieces, and a small model then takes half as much again as was planned.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from semspec.model.threads import threads_for_reading

TRIM_THRESHOLD, MMAP_THRESHOLD = -1, -3  # glibc's names for them
PIECE = 1 << 20  # bytes from which memory goes back to the system when it is freed,
LARGEST = 32 << 20  # and otherwise: the most that glibc would learn to keep, so that passes ask the system for nothing


@contextmanager
def reading(device: torch.device) -> Iterator[None]:
    with threads_for_reading(device), _given_back():
        yield


@contextmanager
def _given_back() -> Iterator[None]:
    try:
        set_option = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):  # not glibc
        yield
        return
    set_option(MMAP_THRESHOLD, PIECE)
    try:
        yield
    finally:
        set_option(MMAP_THRESHOLD, LARGEST)
        set_option(TRIM_THRESHOLD, 2 * LARGEST)
