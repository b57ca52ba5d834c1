"""The figures of a report, drawn twice: on white and on black, because a page follows its reader's screen.

Each figure is small, so that its letters stay readable on a phone, and says what was run: a figure is copied without
its page sooner or later. Red means "worse than the target alone, with confidence" and nothing else.
"""

from __future__ import annotations

import textwrap
import warnings
from collections.abc import Callable
from io import BytesIO
from typing import Any

from semspec.bench.colours import colour_of
from semspec.bench.labels import place_names
from semspec.bench.names import described
from semspec.bench.table import speed_heading
from semspec.errors import BadRequest

Arms = dict[str, dict[str, Any]]
THEMES = {
    "light": {"ink": "#1f2328", "soft": "#6b7280", "grid": "#e5e7eb", "ground": "#ffffff", "worse": "#c62828"},
    "dark": {"ink": "#e6e8eb", "soft": "#9aa3ad", "grid": "#30363d", "ground": "#161b22", "worse": "#ff6b6b"},
}
MARKERS = "os^Dv"  # of arms with the same rule
CUT, LOOPS = "#e09f3e", "#9467bd"


def draw(summary: dict[str, Any]) -> dict[str, dict[str, bytes]]:
    """Name of a figure -> theme -> PNG. Figures without anything to show are left out."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise BadRequest("the report's plots need matplotlib; pip install 'semspec[bench]'") from None
    figures: dict[str, dict[str, bytes]] = {}
    for name, (paint, height) in FIGURES.items():
        for theme, colours in THEMES.items():
            figure = Figure(figsize=(5.2, height(summary["arms"])), dpi=160, layout="constrained")
            figure.set_facecolor(colours["ground"])
            axes = figure.add_subplot()
            if not paint(_Style(summary, colours), axes):
                break
            figure.supxlabel(_plain(described(summary), 70), fontsize=6.5, color=colours["soft"], x=0.99, ha="right")
            figures.setdefault(name, {})[theme] = _png(figure)
    return figures


def _png(figure: Any) -> bytes:
    out = BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # a sign that the font does not have becomes a box
        figure.savefig(out, format="png", facecolor=figure.get_facecolor(), metadata={"Software": None})
    return out.getvalue()


def _plain(text: str, width: int = 20) -> str:
    """A text as it is: nothing in it is a formula, and a long one goes over several lines."""
    visible = "".join(c if c.isprintable() else "?" for c in text[:200])
    return "\n".join(textwrap.wrap(visible, width) or [""]).replace("$", r"\$")


def _name(arm: str, width: int = 20) -> str:
    """An arm's name, broken after its commas."""
    return _plain(arm.replace(",", ", "), width).replace(", ", ",")


class _Style:
    """How the arms of one run look in every figure."""

    def __init__(self, summary: dict[str, Any], theme: dict[str, str]) -> None:
        self.summary, self.theme = summary, theme
        self.arms: Arms = summary["arms"]
        self.colours = {name: colour_of(name, arm["role"], theme["soft"]) for name, arm in self.arms.items()}
        rules = [name.partition(":")[0] for name in self.arms]
        order = {name: rules[:i].count(rules[i]) for i, name in enumerate(self.arms)}
        self.markers = {name: MARKERS[order[name] % len(MARKERS)] for name in self.arms}

    def verdict(self, name: str) -> str:
        return self.theme["worse"] if self.arms[name]["quality"] == "worse" else self.colours[name]

    def frame(self, axes: Any, title: str, x: str, y: str = "", grid: str = "both") -> None:
        axes.set_facecolor(self.theme["ground"])
        axes.set_title(title, fontsize=10, fontweight="bold", color=self.theme["ink"], loc="left", pad=8)
        axes.set_xlabel(x, fontsize=8, color=self.theme["soft"])
        axes.set_ylabel(y, fontsize=8, color=self.theme["soft"])
        axes.tick_params(labelsize=8, colors=self.theme["ink"], length=0)
        axes.grid(axis=grid, color=self.theme["grid"], linewidth=0.8)
        axes.set_axisbelow(True)
        for side in axes.spines.values():
            side.set_visible(False)

    def legend(self, axes: Any, **where: Any) -> None:
        axes.legend(fontsize=7, frameon=False, labelcolor=self.theme["ink"], **where)

    def intervals(self, axes: Any, rows: list[tuple[str, float, float, float, str, str]]) -> None:
        """One line per arm, the first on top: (name, value, low, high, colour, words at the value)."""
        for y, (_, value, low, high, colour, words) in enumerate(rows):
            start = "center" if len(words) < 8 else "left"
            axes.plot([low, high], [y, y], color=colour, linewidth=2.2, solid_capstyle="round")
            axes.plot([value], [y], "o", color=colour, markersize=6)
            ink = colour if colour == self.theme["worse"] else self.theme["ink"]  # pale letters are hard to read
            axes.annotate(words, (value, y), (0, 6), textcoords="offset points", ha=start, fontsize=7.5, color=ink)
        axes.set_yticks(range(len(rows)), [_name(name) for name, *_ in rows])
        axes.set_ylim(len(rows) - 0.5, -0.6)
        axes.margins(x=0.12)


