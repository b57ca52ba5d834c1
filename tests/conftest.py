from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ["SEMSPEC_CONFIG"] = os.devnull  # not the settings of whoever runs the tests
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # Triton's kernels run on a CPU then; it looks when it is first imported

import pytest
from hypothesis import settings
from transformers.utils import logging

import semspec
from semspec.cli import main as cli
from tests.checkpoints import make_model, save

logging.disable_progress_bar()
settings.register_profile("repeatable", derandomize=True, deadline=None)  # the same examples on every machine
settings.load_profile("repeatable")
torch.set_num_threads(1)  # tests run side by side, and tiny models gain nothing from threads
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:  # as in a job in the background, where Ctrl-C would do nothing
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_call() -> None:
    """Tests that draw without a seed draw the same whichever tests have run before them in this process."""
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def target_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(make_model("llama3.1"), tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="session")
def draft_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A draft that is half right: the target itself, its weights disturbed."""
    model = make_model("llama3.1")
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.02)
    return save(model, tmp_path_factory.mktemp("draft"))


@pytest.fixture(scope="session")
def pair(target_folder: Path, draft_folder: Path) -> semspec.Pair:
    return semspec.load(target_folder, draft_folder, device="cpu", slots=8)


class Keyboard(io.StringIO):
    """Standard input that says it is a terminal."""

    def isatty(self) -> bool:
        return True


@pytest.fixture(name="semspec")
def semspec_command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """Run the command in this process; importing torch anew for every test would take most of their time."""

    def command(
        *arguments: object, stdin: str | None = "", typed: str | None = None
    ) -> subprocess.CompletedProcess[str]:
        monkeypatch.setattr(sys, "argv", ["semspec", *map(str, arguments)])
        monkeypatch.setattr(
            sys, "stdin", io.StringIO(stdin) if typed is None and stdin is not None else Keyboard(typed)
        )
        with pytest.raises(SystemExit) as end:
            cli.run()
        out, err = capsys.readouterr()
        return subprocess.CompletedProcess([], end.value.code or 0, out, err)

    return command
