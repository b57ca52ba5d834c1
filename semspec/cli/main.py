"""The command line. Exit codes: 0 done, 2 bad request, 3 model cannot be used, 130 interrupted, 1 anything else."""

from __future__ import annotations

import errno
import io
import os
import re
import signal
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.text import Text
from typer.core import TyperGroup

import semspec
from semspec.cli import bench as bench_commands
from semspec.cli import head as head_commands
from semspec.cli import probe as probe_commands
from semspec.cli import serve as serve_commands
from semspec.cli import settings
from semspec.cli import sparse as sparse_commands
from semspec.cli.advise import advise
from semspec.cli.calibrate import calibrate
from semspec.cli.chat import chat
from semspec.cli.generate import generate
from semspec.cli.info import info
from semspec.cli.listing import listing
from semspec.cli.vllm import vllm_args
from semspec.cli.vocabulary import vocabulary
from semspec.errors import OLD_NAME, SemspecError

START, MEASURE, PREPARE = "Start here", "Does it pay, and what does it lose", "Prepare models"
ORDER = {
    START: ("demo", "generate", "chat", "serve", "list"),
    MEASURE: ("info", "advise", "bench", "compare", "calibrate"),
    PREPARE: ("probe", "head", "sparse", "vocabulary", "vllm-args"),
}


class Commands(TyperGroup):
    """Commands in the order in which one needs them, whether they have commands of their own or not."""

    def list_commands(self, ctx: Any) -> list[str]:
        return [name for names in ORDER.values() for name in names]


app = typer.Typer(
    cls=Commands,
    help="Speculative decoding with a pluggable verifier: a small draft model proposes, the target verifies.",
    epilog=settings.HELP,
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_enable=False,
)
for command in (generate, chat, serve_commands.serve):
    app.command(rich_help_panel=START)(command)
app.command("list", rich_help_panel=START)(listing)
for command in (info, advise, bench_commands.compare, calibrate):
    app.command(rich_help_panel=MEASURE)(command)
for command in (vocabulary, vllm_args):
    app.command(rich_help_panel=PREPARE)(command)
app.add_typer(bench_commands.app, name="bench", rich_help_panel=MEASURE)
app.add_typer(probe_commands.app, name="probe", rich_help_panel=PREPARE)
app.add_typer(head_commands.app, name="head", rich_help_panel=PREPARE)
app.add_typer(sparse_commands.app, name="sparse", rich_help_panel=PREPARE)


@app.callback(invoke_without_command=True)
def main(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", metavar="", help="Print the version and exit.")] = False,
    config: Annotated[
        Path | None,
        typer.Option(envvar="SEMSPEC_CONFIG", help=f"Config file; {settings.default_path()} by default."),
    ] = None,
) -> None:
    if version:
        typer.echo(semspec.__version__)
        raise typer.Exit()
    settings.apply(context, config)


@app.command(rich_help_panel=START)
def demo(
    problems: Annotated[int, typer.Option(help="Number of problems.")] = 6,
    seed: Annotated[int, typer.Option(help="Seed that chooses the problems.")] = 0,
    num_draft_tokens: Annotated[int, typer.Option("--num-draft-tokens", "-k", help="Draft length of exact.")] = 6,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
) -> None:
    """Solve word problems with the shipped pocket pair: target only, exact, fly and semantic+, side by side."""
    from semspec.cli.demo import demo as run_demo

    run_demo(Console(highlight=False), problems, seed, num_draft_tokens, device)


FULL = (errno.ENOSPC, errno.EDQUOT, errno.EIO)


def warn_in_words() -> None:
    """Say where an option of a verifier or drafter has its former name, once for each; Python itself is silent."""
    before = warnings.showwarning

    def show(message: Warning | str, category: type[Warning], *more: Any, **other: Any) -> None:
        if str(message).endswith(OLD_NAME):
            typer.echo(f"semspec: {message}", err=True)
        else:
            before(message, category, *more, **other)

    warnings.filterwarnings("once", message=f".*{re.escape(OLD_NAME)}$", category=DeprecationWarning)
    warnings.showwarning = show


def run() -> None:
    """The `semspec` command: errors become one readable line and an exit code."""
    warn_in_words()
    # Its tables of tensors and advice on each of its kernels are long; what counts is said in our own words.
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    if isinstance(sys.stdin, io.TextIOWrapper):  # invalid bytes are refused by whoever reads them, by name
        sys.stdin.reconfigure(errors="surrogateescape")
    interrupts: list[int] = []
    try:
        with noting_interrupts(interrupts):
            command = typer.main.get_command(app)
            settings.name_variables(command, ())  # so early for the sake of `semspec --help`
            command()
    except SemspecError as error:
        Console(stderr=True, soft_wrap=True).print(Text(f"semspec: {error}", style="red"))
        sys.exit(error.exit_code)
    except OSError as error:  # a path that cannot be created, read or written
        if error.filename is None and error.errno not in FULL:
            raise
        message = f"semspec: {error.filename}: {error.strerror}; is the path right, and may it be written?"
        if error.filename is None:
            message = f"semspec: what was to be written could not be: {error.strerror}"
        Console(stderr=True, soft_wrap=True).print(Text(message, style="red"))
        sys.exit(2)
    except KeyboardInterrupt:  # whoever was interrupted has said what is kept
        sys.exit(130)
    except Exception:
        if not interrupts:
            raise
        sys.exit(130)


@contextmanager
def noting_interrupts(interrupts: list[int]) -> Iterator[None]:
    """Whether there was an interrupt: some libraries, interrupted while they are imported, say that they are not there.
    Commands that go on after one have handlers of their own."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        interrupts.append(number)
        signal.default_int_handler(number, frame)

    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:  # ignored, or somebody else's
        yield
        return
    signal.signal(signal.SIGINT, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