def accuracy(style: _Style, axes: Any) -> bool:
    rows = []
    for name, arm in style.arms.items():
        if share := arm["accuracy"]:
            value, low, high = (100 * share[k] for k in ("share", "low", "high"))
            rows.append((name, value, low, high, style.verdict(name), f"{value:.1f}"))
    style.intervals(axes, rows)
    style.frame(axes, "Correct answers", "% of outputs, 95 % interval; red: worse than the target alone", grid="x")
    return any(value for _, value, *_ in rows)


def front(style: _Style, axes: Any) -> bool:
    points = {
        name: (arm["seconds_per_problem"]["value"], 100 * arm["accuracy"]["share"])
        for name, arm in style.arms.items()
        if arm["accuracy"] and arm["seconds_per_problem"]
    }
    if not any(up for _, up in points.values()):
        return False
    best = [points[name] for name in style.summary["pareto"]]
    axes.plot(*zip(*best, strict=True), color=style.theme["soft"], linewidth=1, linestyle="--", label="Pareto front")
    intervals = []
    for name, (x, y) in points.items():
        share, colour = style.arms[name]["accuracy"], style.verdict(name)
        low, high = 100 * share["low"], 100 * share["high"]
        intervals.append((x, low, high))
        axes.plot([x, x], [low, high], color=colour, linewidth=1.2, alpha=0.5)
        axes.plot([x], [y], style.markers[name], color=colour, markersize=7)
    axes.margins(x=0.25, y=0.15)
    style.frame(
        axes, "Correct answers against time", "seconds per problem (left is better)", "% correct (up is better)"
    )
    style.legend(axes, loc="lower right")

    def write(name: str, offset: tuple[float, float], align: str) -> Any:
        far = max(abs(offset[0]), abs(offset[1])) > 20
        near = ({"left": 0, "right": 1, "center": 0.5}[align], 0.5)
        line = {"arrowstyle": "-", "color": style.theme["soft"], "linewidth": 0.6, "relpos": near} if far else None
        return axes.annotate(
            _name(name, 40), points[name], offset, textcoords="offset points", va="center", fontsize=7.5, ha=align,
            color=style.theme["worse" if style.arms[name]["quality"] == "worse" else "ink"], arrowprops=line,
        )  # fmt: skip

    place_names(axes, points, intervals, write)
    return True


def speed(style: _Style, axes: Any) -> bool:
    """Speedups; in grey, ratios of time of arms that have no speedup."""
    heading = speed_heading(style.summary)
    rows = []
    for name, arm in style.arms.items():
        if name == style.summary["baseline"] or arm["quality"] == "spread" or not (times := arm["time_ratio"]):
            continue
        value = times["value"]
        low, high = (value if times[end] is None else times[end] for end in ("low", "high"))
        refused = heading == "speedup" and not arm["speedup"]
        colour = style.theme["soft"] if refused else style.verdict(name)
        rows.append((name, value, low, high, colour, f"{value:.2f}x" + (" time only, no speedup" if refused else "")))
    style.intervals(axes, rows)
    axes.axvline(1.0, color=style.theme["soft"], linewidth=1, linestyle=":")
    title = "Speedup over the target alone" if heading == "speedup" else "Time ratio (quality not measured)"
    style.frame(axes, title, "target's seconds / arm's seconds on the same problems, 95 % interval", grid="x")
    return bool(rows)


