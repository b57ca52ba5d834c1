"""What a model's program does by mistake stays in its own process and folder."""

from __future__ import annotations

import ctypes
import os
import sys
import time
from pathlib import Path

import pytest

from semspec.errors import SemspecError
from semspec.tasks import sandbox
from semspec.tasks.sandbox import run


@pytest.mark.parametrize(
    "program",
    [
        "assert 1 + 1 == 2",
        "print('x' * 10_000_000)",  # goes nowhere
        "import math, re, collections, itertools, heapq, typing, functools, datetime, hashlib, random",
        "open('own.txt', 'w').write('fine')\nassert open('own.txt').read() == 'fine'",
        "import os\nos.mkdir('a')\nos.rename('a', 'b')\nos.rmdir('b')\nassert os.listdir() == []",
        "import os, shutil\nos.mkdir('a')\nopen('a/b', 'w').close()\nshutil.rmtree('a')",
        "import tempfile\nwith tempfile.TemporaryDirectory() as t: open(t + '/x', 'w').close()",
        "open('/dev/null', 'w').write('x')",
        "import threading",
        "assert __name__ == '__main__'",
        "s = 'ü€'\nassert len(s) == 2",
    ],
)
def test_passes(program: str) -> None:
    assert run(program) == sandbox.Outcome(True)


@pytest.mark.parametrize(
    ("program", "reason"),
    [
        ("assert 1 + 1 == 3", "AssertionError"),
        ("def f(:", "SyntaxError"),
        ("import sys\nsys.exit(0)\nassert False", "SystemExit"),  # to leave before the tests is not to pass them
        ("import os\nos._exit(0)\nassert False", "ended before"),
        ("raise KeyboardInterrupt", "KeyboardInterrupt"),
        ("def f(n): return f(n + 1)\nf(0)", "RecursionError"),
        ("input()", "EOFError"),
        ("import numpy", "ModuleNotFoundError"),  # the standard library only
        ("\0", "null bytes"),
    ],
)
def test_fails_and_says_why(program: str, reason: str) -> None:
    outcome = run(program)
    assert not outcome.passed
    assert reason in outcome.reason


@pytest.mark.parametrize("loop", ["while True: pass", "import time\ntime.sleep(60)", "while True: print('x' * 1000)"])
def test_an_endless_program_is_killed(loop: str) -> None:
    start = time.perf_counter()
    outcome = run(loop, seconds=0.5)
    assert not outcome.passed
    assert "0.5 seconds" in outcome.reason
    assert time.perf_counter() - start < 50, "the second sleeps for a minute"


def test_a_program_that_ignores_signals_is_killed() -> None:
    program = "import signal\nfor s in (15, 2, 1, 24): signal.signal(s, signal.SIG_IGN)\nwhile True: pass"
    assert not run(program, seconds=0.5).passed


def test_a_memory_hog_is_refused() -> None:
    outcome = run("hog = bytearray(2 << 30)", memory_mb=256)
    assert not outcome.passed
    assert "MemoryError" in outcome.reason


def test_a_file_hog_is_refused() -> None:
    outcome = run("with open('big', 'wb') as f:\n    for _ in range(64): f.write(bytes(1 << 20))", file_mb=1)
    assert not outcome.passed
    assert "File too large" in outcome.reason


