"""Figures of `semspec sparse quality` as tables, for a terminal and for a document."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from rich import box
from rich.table import Table

from semspec.bench.markdown import table
from semspec.bench.table import Cell

HEADS = (
    "plan", "KL from dense, nats", "top-1 kept, %", "right, %", "against dense, points", "tau", "tau / dense",
)  # fmt: skip


def on_screen(rows: Sequence[dict[str, Any]]) -> Table:
    shown = Table(box=box.SIMPLE)
    for head in HEADS:
        shown.add_column(head, justify="left" if head == "plan" else "right")
    for row in rows:
        shown.add_row(*cells(row))
    return shown


def in_markdown(documents: Iterable[dict[str, Any]]) -> str:
    """One table of several runs on the same problems. The dense row is the same in all and is printed once."""
    rows, seen = [], set[str]()
    for document in documents:
        label = document.get("label", "")
        for row in document["rows"]:
            name = row["plan"] if row["plan"] == "dense" or not label else f"{label}: {row['plan']}"
            if name not in seen:
                rows.append([Cell(text) for text in (name, *cells(row)[1:])])
            seen.add(name)
    return table(HEADS, rows) + "\n"


def cells(row: dict[str, Any]) -> list[str]:
    right, loss, tau = row["right"], row["right_against_dense"], row["tau_against_dense"]
    dense = row["plan"] == "dense"
    return [
        row["plan"],
        "0" if dense else _nats(row["kl"]),
        "100" if dense else _percent(row["favourite_kept"]),
        _percent(right) if right else "–",
        "–" if not loss else "0" if dense else _points(loss),
        f"{row['tau']:.2f}",
        "1" if dense else f"{tau['value']:.3f} [{tau['low']:.3f}, {tau['high']:.3f}]",
    ]


def _nats(kl: dict[str, float]) -> str:
    return f"{kl['value']:.2g} [{kl['low']:.2g}, {kl['high']:.2g}]"


def _points(loss: dict[str, float]) -> str:
    return f"{100 * loss['value']:+.1f} [{100 * loss['low']:+.1f}, {100 * loss['high']:+.1f}]"


def _percent(share: dict[str, float]) -> str:
    return f"{100 * share['share']:.1f} [{100 * share['low']:.1f}, {100 * share['high']:.1f}]"