def accepted(style: _Style, axes: Any) -> bool:
    curves = {}
    for name, arm in style.arms.items():
        if arm["acceptance_rate"] is not None:
            rounds = {int(n): count for n, count in arm["acceptance_histogram"].items()}
            total = sum(rounds.values())
            curves[name] = {n: 100 * rounds.get(n, 0) / total for n in range(max(rounds) + 1)}
    style.frame(axes, "Accepted draft tokens", "accepted draft tokens in a round", "% of rounds")
    return _curves(style, axes, curves)


def positions(style: _Style, axes: Any) -> bool:
    curves = {}
    for name, arm in style.arms.items():
        if shares := arm.get("acceptance_per_position"):  # earlier versions had none
            curves[name] = {i: 100 * share for i, share in enumerate(shares, 1)}
    style.frame(axes, "Acceptance by position", "position in the draft", "% of draft tokens accepted")
    drawn = _curves(style, axes, curves)
    axes.set_ylim(0, 100)
    return drawn


def _curves(style: _Style, axes: Any, curves: dict[str, dict[int, float]]) -> bool:
    """One line per arm, over whole numbers."""
    for name, points in curves.items():
        line = {"color": style.colours[name], "markersize": 3.5, "linewidth": 1.5, "label": _name(name, 30)}
        axes.plot(list(points), list(points.values()), f"{style.markers[name]}-", **line)
    axes.set_ylim(bottom=0)
    axes.xaxis.get_major_locator().set_params(integer=True)
    if curves:
        style.legend(axes, ncols=2, loc="upper center", bbox_to_anchor=(0.45, -0.16))
    return any(height for points in curves.values() for at, height in points.items() if at)


def lengths(style: _Style, axes: Any) -> bool:
    """Lossy rules fail first in texts that grow, reach the limit or loop; what never happens is left out."""
    rows = [(name, arm) for name, arm in style.arms.items() if arm["length_ratio"]]
    bars = {
        ("length, % of target's", style.theme["soft"]): [100 * arm["length_ratio"]["value"] for _, arm in rows],
        ("cut at limit, %", CUT): [100 * arm["cap_rate"]["share"] for _, arm in rows],
        ("loops, %", LOOPS): [100 * arm["loop_rate"]["share"] for _, arm in rows],
    }
    drawn = {what: values for what, values in bars.items() if any(values)}
    thick = 0.78 / max(1, len(drawn))
    for i, ((label, colour), values) in enumerate(drawn.items()):
        for y, value in enumerate(values):
            bar = y + (i - (len(drawn) - 1) / 2) * thick
            axes.barh(bar, value, 0.88 * min(thick, 0.4), color=colour, label=label if not y else None)
            axes.annotate(
                f"{value:.0f}", (value, bar), (3, 0), textcoords="offset points", va="center", fontsize=7,
                color=style.theme["ink"],
            )  # fmt: skip
    axes.set_yticks(range(len(rows)), [_name(name) for name, _ in rows])
    axes.set_ylim(len(rows) - 0.5, -0.6)
    axes.margins(x=0.1)
    several = len(drawn) > 1
    title, unit = ("Length, cut-offs and loops", "%") if several else ("Length", "% of the target's")
    style.frame(axes, title, unit, grid="x")
    if several:
        style.legend(axes, ncols=3, loc="upper center", bbox_to_anchor=(0.4, -0.12))
    return bool(drawn)


def _rows(each: float) -> Callable[[Arms], float]:
    return lambda arms: 1.3 + each * len(arms)


def _plane(arms: Arms) -> float:
    return max(3.4, _rows(0.42)(arms))  # as high as its neighbour


def _under_legend(arms: Arms) -> float:
    return 3.3 + 0.09 * len(arms)


FIGURES: dict[str, tuple[Callable[[_Style, Any], bool], Callable[[Arms], float]]] = {
    "accuracy": (accuracy, _rows(0.42)),
    "speed": (speed, _rows(0.42)),
    "pareto": (front, _plane),
    "lengths": (lengths, _rows(0.42)),
    "acceptance": (accepted, _under_legend),
    "positions": (positions, _under_legend),
}
