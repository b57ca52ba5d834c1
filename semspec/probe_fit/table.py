"""What was measured of a probe, for people: its figures beside those of the baselines, and the differences."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from semspec.probe.metrics import LOST

FIGURES = {
    "correlation": "correlation",
    "r2": "R2",
    "ece": "ECE",
    "auroc": "AUROC, likely",
    "within_prefix_auroc": "  in one prefix",
    "valid_auroc": "AUROC, right",
    "valid_within_prefix_auroc": "  in one prefix",
    "wrong_refused": "wrong rejected",
}
BASELINES = {
    "logprob": "mean log-prob.",
    "length_and_step": "length, step",
    "length_step_and_operation": "length, step, kind",
}
CLEARLY = "✓ clearly better, at 95 %"
REJECTED = f"wrong rejected: of the wrong steps, where {100 * LOST:g} % of the right ones are rejected"
WIDTH = 134


def print_tables(name: str, found: dict[str, Any]) -> None:
    """To stderr; not narrower than the tables are, wherever that goes."""
    console = Console(stderr=True)
    console.width = max(console.width, WIDTH)
    for table in tables(name, found):
        console.print(table)


def tables(name: str, found: dict[str, Any]) -> Iterator[Table]:
    """One for each choice of rows: all, the model's own steps, the other model's."""
    own, other = ("draft", "target") if name == "draft" else ("target", "draft")
    parts = {"test": "all steps", "test_own_steps": f"the {own}'s steps", "test_other_steps": f"the {other}'s steps"}
    for part, steps in parts.items():
        if part in found:
            title = f"{name} probe, {steps}: {found[part]['n']:,} of {found[part]['problems']:,} problems"
            yield _table(title, found[part])


def _table(title: str, figures: dict[str, Any]) -> Table:
    # What knows the operation knows length and step as well.
    shown = {key: label for key, label in BASELINES.items() if key in figures["baselines"]}
    if "length_step_and_operation" in shown:
        del shown["length_and_step"]
    caption = f"{CLEARLY}; {REJECTED}" if "wrong_refused" in figures else CLEARLY
    view = Table(title=title, box=box.SIMPLE, title_justify="left", caption=caption)
    view.add_column("", no_wrap=True)
    for heading in ("probe", *(h for label in shown.values() for h in (label, "probe less it"))):
        view.add_column(heading, justify="right", no_wrap=True)
    for key, label in FIGURES.items():
        if key not in figures:
            continue
        cells = [_cell(figures[key], figures["intervals"][key])]
        for baseline in shown:
            cheap = figures["baselines"][baseline]
            gain = cheap["difference"][key]
            cells.append(_cell(cheap[key], cheap["intervals"][key]))
            cells.append(_cell(gain["value"], gain["interval"], "+") + (" ✓" if gain["clearly_better"] else "  "))
        view.add_row(label, *cells)
    return view


def _cell(value: float | None, interval: list[float] | None, sign: str = "") -> str:
    if value is None:
        return "–"
    bounds = f" \\[{interval[0]:{sign}.2f}, {interval[1]:{sign}.2f}]" if interval else ""  # not a style of rich
    return f"{value:{sign}.2f}{bounds}"
