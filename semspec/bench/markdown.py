"""The same tables for a document: Markdown, every column, an interval beside its figure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from semspec.bench.table import Cell, Grid, correction, notes, title


def write_tables(
    summaries: Sequence[dict[str, Any]],
    comparisons: Sequence[dict[str, dict[str, Any]]] = (),
    baseline: str | None = None,
) -> str:
    """All runs one after the other, each with its notes and, if its arms were compared with one of them, that."""
    parts = []
    for i, summary in enumerate(summaries):
        parts += [f"{title(summary)}:", _grid(Grid.of_run(summary)), _list(notes(summary))]
        if i < len(comparisons):
            found = comparisons[i]
            parts += [f"Against `{baseline}`:", _grid(Grid.of_comparison(found)), _list(correction(found))]
    return "\n\n".join(filter(None, parts)) + "\n"


def _list(lines: Iterable[str]) -> str:
    return "\n".join(f"- {line}" for line in lines)


def _grid(grid: Grid) -> str:
    return table(list(grid.headings.values()), [list(row.values()) for row in grid.rows().values()])


def table(heads: Sequence[str], rows: Iterable[Sequence[Cell]]) -> str:
    """A pipe in a name would end its cell, so it is written as its entity."""
    lines = ["| " + " | ".join(heads) + " |", "|" + "---|" * len(heads)]
    for row in rows:
        texts = [" ".join(part for part in (cell.text, cell.more) if part).replace("|", "&#124;") for cell in row]
        lines.append("| " + " | ".join(texts) + " |")
    return "\n".join(lines)
