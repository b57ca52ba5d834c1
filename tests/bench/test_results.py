"""Committed results stay readable: whatever older versions wrote is drawn by this one, in all forms."""

from __future__ import annotations

import json
from collections.abc import Iterator
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from semspec.bench.markdown import write_tables
from semspec.bench.plots import FIGURES, draw
from semspec.bench.report import write_report
from semspec.bench.terminal import render, render_comparison

RESULTS = Path(__file__).parents[2] / "results"


def summaries(found: Any) -> Iterator[dict[str, Any]]:
    """All summaries in a document, however deep."""
    if isinstance(found, dict) and "arms" in found and "baseline" in found:
        yield found
    elif isinstance(found, dict | list):
        for part in found.values() if isinstance(found, dict) else found:
            yield from summaries(part)


def documents() -> dict[str, Any]:
    read = {path.name: json.loads(path.read_text(encoding="utf-8")) for path in sorted(RESULTS.glob("*.json"))}
    return {name: document for name, document in read.items() if any(summaries(document))}


def test_there_are_some() -> None:
    assert len(documents()) >= 15


@pytest.mark.parametrize("name", documents())
def test_a_result_is_readable(name: str) -> None:
    document = documents()[name]
    found, out = list(summaries(document)), StringIO()
    comparisons = document.get("comparisons", document.get("duels", []))  # as earlier releases wrote it
    for width in (80, 200):
        Console(file=out, width=width).print(render(found))
    for comparison in comparisons:
        Console(file=out, width=200).print(render_comparison(comparison, document["against"]))
    text = write_tables(found, comparisons, document.get("against"))
    for summary in found:
        assert all(arm in text and arm.split(":")[0] in out.getvalue() for arm in summary["arms"])


def test_a_result_can_be_drawn_and_reported(tmp_path: Path) -> None:
    name, document = next(iter(documents().items()))
    summary = next(summaries(document))
    assert set(draw(summary)) <= set(FIGURES)
    page = write_report([({"arms": [], "finished": True}, [], summary)], tmp_path)
    assert all(arm.split(":")[0] in page.read_text() for arm in summary["arms"]), name
