"""How an answer looks in a terminal: tokens coloured by where they came from."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from rich.text import Text

if TYPE_CHECKING:
    from semspec.types import Event, Origin

STYLES: dict[Origin, str] = {"draft": "green", "relaxed": "yellow", "target": "default"}


def coloured(events: Iterable[Event]) -> Text:
    """Green from the draft, yellow relaxed, plain from the target."""
    text = Text()
    for event in events:
        for piece, origin in event.spans:
            text.append(piece, style=STYLES[origin])
    return text
