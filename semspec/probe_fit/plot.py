"""The reliability diagram of a probe, before and after calibration."""

from __future__ import annotations

from pathlib import Path

from torch import Tensor

from semspec.errors import BadRequest
from semspec.probe.metrics import ece, reliability


def draw_reliability(path: Path, title: str, raw: Tensor, calibrated: Tensor, labels: Tensor) -> None:
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise BadRequest("the reliability plot needs matplotlib; pip install 'semspec[bench]'") from None
    figure = Figure(figsize=(4.6, 4.8), dpi=160, layout="constrained")
    axes, counts = figure.subplots(2, 1, sharex=True, height_ratios=(4, 1))
    axes.plot([0, 1], [0, 1], color="#9aa3ad", linewidth=1, linestyle="--", label="perfect")
    for name, predicted, colour in (("raw", raw, "#e09f3e"), ("calibrated", calibrated, "#3b7dd8")):
        rows = reliability(predicted, labels)
        label = f"{name}, ECE {ece(predicted, labels):.3f}"
        axes.plot([x for x, _, _ in rows], [y for _, y, _ in rows], color=colour, marker="o", markersize=4, label=label)
    counts.hist(calibrated.tolist(), bins=20, range=(0, 1), color="#3b7dd8", alpha=0.6)
    axes.set(title=title.replace("$", r"\$"), ylabel="share of samples", xlim=(0, 1), ylim=(0, 1))
    counts.set(xlabel="predicted semantic probability", ylabel="steps")
    axes.legend(fontsize=8, frameon=False)
    for a in (axes, counts):
        a.grid(color="#e5e7eb")
        a.set_axisbelow(True)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Software": None})
