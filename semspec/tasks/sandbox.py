"""Runs a program that a model wrote, with limits.

A separate, isolated Python without site packages, in an empty temporary folder and with an empty environment, under
limits on CPU time, memory, file size, open files and processes; it writes only to files in its folder, starts no
process and reaches no network (see `sandbox_child`). This stops mistakes: endless loops, memory hogs, files in the
wrong place. It does not stop code written to break out: it can read what its user can read, fill the disk, and cheat
the tests that run in its own process. Against that, run semspec itself in a container.
"""

from __future__ import annotations

import json
import os
import secrets
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from semspec.errors import BadRequest, SemspecError

CHILD = Path(__file__).with_name("sandbox_child.py")


@dataclass(frozen=True, slots=True)
class Outcome:
    passed: bool
    reason: str = ""  # why not, for people


def run(program: str, seconds: float = 10.0, memory_mb: int = 1024, file_mb: int = 16) -> Outcome:
    """Run a program to its end. It passes if it reaches it: no exception, no exit of its own, no limit hit."""
    if os.name != "posix":
        raise BadRequest("running model-written code needs the process limits of Linux or macOS; leave this task out")
    limits = {"seconds": seconds, "memory": memory_mb << 20, "file": file_mb << 20}
    token = secrets.token_hex(16)  # marks the child's own report: the program, which does not know it, cannot forge one
    header = json.dumps({"limits": limits, "token": token}).encode() + b"\n"
    with (
        tempfile.TemporaryDirectory(prefix="semspec-", ignore_cleanup_errors=True) as folder,
        tempfile.TemporaryFile() as report,  # not a pipe: the limit on file size keeps it small
    ):
        child = subprocess.Popen(
            [sys.executable, "-I", "-S", "-B", "-X", "utf8", str(CHILD)],
            stdin=subprocess.PIPE,
            stdout=report,
            stderr=subprocess.DEVNULL,
            cwd=folder,
            env={},
            start_new_session=True,
        )
        try:
            child.communicate(header + program.encode("utf-8", "replace"), timeout=seconds)
        except subprocess.TimeoutExpired:
            return Outcome(False, f"it did not end within {seconds:g} seconds")
        finally:
            if child.poll() is None:  # its group is still its own, so no other process can be hit
                os.killpg(child.pid, signal.SIGKILL)
                child.communicate()
        report.seek(0)
        _, found, result = report.read().decode("utf-8", "replace").rpartition(token)
    try:
        outcome, _ = json.JSONDecoder().raw_decode(result if found else "")  # a thread may write after it
    except ValueError:  # a child that was killed, or exited by itself, wrote no report
        code = child.returncode
        return Outcome(False, f"it was ended by signal {-code}" if code < 0 else "it ended before its tests did")
    if "refused" in outcome:
        raise SemspecError(f"this system does not let a process limit itself, so no code is run: {outcome['refused']}")
    return Outcome(outcome["passed"], outcome["reason"])
