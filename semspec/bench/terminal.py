"""The tables of runs on a terminal: wide, narrow, or one below the other, as its width allows."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text

from semspec.bench.table import STYLES, Arm, Grid, correction, notes, title


def render(summaries: Iterable[dict[str, Any]]) -> Table:
    """The table of one run or several, each under its label; wide or narrow as the terminal is."""
    whole = Table.grid()
    for i, summary in enumerate(summaries):
        if i:
            whole.add_row("")
        whole.add_row(Text(title(summary), style="bold"))
        whole.add_row(_Arms(summary))
        for note in notes(summary):
            whole.add_row(Text(note, style="red" if " is worse: " in note else "yellow"))
    return whole


@dataclass(frozen=True)
class _Arms:
    """The arms of one run, drawn when the width of the terminal is known."""

    summary: dict[str, Any]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        def style(key: str, arm: Arm) -> str:
            coloured = key == "quality" or (key == "speed" and arm["quality"] == "worse")
            return STYLES[arm["quality"]] if coloured else ""

        whole = Grid.of_run(self.summary)
        measures = whole.only(measures=True)
        several = [whole] if len(measures.columns) < 3 else [whole.only(measures=False), measures]
        narrow = Grid.of_run(self.summary, narrow=True)
        fits = (shown for shown in ([whole], several) if max(g.width() for g in shown) <= options.max_width)
        for grid in (grids := next(fits, narrow.parts(options.max_width))):
            yield grid.render(style, padding=(0, 1, 0, 0))
        if sum(len(grid.columns) - 1 for grid in grids) < len(whole.columns) - 1:
            yield Text("More columns on a wider terminal, and in the report.", style="dim")


def render_comparison(found: dict[str, Arm], baseline: str) -> RenderableType:
    """Every arm against one method."""
    return _Comparison(found, baseline)


@dataclass(frozen=True)
class _Comparison:
    found: dict[str, Arm]
    baseline: str

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield Text(f"against {self.baseline}", style="italic")
        for grid in Grid.of_comparison(self.found).parts(options.max_width):
            yield grid.render(padding=(0, 1, 0, 0))
        for note in correction(self.found):
            yield Text(note, style="dim")
