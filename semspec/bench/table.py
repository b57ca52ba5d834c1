"""One row per arm: what it got right beside how long it took.

`cells` says every figure in words once, for the terminal and for the report alike.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from rich import box
from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text

STYLES = {
    "worse": "bold red",
    "better": "bold green",
    "same": "green",
    "unclear": "yellow",
    "unmeasured": "yellow",
    "baseline": "dim",
}
NOTHING = "–"
COLUMNS = {  # key -> heading
    "arm": "arm",
    "accuracy": "right, %",
    "quality": "quality",
    "speed": "speedup",
    "target": "target's time",
    "seconds": "s/problem",
    "correct": "s/right",
    "retention": "kept, %",
    "tau": "tau",
    "passes": "passes",
    "length": "length",
    "cap": "cap, %",
    "loop": "loops, %",
    "steps": "steps kept, %",
    "bad": "bad steps refused, %",
}
STEPWISE = {"steps": "steps_accepted", "bad": "invalid_refused"}  # shown where some arm drafts whole steps
DUEL = {"arm": "arm", "right": "right, points", "test": "gained : lost", "passes": "fewer passes", "speed": "faster"}
NARROW = ("arm", "accuracy", "quality", "speed", "seconds", "correct")
WIDE_FROM = 132  # characters


@dataclass(frozen=True)
class Cell:
    """A figure, and what stands below it: an interval, or what the arm is."""

    text: str
    more: str = ""

    def __str__(self) -> str:
        return f"{self.text}\n{self.more}" if self.more else self.text


def render(summaries: Iterable[dict[str, Any]]) -> Table:
    """The table of one run or several, each under its label; wide or narrow as the terminal is."""
    whole = Table.grid()
    for i, summary in enumerate(summaries):
        if i:
            whole.add_row("")
        whole.add_row(Text(title(summary), style="bold"))
        whole.add_row(_Arms(summary))
        for note in notes(summary):
            whole.add_row(Text(note, style="red" if "worse" in note else "yellow"))
    return whole


@dataclass(frozen=True)
class _Arms:
    """The arms of one run; it learns only when it is printed how much room there is."""

    summary: dict[str, Any]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        wide = options.max_width >= WIDE_FROM
        heading = speed_heading(self.summary)
        table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
        shown = columns(self.summary) if wide else list(NARROW)
        for key in shown:
            left = key in ("arm", "quality")
            title = heading if key == "speed" else COLUMNS[key]
            table.add_column(title, justify="left" if left else "right", overflow="fold", no_wrap=key != "arm")
        for name, arm in self.summary["arms"].items():
            row = cells(name, arm, heading)
            worse = arm["quality"] == "worse"
            texts = []
            for key in shown:
                style = STYLES[arm["quality"]] if key == "quality" or (worse and key == "speed") else ""
                texts.append(Text(str(row[key]), style=style))
            table.add_row(*texts)
        yield table


def render_duel(found: dict[str, dict[str, Any]], rival: str) -> Table:
    """Every arm against one method."""
    table = Table(title=f"against {rival}", title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for key, heading in DUEL.items():
        table.add_column(heading, justify="left" if key == "arm" else "right", overflow="fold")
    for name, arm in found.items():
        table.add_row(*(str(cell) for cell in duel_cells(name, arm).values()))
    return table


def duel_cells(name: str, arm: dict[str, Any]) -> dict[str, Cell]:
    """Every column of an arm's row against a rival: ratios above 1 are the arm's favour."""
    gap, times, passes = arm["accuracy_difference"], arm["time_ratio"], arm["passes_ratio"]
    points = [f"{100 * gap[end]:+.1f}" for end in ("value", "low", "high")] if gap else []
    return {
        "arm": Cell(name),
        "right": Cell(points[0], f"[{points[1]}, {points[2]}]") if points else Cell(NOTHING),
        "test": Cell(f"{arm['gained']} : {arm['lost']}", chance(arm["mcnemar_p"])) if gap else Cell(NOTHING),
        "passes": Cell(f"{figure(passes, 2)}x", between(passes)) if passes else Cell(NOTHING),
        "speed": Cell(f"{figure(times, 2)}x", between(times)) if times else Cell(NOTHING),
    }


def chance(p: float) -> str:
    return "p<0.001" if p < 0.001 else f"p={p:.2g}"


def columns(summary: dict[str, Any]) -> list[str]:
    """The columns in which some arm has something to say; whose time it was is asked where steps are drafted."""
    arms = summary["arms"].values()
    asks = STEPWISE | {"target": "steps_accepted"}
    return [key for key in COLUMNS if key not in asks or any(arm.get(asks[key]) for arm in arms)]


def title(summary: dict[str, Any]) -> str:
    """What was run, and whose decisions and whose cost the figures are."""
    return f"{summary['task']}, {summary['problems']} problems ({summary['label']})"


def speed_heading(summary: dict[str, Any]) -> str:
    """The word is used only where some arm has earned it."""
    return "speedup" if any(arm["speedup"] for arm in summary["arms"].values()) else "time ratio"


def notes(summary: dict[str, Any]) -> list[str]:
    """Sentences below the table: what is worse, and who gets no speedup for what reason."""
    lines, refused = [], dict[str, list[str]]()
    for name, arm in summary["arms"].items():
        if arm["quality"] == "worse":
            lines.append(f"{name} is worse: {'; '.join(arm['quality_reasons'])}.")
        if arm["speedup_refused"]:
            refused.setdefault(arm["speedup_refused"], []).append(name)
    lines += [f"No speedup is stated for {', '.join(names)}: {reason}." for reason, names in refused.items()]
    return lines


def cells(name: str, arm: dict[str, Any], heading: str = "speedup") -> dict[str, Cell]:
    """Every column of an arm's row."""
    role = {"target": "target alone", "draft": "draft alone"}.get(arm["role"], "" if arm["lossless"] else "lossy")
    passes, tau = arm["target_passes"], arm["tau_interval"]
    return {
        "arm": Cell(name, role),
        "accuracy": percent(arm["accuracy"]),
        "quality": _quality(arm),
        "speed": _speed(arm, heading),
        "target": _target(arm),
        "seconds": Cell(figure(arm["seconds_per_problem"])),
        "correct": Cell(figure(arm["seconds_per_correct"])),
        "retention": _retention(arm),
        "tau": Cell(NOTHING) if arm["acceptance_rate"] is None else Cell(f"{arm['tau_pooled']:.2f}", between(tau)),
        "passes": Cell(NOTHING if passes is None else f"{passes}"),
        "length": Cell(figure(arm["length_ratio"], 2)),
        "cap": Cell(percent(arm["cap_rate"]).text),
        "loop": Cell(percent(arm["loop_rate"]).text),
        **{key: percent(arm.get(figure_)) for key, figure_ in STEPWISE.items()},
    }


