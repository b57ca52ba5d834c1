"""Commands that time something say so where the machine is too busy, before they begin."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from semspec.bench import run
from semspec.cli import demo, info
from semspec.cli.main import app
from semspec.errors import BadRequest
from semspec.model import threads

ENDED = "ended by the test before anything is timed"
COMMANDS = {
    "demo": ["demo"],
    "info": ["info", "pocket"],
    "bench": ["bench", "--target", "pocket", "--task", "pocket", "--problems", "1", "--method", "exact:k=2"],
}


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    def end(*arguments: object, **more: object) -> None:
        raise BadRequest(ENDED)

    for place, name in ((demo, "load"), (info, "gather"), (run, "load")):
        monkeypatch.setattr(place, name, end)

    def tell(command: str, share: float, *more: str) -> str:
        monkeypatch.setattr(threads, "share_of_core", lambda: share)
        out = ["--out", str(tmp_path / "run")] if command == "bench" else []
        done = CliRunner().invoke(app, [*COMMANDS[command], *out, *more])
        assert isinstance(done.exception, BadRequest) and ENDED in str(done.exception)
        return done.stderr

    return tell


@pytest.mark.parametrize("command", COMMANDS)
def test_a_busy_machine_is_warned_of(told, command: str) -> None:
    assert "this machine is busy: one thread gets 20% of a core" in told(command, 0.2)
    assert "busy" not in told(command, 1.0)


def test_what_times_nothing_does_not_warn(told) -> None:
    assert "busy" not in told("info", 0.2, "--no-measure")
