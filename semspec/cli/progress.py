"""On standard error: the memory estimate and, in terminals, what is going on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.control import Control, ControlType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.text import Text


class bar:
    """`with bar("collect") as progress: progress(done, total)`. In a pipe it prints nothing."""

    def __init__(self, title: str) -> None:
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        self._progress = Progress(*columns, console=Console(stderr=True), transient=True)
        self._shown = self._progress.console.is_terminal
        self._task = self._progress.add_task(title, total=None)
        self.done = self.total = 0

    def __enter__(self) -> bar:
        if self._shown:
            self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._shown:
            self._progress.stop()

    def __call__(self, done: int, total: int) -> None:
        self.done, self.total = done, total
        self._progress.update(self._task, completed=done, total=total)

    def kept(self, where: Path) -> Callable[[], str]:
        """For `interruptible`, of work that is written down part by part."""
        return lambda: f"{self.done} of {self.total} parts are kept in {where}; the same command goes on from there"


@contextmanager
def loading(quiet: bool = False) -> Iterator[Callable[[str], None] | None]:
    """`with loading(quiet) as report: load(..., report=report)` prints the memory estimate, and a terminal shows that
    models are being loaded; nothing if `quiet`."""
    if quiet:
        yield None
        return
    console = Console(stderr=True, highlight=False, markup=False)
    if not console.is_terminal:
        yield lambda line: console.print(line, style="dim", soft_wrap=True)
        return
    # A line that stands still: loading may time passes, and the bars of readers draw over it instead of below it.
    erase = Control(ControlType.CARRIAGE_RETURN, (ControlType.ERASE_IN_LINE, 2))

    def report(line: str) -> None:
        console.control(erase)
        console.print(line, style="dim")
        console.print("loading models", style="dim", end="")

    console.print("loading models", style="dim", end="")
    try:
        yield report
    finally:
        console.control(erase)


def warn_if_busy() -> None:
    """For commands that time something: say if that is in vain."""
    from semspec.model.threads import busy

    if warning := busy():
        Console(stderr=True, soft_wrap=True).print(Text(warning, style="yellow"))


@contextmanager
def interruptible(kept: Callable[[], str]) -> Iterator[None]:
    """Work that Ctrl-C may end; it is then said what is kept."""
    try:
        yield
    except KeyboardInterrupt:
        Console(stderr=True, soft_wrap=True).print(Text(f"semspec: interrupted; {kept()}", style="red"))
        raise
