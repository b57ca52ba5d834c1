"""The README's commands and code are run as a reader would run them."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"```(\w*)\n(.*?)```", README, re.DOTALL)
COMMANDS = [line.split("#")[0].strip() for kind, block in BLOCKS if kind == "sh" for line in block.splitlines()]
PYTHON = [block for kind, block in BLOCKS if kind == "python"]
# Commands run in the interpreter that runs the tests, and on one thread, since other tests run beside them.
ENV = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}


def run(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, cwd=ROOT, env=ENV, capture_output=True, text=True, timeout=300)


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_works(command: str):
    words = shlex.split(command)
    if words == ["make", "test"]:
        words.insert(1, "--dry-run")  # this very suite; that it is a target and what it would run is all to check here
    elif words[0] == "make":
        words[0:1] = ["make", "--assume-old=.venv/.installed"]
    done = run(*words)
    assert done.returncode == 0, done.stderr
    expected = {"demo": "tokens/pass", "test": "pytest"}.get(words[-1])
    assert expected in done.stdout if expected else done.stdout.strip()


@pytest.mark.parametrize("block", PYTHON)
def test_a_code_block_runs(block: str):
    done = run(sys.executable, "-c", block)
    assert done.returncode == 0, done.stderr
    assert "<think>" in done.stdout and "True" in done.stdout


def test_the_readme_has_what_it_promises():
    assert {"make demo", "make test"} <= set(COMMANDS) and PYTHON
    for name in re.findall(r"^  (\w+\.py)", README, re.MULTILINE):
        assert (ROOT / "semspec" / name).is_file(), f"{name} is in the README's tree but not in the package"
    for link in re.findall(r"\]\(([\w./-]+)\)", README):
        assert (ROOT / link).exists(), f"{link} is linked but does not exist"
