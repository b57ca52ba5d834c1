"""How an answer looks to a person: tokens coloured by where they came from, and why the relaxed ones stand."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from rich.text import Text

if TYPE_CHECKING:
    from semspec.pair import Result
    from semspec.types import Event, Origin

STYLES: dict[Origin, str] = {"draft": "green", "relaxed": "yellow", "target": "default"}


def coloured(events: Iterable[Event]) -> Text:
    """Green from the draft, yellow relaxed, plain from the target."""
    text = Text()
    for event in events:
        for piece, origin in event.spans:
            text.append(piece, style=STYLES[origin])
    return text


def relaxed_tokens(result: Result, spelling: Callable[[int], str]) -> list[dict[str, Any]]:
    """Every relaxed token: where it stands, what the target would have written there, and the rule's reason."""
    found: list[dict[str, Any]] = []
    start = 0
    for event in result.events:
        for i, why in sorted(event.relaxed.items()):
            instead = None if why.instead is None else spelling(why.instead)
            found.append({"at": start + i, "text": spelling(event.tokens[i]), "instead": instead, "why": why.reason})
        start += len(event.tokens)
    return found


def reasons(relaxed: list[dict[str, Any]]) -> Text:
    """The same as a listing, one line each."""
    lines = []
    for token in relaxed:
        instead = "" if token["instead"] is None else f" for {token['instead']!r}"
        lines.append(f"{token['at']:>6}  {token['text']!r}{instead}: {token['why']}")
    return Text("\n".join(lines) or "nothing was relaxed", style=STYLES["relaxed"])
