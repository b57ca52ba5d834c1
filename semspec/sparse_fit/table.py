"""Figures of `semspec sparse quality` and `cost` as tables, for a terminal and for a document."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from rich import box
from rich.table import Table

from semspec.bench.markdown import table
from semspec.bench.table import Cell
from semspec.model.config import Shape
from semspec.sparse.plan import SparsePlan
from semspec.sparse_fit.cost import cost
from semspec.sparse_fit.quality import variants

HEADS = (
    "plan", "KL from dense, nats", "top-1 agreement, %", "correct, %", "against dense, points", "tau", "tau / dense",
    "FLOPs", "bytes",
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
        "0" if dense else _ends(row["kl"], ".2g"),
        "100" if dense else _percent(row.get("top1_agreement") or row["favourite_kept"]),
        _percent(right) if right else "–",
        "–" if not loss else "0" if dense else _points(loss),
        f"{row['tau']:.2f}",
        "1" if dense else _ends(tau, ".3f"),
        *(f"{row['cost'][name]:.3g}" if row.get("cost") else "–" for name in ("flops", "bytes")),
    ]


COST_HEADS = ("context", "plan", "GFLOP", "FLOPs / dense", "MB", "bytes / dense", "time / dense")


def cost_rows(
    shape: Shape, plan: SparsePlan, lengths: Sequence[int], tokens: int,
    clock: Callable[[SparsePlan, int], float] | None = None,
) -> list[dict[str, Any]]:  # fmt: skip
    """Operations and bytes of a pass of so many tokens, with each part of a plan and with all; and measured times."""
    rows = []
    for length in lengths:
        dense = cost(shape, None, length, tokens, shape.dtype.itemsize)
        for name, one in variants(plan, shape.num_layers).items():
            found = cost(shape, one, length, tokens, shape.dtype.itemsize)
            row: dict[str, Any] = {"context": length, "plan": name, "flops": found.flops, "bytes": found.bytes}
            ratios = {f"{what}_ratio": value for what, value in found.over(dense).items()}
            timed = 1.0 if one is None else clock(one, length) if clock else None
            rows.append(row | ratios | {"time_ratio": timed if clock else None})
    return rows


def costs_on_screen(rows: Sequence[dict[str, Any]]) -> Table:
    shown = Table(box=box.SIMPLE)
    for head in COST_HEADS:
        shown.add_column(head, justify="left" if head == "plan" else "right")
    for row in rows:
        totals = [sum(row[name].values()) / unit for name, unit in (("flops", 1e9), ("bytes", 1e6))]
        time = "–" if row["time_ratio"] is None else f"{row['time_ratio']:.3f}"
        shown.add_row(
            f"{row['context']}", row["plan"], f"{totals[0]:.4g}", f"{row['flops_ratio']:.3f}", f"{totals[1]:.4g}",
            f"{row['bytes_ratio']:.3f}", time,
        )  # fmt: skip
    return shown


def _ends(estimate: dict[str, Any] | None, form: str) -> str:
    """A figure with its interval; one problem has none."""
    if not estimate:
        return "–"
    interval = "" if estimate["low"] is None else f" [{estimate['low']:{form}}, {estimate['high']:{form}}]"
    return f"{estimate['value']:{form}}{interval}"


def _points(loss: dict[str, float]) -> str:
    return f"{100 * loss['value']:+.1f} [{100 * loss['low']:+.1f}, {100 * loss['high']:+.1f}]"


def _percent(share: dict[str, float]) -> str:
    return f"{100 * share['share']:.1f} [{100 * share['low']:.1f}, {100 * share['high']:.1f}]"
