"""An answer on a terminal while it is generated, with a line of figures below.

Finished rows scroll by; only the last row and the figures are redrawn. So an answer may be longer than the screen, and
the screen of any width. A pipe gets the text only.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import IO, TYPE_CHECKING

from rich.console import Console, Group
from rich.containers import Lines
from rich.live import Live
from rich.text import Text

try:
    import termios
except ImportError:  # Windows
    termios = None  # type: ignore[assignment]

if TYPE_CHECKING:
    from semspec.types import Event, Origin

STYLES: dict[Origin, str] = {"draft": "green", "relaxed": "yellow", "target": "default"}
CONTROLS = {c: 0x2400 + c for c in range(32) if c not in (9, 10)} | {127: 0x2421} | dict.fromkeys(range(128, 160), "�")


class Writer:
    """Prints an answer event by event. `figures` gives the line below it, most important first; None: no line."""

    def __init__(self, console: Console, figures: Callable[[], Sequence[str]] | None = None) -> None:
        self.console, self.figures = console, figures
        self._row = Text()  # text after the last finished row
        self._keys = ExitStack()
        self._live: Live | None = None
        if figures is not None and console.is_terminal and not console.is_dumb_terminal:
            self._live = Live(console=console, auto_refresh=False, transient=True, vertical_overflow="crop")

    def __enter__(self) -> Writer:
        if self._live:
            self._keys.enter_context(unechoed(sys.stdin))
            self._live.start()
            self._draw(self._live)
        return self

    def __exit__(self, *_: object) -> None:
        if self._live:
            self._live.stop()
            if self._row:
                self.console.print(self._row)
        else:
            self.console.print()
        self._keys.close()

    def write(self, event: Event) -> None:
        if not self.console.is_terminal:  # rich would change some characters
            self.console.file.write(event.text)
            self.console.file.flush()
        elif not self._live:
            self.console.print(coloured([event]), end="", soft_wrap=True)
        else:
            self._row.append_text(coloured([event]))
            for row in self._rows():
                self.console.print(row)
            self._draw(self._live)

    def _rows(self) -> Lines:
        """Remove and return the finished rows: full, or ended by a newline."""
        self._row.expand_tabs(8)
        spaces = len(self._row) - len(self._row.plain.rstrip(" "))
        rows = self._row.wrap(self.console, self.console.width)
        last = rows.pop()
        last.rstrip()  # wrapping drops trailing spaces, which the next word needs
        self._row = last.append_text(self._row[len(self._row) - spaces :])
        return rows

    def _draw(self, live: Live) -> None:
        assert self.figures is not None
        line = Text(fit(self.figures(), self.console.width), style="dim", no_wrap=True, overflow="crop")
        live.update(Group(self._row, line), refresh=True)


@contextmanager
def unechoed(keyboard: IO[str]) -> Iterator[None]:
    """No echo: keys pressed meanwhile, Ctrl-C among them, must not move the cursor that rows are redrawn from."""
    if termios is None or not keyboard.isatty():
        yield
        return
    before = termios.tcgetattr(keyboard)
    termios.tcsetattr(keyboard, termios.TCSADRAIN, [*before[:3], before[3] & ~termios.ECHO, *before[4:]])
    try:
        yield
    finally:
        termios.tcsetattr(keyboard, termios.TCSADRAIN, before)


def coloured(events: Iterable[Event]) -> Text:
    """Green from the draft, yellow relaxed, plain from the target. Control characters become visible symbols, so that
    a model's text cannot control the terminal."""
    text = Text()
    for event in events:
        for piece, origin in event.spans:
            text.append(piece.translate(CONTROLS), style=STYLES[origin])
    return text


def fit(parts: Sequence[str], width: int) -> str:
    """As many of the parts, from the first on, as fit in one row."""
    line = ""
    for part in parts:
        longer = f"{line} · {part}" if line else part
        if len(longer) > width:
            break
        line = longer
    return line or (parts[0][:width] if parts else "")
