"""Running a program that a model wrote, so that an accident in it stays its own.

A separate, isolated Python without site packages, in an empty temporary folder and with an empty environment, under
limits on CPU time, memory, file size, open files and processes; what it opens for writing must lie in its folder; it
starts no process and reaches no network (see `sandbox_child`). This stops mistakes: endless loops, memory hogs, files
in the wrong place. It is no wall against code written to break out; for that, run semspec itself in a container.
"""

from __future__ import annotations

import json
import os
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
    with tempfile.TemporaryDirectory(prefix="semspec-", ignore_cleanup_errors=True) as folder:
        child = subprocess.Popen(
            [sys.executable, "-I", "-S", "-B", "-X", "utf8", str(CHILD), json.dumps(limits)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            cwd=folder,
            env={},
            start_new_session=True,
        )
        try:
            report, _ = child.communicate(program.encode("utf-8", "replace"), timeout=seconds)
        except subprocess.TimeoutExpired:
            return Outcome(False, f"it did not end within {seconds:g} seconds")
        finally:
            if child.poll() is None:  # its group is still its own, so nobody else can be hit
                os.killpg(child.pid, signal.SIGKILL)
                child.communicate()
    return _outcome(report.decode("utf-8", "replace"), child.returncode)


def _outcome(report: str, code: int) -> Outcome:
    """The child's report is one JSON object; a child that was killed, or left by itself, wrote none."""
    if not report:
        return Outcome(False, f"it was ended by signal {-code}" if code < 0 else "it ended before its tests did")
    said = json.loads(report)
    if "refused" in said:
        raise SemspecError(f"this system does not let a process limit itself, so no code is run: {said['refused']}")
    return Outcome(said["passed"], said["reason"])