def percent(share: dict[str, Any] | None) -> Cell:
    if not share:
        return Cell(NOTHING)
    return Cell(f"{100 * share['share']:.1f}", f"[{100 * share['low']:.1f}, {100 * share['high']:.1f}]")


def figure(estimate: dict[str, Any] | None, digits: int | None = None) -> str:
    """Three digits that matter, or so many behind the point."""
    if not estimate:
        return NOTHING
    value = estimate["value"]
    if digits is None:
        digits = max(0, 2 - len(str(int(value)))) + (1 if value >= 1 else 2)
    return f"{value:.{digits}f}"


def between(estimate: dict[str, Any]) -> str:
    low, high = ("∞" if end is None else f"{end:.2f}" for end in (estimate["low"], estimate["high"]))
    return f"[{low}, {high}]"


def _quality(arm: dict[str, Any]) -> Cell:
    """The verdict with its test, and below it the difference in points: "same" rules out a loss beyond the margin."""
    if arm["quality"] == "baseline":
        return Cell("baseline")
    if arm["quality"] == "same" and arm["identical_outputs"]["share"] == 1:
        return Cell("same", "token for token")
    p, gap = arm["mcnemar_p"], arm["accuracy_difference"]
    if p is None or arm["quality"] == "unmeasured":
        return Cell(arm["quality"])
    return Cell(
        f"{arm['quality']}, {chance(p)}",
        f"{100 * gap['value']:+.1f} [{100 * gap['low']:+.0f}, {100 * gap['high']:+.0f}]",
    )


def _speed(arm: dict[str, Any], heading: str) -> Cell:
    """In a column of speedups, a ratio that did not earn the name says so."""
    times = arm["time_ratio"]
    if arm["role"] == "target" or not times:
        return Cell("1" if times else NOTHING)
    if arm["speedup"] or heading != "speedup":
        return Cell(f"{figure(times, 2)}x", between(times))
    return Cell("none", f"time {figure(times, 2)}x")


def _target(arm: dict[str, Any]) -> Cell:
    """How many times less the target worked than alone."""
    times = arm.get("target_time_ratio")  # a run summarised before this was counted has none
    if arm["role"] == "target" or not times:
        return Cell("1" if arm["role"] == "target" else NOTHING)
    return Cell(f"1/{figure(times, 2)}", f"[1/{times['low']:.2f}, 1/{times['high']:.2f}]" if times["high"] else "")


def _retention(arm: dict[str, Any]) -> Cell:
    kept = arm["retention"]
    if not kept or arm["role"] == "target":
        return Cell(NOTHING)
    high = "∞" if kept["high"] is None else f"{100 * kept['high']:.0f}"
    return Cell(f"{100 * kept['value']:.1f}", f"[{100 * kept['low']:.0f}, {high}]")
