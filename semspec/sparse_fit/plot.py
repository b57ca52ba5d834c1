"""Plots of calibration and quality."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from semspec.errors import BadRequest
from semspec.sparse.plan import SparsePlan

BLUE, ORANGE, GREY = "#3b7dd8", "#e09f3e", "#9aa3ad"


def draw(plan: SparsePlan, rows: list[dict[str, Any]], out: Path) -> list[Path]:
    """Plot what the plan and the rows have; returns the files written."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise BadRequest("plots need matplotlib; pip install 'semspec[bench]'") from None
    out.mkdir(parents=True, exist_ok=True)
    written: list[Path] = []

    def page(name: str, title: str, x: str, y: str) -> tuple[Any, Any]:
        figure = Figure(figsize=(5.2, 4.2), dpi=160, layout="constrained")
        axes = figure.subplots()
        axes.set(title=title, xlabel=x, ylabel=y)
        written.append(out / name)
        return figure, axes

    def save(figure: Any) -> None:
        figure.savefig(written[-1], metadata={"Software": None})

    if "layer_overlap" in plan.seen:
        figure, axes = page("layers.png", "Blocks that two layers share", "layer", "layer")
        image = axes.imshow(plan.seen["layer_overlap"].numpy(), vmin=0, vmax=1, cmap="viridis", origin="lower")
        figure.colorbar(image, label="Jaccard overlap, without blocks always read")
        save(figure)
    if "token_overlap" in plan.seen:
        overlap = plan.seen["token_overlap"]
        figure, axes = page("tokens.png", "Blocks shared with the first draft token", "draft token", "overlap")
        positions = range(1, overlap.shape[1] + 1)
        for layer in overlap:
            axes.plot(positions, layer.numpy(), color=GREY, linewidth=0.8)
        axes.plot(positions, overlap.nanmean(0).numpy(), color=BLUE, marker="o", label="mean of layers")
        axes.set_ylim(0, 1)
        axes.legend(frameon=False)
        save(figure)
    if rows:
        figure, axes = page("output.png", "Change of the output by plan", "KL from the dense target, nats", "")
        names = [row["plan"] for row in rows][::-1]
        values = [row["kl"]["value"] for row in rows][::-1]
        axes.barh(names, values, color=ORANGE)
        save(figure)
    if not written:
        raise BadRequest("this plan has nothing to plot; give figures of `semspec sparse quality` with --figures")
    return written
