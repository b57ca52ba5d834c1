"""Options that are said once and serve several commands; the bar that shows how far a command has got."""

from __future__ import annotations

import io
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import pytest
import typer
from typer.testing import CliRunner

from semspec.bench.arms import parse_arm
from semspec.cli import arguments
from semspec.cli.arguments import GenerationArguments, PairArguments, SpeculationArguments
from semspec.cli.progress import bar
from semspec.cli.spread import spread
from semspec.errors import BadRequest
from semspec.options import Options


@dataclass
class Where:
    place: Annotated[str, typer.Argument()]
    device: Annotated[str, typer.Option(help="Which device.")] = "auto"


@dataclass
class How:
    fast: Annotated[bool, typer.Option("--fast/--slow")] = False
    device: Annotated[str, typer.Option(help="Which device.")] = "auto"


def test_dataclasses_become_options() -> None:
    app, called = typer.Typer(), []

    @app.command()
    @spread
    def go(where: Where, how: How, times: Annotated[int, typer.Option("-t")] = 3) -> None:
        """Goes."""
        called.append((where, how, times))

    runner = CliRunner()
    assert runner.invoke(app, ["here"]).exit_code == 0
    assert runner.invoke(app, ["there", "--device", "cpu", "--fast", "-t", "5"]).exit_code == 0
    assert called == [(Where("here"), How(), 3), (Where("there", "cpu"), How(True, "cpu"), 5)]
    assert runner.invoke(app, []).exit_code == 2, "what has no default must be given"
    help = runner.invoke(app, ["--help"]).output
    assert "Goes." in help and help.count("--device") == 1


def test_options_of_the_command_line_have_the_defaults_of_requests() -> None:
    values = GenerationArguments().options()
    assert values == replace(Options(), stop=values.stop) and not values.stop
    assert GenerationArguments(num_draft_tokens="3").options(seed=2) == replace(values, num_draft_tokens=3, seed=2)
    assert SpeculationArguments(num_draft_tokens="auto").options() == Options(num_draft_tokens="auto")


def test_models_are_loaded_as_the_command_line_says(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr("semspec.pair.loading.load", lambda **given: asked.append(given))
    PairArguments(target="a", draft="b", dtype="int8").load(slots=3, allow_lossy=False)
    assert asked[0] == {
        "target": "a", "draft": "b", "device": "auto", "dtype": "int8", "context": None, "draft_device": None,
        "draft_dtype": None, "kv_dtype": "auto", "draft_vocab": None, "sparse": None, "slots": 3, "allow_lossy": False,
    }  # fmt: skip


def test_a_bar_is_for_people(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    for person in (True, False):
        stream = io.StringIO()
        stream.isatty = lambda person=person: person  # type: ignore[method-assign]
        monkeypatch.setattr("sys.stderr", stream)
        with bar("count sheep") as progress:
            progress(3_000, 9_000)
        said = stream.getvalue()
        assert ("count sheep" in said and "3000/9000" in said) == person
        assert person or said == ""


@pytest.mark.parametrize(
    "command", ["generate", "chat", "serve", "bench", "info", "compare", "probe fit", "probe train", "sparse calibrate"]
)
def test_help_shows_whole_names_and_defaults_at_80_columns(command: str) -> None:
    from semspec.cli.main import app

    shown = CliRunner().invoke(app, [*command.split(), "--help"], env={"COLUMNS": "80"}).output
    assert "--help" in shown and "…" not in shown and "list[" not in shown
    if command == "sparse calibrate":  # rich takes [reach] for markup and drops it
        assert "Default: reach" in shown


@pytest.mark.parametrize("length", ["9" * 5000, "²", "٣", "1.5", "-0x3"])
def test_an_odd_draft_length_is_refused_in_words(length: str) -> None:
    with pytest.raises(BadRequest, match="num_draft_tokens is"):
        Options(num_draft_tokens=arguments.draft_length(length))
    with pytest.raises(BadRequest, match="k is"):
        parse_arm(f"exact:k={length}")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no device that is full")
def test_a_full_disk_is_said_in_words() -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "semspec", "list", "ngram"], stdout=full, stderr=subprocess.PIPE, text=True
        )
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert "could not be: No space left on device" in done.stderr


def test_prompts_for_a_head_that_are_neither_a_task_nor_a_file_are_refused_as_such(semspec, tmp_path: Path) -> None:
    done = semspec("head", "train", "pocket", "--prompts", "no-such", "--out", tmp_path)
    assert done.returncode == 2 and "there is no task 'no-such'" in done.stderr
    done = semspec("head", "train", "pocket", "--prompts", "pocket", "--out", tmp_path)
    assert done.returncode == 2 and "give a number with --problems" in done.stderr
