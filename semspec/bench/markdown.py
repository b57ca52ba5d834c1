"""The same tables for a document: Markdown, every column, an interval beside its figure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from semspec.bench.table import COLUMNS, DUEL, Cell, cells, columns, duel_cells, notes, speed_heading, title


def write_tables(
    summaries: Sequence[dict[str, Any]], duels: Sequence[dict[str, dict[str, Any]]] = (), rival: str | None = None
) -> str:
    """All runs one after the other, each with its notes and, if it was paired with a rival, that."""
    parts = []
    for i, summary in enumerate(summaries):
        heading = speed_heading(summary)
        heads = [heading if key == "speed" else COLUMNS[key] for key in columns(summary)]
        rows = [cells(name, arm, heading) for name, arm in summary["arms"].items()]
        parts += [f"{title(summary)}:", table(heads, [[row[key] for key in columns(summary)] for row in rows])]
        if said := notes(summary):
            parts.append("\n".join(f"- {note}" for note in said))
        if i < len(duels):
            found = [list(duel_cells(name, arm).values()) for name, arm in duels[i].items()]
            parts += [f"Against `{rival}`:", table(list(DUEL.values()), found)]
    return "\n\n".join(parts) + "\n"


def table(heads: Sequence[str], rows: Iterable[Sequence[Cell]]) -> str:
    """A pipe in a name would end its cell, so it is written as its entity."""
    lines = ["| " + " | ".join(heads) + " |", "|" + "---|" * len(heads)]
    for row in rows:
        texts = [" ".join(part for part in (cell.text, cell.more) if part).replace("|", "&#124;") for cell in row]
        lines.append("| " + " | ".join(texts) + " |")
    return "\n".join(lines)
