"""One row per arm: what it got right beside how long it took.

`COLUMNS` and `COMPARISON` describe every column once, for the terminal, for Markdown and for the report.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from rich import box
from rich.table import Table
from rich.text import Text

from semspec.bench.blind import cut_note, resolution_note
from semspec.bench.measures import sentences
from semspec.bench.names import described, natural, task_name
from semspec.model.threads import BUSY

Arm = dict[str, Any]
STYLES = {
    "worse": "bold red",
    "better": "bold green",
    "equivalent": "green",
    "same": "green",  # as older versions called it
    "unclear": "yellow",
    "unmeasured": "yellow",
    "baseline": "dim",
    "spread": "dim",  # of the target's own samples
}
NOTHING = "–"
MAX_NAME = 24  # characters of an arm's name in a line of a terminal's table; longer ones are folded


@dataclass(frozen=True)
class Cell:
    """A figure, and what is printed below it: an interval, or what the arm is."""

    text: str
    more: str = ""

    def __str__(self) -> str:
        return f"{self.text}\n{self.more}" if self.more else self.text


EMPTY = Cell(NOTHING)


@dataclass(frozen=True)
class Column:
    heading: str
    cell: Callable[[Arm], Cell]  # of an arm's figures, with its name under "name"
    narrow: bool = False  # shown on a narrow terminal as well
    bare: bool = False  # there without its interval
    left: bool = False
    needs: str = ""  # shown only where some arm has this figure


def percent(share: dict[str, Any] | None) -> Cell:
    if not share:
        return EMPTY
    return Cell(f"{100 * share['share']:.1f}", f"[{100 * share['low']:.1f}, {100 * share['high']:.1f}]")


def figure(estimate: dict[str, Any] | None, digits: int | None = None) -> str:
    """Three significant digits, or so many decimals."""
    if not estimate:
        return NOTHING
    value = estimate["value"]
    if digits is None:
        digits = max(0, 2 - len(str(int(value)))) + (1 if value >= 1 else 2)
    return f"{value:.{digits}f}"


def between(estimate: dict[str, Any], digits: int = 2, scale: float = 1, sign: str = "") -> str:
    """The interval. Files of older versions have an upper end at infinity, which JSON has as null."""
    if estimate["low"] is None:
        return "no interval"
    low, high = (
        "∞" if end is None else f"{scale * end:{sign}.{digits}f}" for end in (estimate["low"], estimate["high"])
    )
    return f"[{low}, {high}]"


def times(estimate: dict[str, Any] | None) -> Cell:
    return Cell(f"{figure(estimate, 2)}x", between(estimate)) if estimate else EMPTY


def chance(arm: Arm) -> str:
    """The p value, corrected for the number of arms; files of older versions have the uncorrected one only."""
    p: Any = arm.get("mcnemar_p_holm", arm["mcnemar_p"])
    return "p<0.001" if p < 0.001 else f"p={p:.2g}"


def _arm(arm: Arm) -> Cell:
    roles = {"target": "target only", "draft": "draft only", "resampled": "target, other seeds"}
    role = roles.get(arm["role"], "" if arm["lossless"] else "control" if arm.get("control") else "lossy")
    if arm.get("sampled_at"):
        role = f"target at temperature {arm['sampled_at']:g}"
    return Cell(arm["name"], role)


def _quality(arm: Arm) -> Cell:
    """The verdict with its test, and below it the difference in points: "equivalent" rules out more than the margin."""
    gap, quality = arm["accuracy_difference"], arm["quality"]
    if quality in ("equivalent", "same") and arm["identical_outputs"]["share"] == 1:
        return Cell(quality, "token for token")
    if quality == "equivalent" and arm["mcnemar_p"] is not None:
        return Cell(quality, f"{100 * gap['value']:+.1f} {between(gap, 0, 100, '+')}")
    if quality in ("baseline", "unmeasured", "spread") or arm["mcnemar_p"] is None:
        return Cell(quality)
    return Cell(f"{quality}, {chance(arm)}", f"{100 * gap['value']:+.1f} {between(gap, 0, 100, '+')}")


def _speed(arm: Arm) -> Cell:
    """In a column of speedups, a ratio that is not one says so."""
    if arm["quality"] == "spread":
        return EMPTY
    if arm["role"] == "target" or not arm["time_ratio"]:
        return Cell("1") if arm["time_ratio"] else EMPTY
    if arm["speedup"] or arm["speed_heading"] != "speedup":
        return times(arm["time_ratio"])
    return Cell("none", f"time {figure(arm['time_ratio'], 2)}x")


def _target(arm: Arm) -> Cell:
    """How many times less the target worked than alone."""
    found = arm.get("target_time_ratio")  # older versions did not count it
    if arm["role"] == "target" or not found:
        return Cell("1") if arm["role"] == "target" else EMPTY
    return Cell(f"1/{figure(found, 2)}", f"[1/{found['low']:.2f}, 1/{found['high']:.2f}]" if found["high"] else "")


def _retention(arm: Arm) -> Cell:
    found = arm["retention"]
    if not found or arm["role"] == "target":
        return EMPTY
    return Cell(f"{100 * found['value']:.1f}", between(found, 0, 100))


def _tau(arm: Arm) -> Cell:
    return EMPTY if arm["acceptance_rate"] is None else Cell(f"{arm['tau_pooled']:.2f}", between(arm["tau_interval"]))


COLUMNS = {
    "arm": Column("arm", _arm, narrow=True, left=True),
    "accuracy": Column("correct, %", lambda arm: percent(arm["accuracy"]), narrow=True),
    "quality": Column("quality", _quality, narrow=True, left=True),
    "speed": Column("speedup", _speed, narrow=True),
    "target": Column("target's time", _target, needs="steps_accepted"),
    "seconds": Column("seconds", lambda arm: Cell(figure(arm["seconds_per_problem"]))),
    "correct": Column("s/correct", lambda arm: Cell(figure(arm["seconds_per_correct"])), narrow=True),
    "retention": Column("retained", _retention),
    "tau": Column("tau", _tau, narrow=True, bare=True),
    "passes": Column("passes", lambda arm: EMPTY if arm["target_passes"] is None else Cell(f"{arm['target_passes']}")),
    "length": Column("length", lambda arm: Cell(figure(arm["length_ratio"], 2))),
    "cap": Column("cap, %", lambda arm: Cell(percent(arm["cap_rate"]).text)),
    "loop": Column("loops, %", lambda arm: Cell(percent(arm["loop_rate"]).text)),
    "steps": Column("steps accepted, %", lambda arm: percent(arm.get("steps_accepted")), needs="steps_accepted"),
    "bad": Column("bad steps rejected, %", lambda arm: percent(arm.get("invalid_refused")), needs="invalid_refused"),
}


def _bare(cell: Callable[[Arm], Cell], arm: Arm) -> Cell:
    return Cell(cell(arm).text)


def _group(name: str, arm: Arm) -> Cell:
    return percent(arm["groups"].get(name))


def _measure(name: str, arm: Arm) -> Cell:
    """The target's own value; of other arms the difference from it, and how far outside the target's samples it is."""
    found = arm["measures"].get(name)
    if not found:
        return EMPTY
    if arm["role"] == "target":
        return Cell(f"{found['value']:.3f}")
    spread = f", {found['spread']['value']:+.1f} sd" if found.get("spread") else ""
    return Cell(f"{found['difference']['value']:+.3f}", between(found["difference"], 3, sign="+") + spread)


def _points(arm: Arm) -> Cell:
    gap = arm["accuracy_difference"]
    return Cell(f"{100 * gap['value']:+.1f}", between(gap, 1, 100, "+")) if gap else EMPTY


COMPARISON = {  # with another method; ratios above 1 are the arm's favour
    "arm": Column("arm", lambda arm: Cell(arm["name"]), left=True),
    "right": Column("correct, points", _points),
    "test": Column(
        "gained : lost",
        lambda arm: Cell(f"{arm['gained']} : {arm['lost']}", chance(arm)) if arm["accuracy_difference"] else EMPTY,
    ),
    "passes": Column("fewer passes", lambda arm: times(arm["passes_ratio"])),
    "speed": Column("faster", lambda arm: times(arm["time_ratio"])),
}


@dataclass(frozen=True)
class Grid:
    """A table before it is drawn: columns by key, and for each arm its cells by key."""

    columns: dict[str, Column]
    headings: dict[str, str]
    arms: dict[str, Arm]

    @staticmethod
    def of_run(summary: dict[str, Any], narrow: bool = False) -> Grid:
        arms, speed = summary["arms"], speed_heading(summary)
        shown = {
            key: replace(c, cell=partial(_bare, c.cell)) if narrow and c.bare else c
            for key, c in COLUMNS.items()
            if (c.narrow or not narrow) and (not c.needs or any(arm.get(c.needs) for arm in arms.values()))
        }
        if summary.get("graded"):  # a mean over data sets of different kinds says little, so each has its column
            names = sorted({name for arm in arms.values() for name in arm["groups"]}, key=natural)
            shown |= {f"group {name}": Column(name, partial(_group, name)) for name in names}
        decisive = summary.get("deciding_measure")
        for name in summary.get("measures") or ():
            if not narrow or name == decisive:
                shown[f"measure {name}"] = Column(name, partial(_measure, name), narrow=name == decisive)
        if decisive:  # nothing is scored
            shown = {key: c for key, c in shown.items() if key not in ("accuracy", "correct", "retention")}
        headings = {key: c.heading for key, c in shown.items()} | {"speed": speed}
        headings |= {"accuracy": "score, %", "correct": "s/score"} if summary.get("graded") else {}
        return Grid(shown, headings, {name: arm | {"name": name, "speed_heading": speed} for name, arm in arms.items()})

    @staticmethod
    def of_comparison(found: dict[str, Arm]) -> Grid:
        headings = {key: column.heading for key, column in COMPARISON.items()}
        return Grid(COMPARISON, headings, {name: arm | {"name": name} for name, arm in found.items()})

    def only(self, measures: bool) -> Grid:
        """The arms with their measures alone, or without."""
        keys = [key for key in self.columns if key == "arm" or key.startswith("measure ") == measures]
        return Grid({key: self.columns[key] for key in keys}, self.headings, self.arms)

    def width(self) -> int:
        """Characters that it takes on a terminal without cutting a figure."""
        return sum(self._widths().values())

    def _widths(self) -> dict[str, int]:
        rows, found = self.rows().values(), dict[str, int]()
        for key in self.columns:
            lines = [line for row in rows for line in str(row[key]).split("\n")]
            widest = max(map(len, [*lines, self.headings[key]]))
            found[key] = 2 + (min(widest, MAX_NAME) if key == "arm" else widest)
        return found

    def parts(self, width: int) -> list[Grid]:
        """As many tables as it takes to fit, one below the other; each names the arms."""
        widths, parts, left = self._widths(), list[list[str]](), 0
        for key in (key for key in self.columns if key != "arm"):
            if not parts or widths[key] > left:
                parts.append(["arm"])
                left = width - widths["arm"]
            parts[-1].append(key)
            left -= widths[key]
        return [Grid({key: self.columns[key] for key in keys}, self.headings, self.arms) for keys in parts]

    def rows(self) -> dict[str, dict[str, Cell]]:
        return {
            name: {key: column.cell(arm) for key, column in self.columns.items()} for name, arm in self.arms.items()
        }

    def render(self, style: Callable[[str, Arm], str] = lambda key, arm: "", **options: Any) -> Table:
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False, **options)
        for key, column in self.columns.items():
            justify: Any = "left" if column.left else "right"
            table.add_column(self.headings[key], justify=justify, overflow="fold", no_wrap=key != "arm")
        for name, row in self.rows().items():
            table.add_row(*(Text(str(cell), style=style(key, self.arms[name])) for key, cell in row.items()))
        return table


def title(summary: dict[str, Any]) -> str:
    """What was run, and whose decisions and whose cost the figures are."""
    problems = f"{summary['problems']} problem{'' if summary['problems'] == 1 else 's'}"
    return f"{task_name(str(summary['task']))}, {problems} ({described(summary)})"


def speed_heading(summary: dict[str, Any]) -> str:
    """The word "speedup" is used only where some arm has one."""
    return "speedup" if any(arm["speedup"] for arm in summary["arms"].values()) else "time ratio"


def notes(summary: dict[str, Any]) -> list[str]:
    """Sentences below the table: what is worse, which arms get no speedup and why, how many tests there were."""
    lines, refused = [], dict[str, list[str]]()
    for name, arm in summary["arms"].items():
        if arm["quality"] == "worse":
            lines.append(f"{name} is worse: {'; '.join(arm['quality_reasons'])}.")
        if arm["speedup_refused"]:
            refused.setdefault(arm["speedup_refused"], []).append(name)
    lines += [f"No speedup is stated for {', '.join(names)}: {reason}." for reason, names in refused.items()]
    lines += sentences(summary.get("measures") or {}, summary.get("deciding_measure"))
    shares = [arm["accuracy"]["share"] for arm in summary["arms"].values() if arm["accuracy"]]
    if shares and not any(shares):
        lines.append("No arm has a correct answer.")
    lines += busy_note(summary) + cut_note(summary) + margin_note(summary) + resolution_note(summary)
    return lines + correction(summary["arms"])


def busy_note(summary: dict[str, Any]) -> list[str]:
    """Whoever is sent a report has not seen the warning of the command."""
    share = summary.get("core_share") or 1.0
    text = f"The machine was busy when this run began: one thread got {share:.0%} of a core, so times say little."
    return [text] if share < BUSY else []


def margin_note(summary: dict[str, Any]) -> list[str]:
    """What "equivalent" rules out, where some arm was tested for it."""
    tested = any(arm.get("equivalence_p_holm") is not None for arm in summary["arms"].values())
    return [f"equivalent: a difference beyond {summary['margin']['words']} is ruled out (TOST)."] if tested else []


def correction(arms: Mapping[str, Arm]) -> list[str]:
    tests = sum(arm.get("mcnemar_p_holm") is not None for arm in arms.values())
    return [f"p values are corrected for {tests} comparisons (Holm)."] if tests > 1 else []
