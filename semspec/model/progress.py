"""A progress bar for what takes long: on standard error, and only if a person is looking."""

from __future__ import annotations

import sys

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as RichProgress


class Progress:
    def __init__(self, what: str, total: int) -> None:
        self._what, self._total = what, total
        self._bar: RichProgress | None = None

    def start(self) -> None:
        if sys.stderr.isatty():
            columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
            self._bar = RichProgress(*columns, console=Console(stderr=True), transient=True)
            self._bar.add_task(self._what, total=self._total)
            self._bar.start()

    def advance(self, size: int) -> None:
        if self._bar is not None:
            self._bar.advance(self._bar.task_ids[0], size)

    def stop(self) -> None:
        if self._bar is not None:
            self._bar.stop()
