"""math-verify in a process of its own, with limits on CPU time and memory.

SymPy can take hours or all memory over a short expression (9^{9^{9}}), and a model may write one. math-verify's own
limit is an alarm signal, which needs the main thread and is not delivered inside a long computation. So a process
that exceeds its limits ends, the answer counts as wrong, and the next question starts a new one.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from fractions import Fraction
from pathlib import Path
from typing import Any

from semspec.errors import SemspecError

CHILD = Path(__file__).with_name("math_child.py")
CPU_SECONDS = 5.0  # of one question
MEMORY_MB = 2048

_lock = threading.Lock()
_child: subprocess.Popen[str] | None = None
_owner = 0  # the process that started the child: a fork must not share its pipes


def equal(given: str, reference: str) -> bool:
    """Whether math-verify accepts a given answer for the reference; False for one that exceeds the limits."""
    return _ask([given, reference]) is True


def rational(text: str) -> Fraction | None:
    """The value of an expression, None where it has none, is not rational, or exceeds the limits."""
    value = _ask([text])
    return Fraction(value) if isinstance(value, str) else None


def stop() -> None:
    """End the process; the next question starts a new one."""
    global _child
    if _child is not None and _owner == os.getpid():
        _child.communicate()  # it ends when its input does
    _child = None


def _ask(question: list[str]) -> Any:
    global _child, _owner
    with _lock:
        if _child is None or _owner != os.getpid():
            _child, _owner = _start(), os.getpid()
        assert _child.stdin is not None and _child.stdout is not None
        answer = ""
        try:
            _child.stdin.write(json.dumps(question) + "\n")
            _child.stdin.flush()
            answer = _child.stdout.readline()
        except BrokenPipeError:
            pass
        finally:
            if not answer:  # it ended; or Ctrl-C, after which its late answer must not be read for the next one
                _child.kill()
                stop()
        return json.loads(answer) if answer else None


def _start() -> subprocess.Popen[str]:
    child = subprocess.Popen(
        [sys.executable, "-P", str(CHILD), str(CPU_SECONDS), str(MEMORY_MB)],  # -P: our `code` is not the library's
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        encoding="ascii",
    )
    assert child.stdout is not None
    if not child.stdout.readline():
        _, error = child.communicate()
        raise SemspecError(
            f"answers of mathematics are compared with math-verify, which does not start: {error.strip()[-300:]}; "
            "install it with: pip install math-verify"
        )
    return child
