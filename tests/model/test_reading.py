"""Reading weights takes the memory that was planned, and no more at its peak."""

from __future__ import annotations

import contextlib
import ctypes
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from semspec.model import reading
from semspec.model.reading import LARGEST, MMAP_THRESHOLD, PIECE, TRIM_THRESHOLD

REAL = Path(os.environ.get("SEMSPEC_SMOLLM2_GGUF", ".models/SmolLM2-135M-Instruct.Q4_1.gguf"))
MORE = 0.2  # of the plan: what reading itself holds at a time

PEAK = """
import sys
from pathlib import Path
from semspec.pair.loading import find
from semspec.text.tokenizer import load_tokenizer

def kilobytes(name):
    return next(int(line.split()[1]) for line in Path("/proc/self/status").open() if line.startswith(name))

source = find(sys.argv[1])
load_tokenizer(source.path)
Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
before = kilobytes("VmRSS")
runner = source.load("cpu", "auto", 1, 1024)
print(1024 * (kilobytes("VmHWM") - before), source.plan("cpu", "auto", 1, 1024).total)
"""


def test_the_peak_of_reading_a_file_is_what_was_planned():
    if not REAL.is_file():
        pytest.skip(f"{REAL} is not there; `make smollm2` fetches it, or set SEMSPEC_SMOLLM2_GGUF to where it lies")
    if sys.platform != "linux":
        pytest.skip("the peak is read from /proc, which Linux has")
    command = [sys.executable, "-c", PEAK, str(REAL)]
    peak, planned = map(int, subprocess.run(command, capture_output=True, text=True, check=True).stdout.split())
    assert 0.9 * planned < peak < (1 + MORE) * planned


def test_what_the_allocator_was_told_is_taken_back(monkeypatch: pytest.MonkeyPatch):
    told: list[tuple[int, int]] = []

    class Library:
        def __init__(self, name: None) -> None:
            self.mallopt = lambda option, value: told.append((option, value))

    monkeypatch.setattr(ctypes, "CDLL", Library)
    with contextlib.suppress(OSError), reading.reading(torch.device("cpu")):
        assert told == [(MMAP_THRESHOLD, PIECE)]
        raise OSError
    assert told[1:] == [(MMAP_THRESHOLD, LARGEST), (TRIM_THRESHOLD, 2 * LARGEST)]


def test_other_allocators_are_left_alone(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(ctypes, "CDLL", lambda name: object())
    with reading.reading(torch.device("cpu")):
        pass