@pytest.mark.parametrize(
    "attack",
    [
        "open({path!r}, 'w').write('gone')",
        "open({path!r}, 'a').write('gone')",
        "open('../' * 20 + {path!r}, 'w')",
        "import os\nos.open({path!r}, os.O_WRONLY | os.O_TRUNC)",
        "import pathlib\npathlib.Path({path!r}).write_text('gone')",
        "import os\nos.remove({path!r})",
        "import os\nos.rename({path!r}, 'mine')",
        "import os\nopen('x', 'w').close()\nos.replace('x', {path!r})",
        "import os\nos.truncate({path!r}, 0)",
        "import os\nos.chmod({path!r}, 0)",
        "import os\nos.symlink({path!r}, 'link')\nopen('link', 'w').write('gone')",
        "import shutil, os\nshutil.rmtree(os.path.dirname({path!r}))",
        "import os\nos.mkdir(os.path.dirname({path!r}) + '/new')",
        "import sys\nsys._getframe(1).f_globals.update(WRITING=0)\nopen({path!r}, 'w').write('gone')",
        "import sys\nsys._getframe(1).f_globals['CHANGES'].clear()\nimport os\nos.remove({path!r})",
        "import os\nos.devnull = {path!r}\nopen({path!r}, 'w').write('gone')",
        "import builtins\ntrue = builtins.isinstance\nbuiltins.isinstance = lambda a, b: b is int or true(a, b)\n"
        "try: open({path!r}, 'w').write('gone')\nfinally: builtins.isinstance = true",
        "import sqlite3\nsqlite3.connect({path!r} + '.db')",
    ],
)
def test_writes_do_not_leave_the_folder(attack: str, tmp_path: Path) -> None:
    victim = tmp_path / "victim.txt"
    victim.write_text("safe")
    outcome = run(attack.format(path=str(victim)))
    assert not outcome.passed
    assert "PermissionError" in outcome.reason
    assert victim.read_text() == "safe"
    assert os.listdir(tmp_path) == ["victim.txt"]


@pytest.mark.parametrize(
    "attack",
    [
        "import os\nos.fork()",
        "import os\nos.system('true')",
        "import os\nos.kill(os.getppid(), 9)",
        "import os\nos.killpg(0, 9)",
        "import subprocess\nsubprocess.run(['true'])",
        "import multiprocessing\nmultiprocessing.Process(target=print).start()",
        "import socket\nsocket.socket()",
        "import urllib.request\nurllib.request.urlopen('http://127.0.0.1:9/')",
        "import ctypes\nctypes.CDLL(None)",
        "import resource\nresource.setrlimit(resource.RLIMIT_CPU, (1, 1))",
    ],
)
def test_no_processes_signals_or_network(attack: str) -> None:
    outcome = run(attack)
    assert not outcome.passed
    assert "not allowed" in outcome.reason


LANDLOCK = sys.platform == "linux" and ctypes.CDLL(None).syscall(444, None, 0, 1) >= 1


@pytest.mark.skipif(not LANDLOCK, reason="Python alone does not report these; the kernel refuses them, with Landlock")
@pytest.mark.parametrize(
    "attack",
    [
        "import os\nos.open('victim.txt', os.O_WRONLY | os.O_TRUNC, dir_fd=os.open({folder!r}, os.O_RDONLY))",
        "import os\nos.mkfifo({folder!r} + '/new')",
        "import os\nos.mknod({folder!r} + '/new')",
    ],
)
def test_the_kernel_refuses_what_python_does_not_report(attack: str, tmp_path: Path) -> None:
    (tmp_path / "victim.txt").write_text("safe")
    outcome = run(attack.format(folder=str(tmp_path)))
    assert not outcome.passed
    assert "PermissionError" in outcome.reason
    assert (tmp_path / "victim.txt").read_text() == "safe"
    assert os.listdir(tmp_path) == ["victim.txt"]


@pytest.mark.parametrize(
    "report", ['{"passed": true, "reason": ""}', '{"refused": "x"}', "[1]", "garbage", "x" * (2 << 20)]
)
def test_a_program_cannot_write_its_own_report(report: str) -> None:
    write = f"import os\nfor fd in range(20):\n    try: os.write(fd, {report!r}.encode())\n    except OSError: pass\n"
    assert run(write + "os._exit(0)", file_mb=1) == sandbox.Outcome(False, "it ended before its tests did")
    assert run(write + "assert False", file_mb=1).passed is False


def test_it_starts_in_an_empty_folder_and_leaves_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET", "word")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    program = "import os\nassert os.listdir() == []\nassert 'SECRET' not in os.environ\nopen('left', 'w').close()"
    assert run(program) == sandbox.Outcome(True)
    assert os.listdir(tmp_path) == []


def test_code_is_not_run_where_limits_cannot_be_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = sandbox.CHILD.read_text().replace("resource.RLIMIT_AS, memory", "-1, memory")
    (tmp_path / "child.py").write_text(source)
    monkeypatch.setattr(sandbox, "CHILD", tmp_path / "child.py")
    with pytest.raises(SemspecError, match="no code is run"):
        run("pass")
