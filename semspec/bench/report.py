"""One page that can be mailed: headline, figures, examples and everything needed to run it again.

The page loads nothing from anywhere, has no scripts, and treats every text of a run as hostile: a model's output is
shown, never interpreted.
"""

from __future__ import annotations

import json
from base64 import b64encode
from html import escape
from pathlib import Path
from typing import Any

from semspec.bench.examples import examples
from semspec.bench.folder import Sample, deduplicated
from semspec.bench.names import described, natural, task_name
from semspec.bench.plots import draw
from semspec.bench.table import NOTHING, Cell, Column, Grid, notes, percent, title

Run = tuple[dict[str, Any], list[Sample], dict[str, Any]]
NAMED = 3  # pairs of models that a heading names
WORDS = {  # captions, also for screen readers
    "accuracy": "Correct answers of every arm with their 95 % intervals.",
    "speed": "Seconds of the target alone over seconds of each arm on the same problems, with 95 % intervals.",
    "pareto": "Correct answers against seconds per problem; the dashed line joins arms that none beats in both.",
    "lengths": "Length of the outputs against the target alone, and where they occur, outputs cut off at the limit and "
    "outputs with loops.",
    "acceptance": "Histogram: how many draft tokens of a round were accepted.",
    "positions": "Share of draft tokens accepted, by their position in the draft.",
}
GUIDE = (
    "Every arm answers the same problems with the same seeds, and is compared with the target alone. <b>Quality</b> is "
    "a paired test (McNemar, exact, on problems; p is corrected for the number of arms by Holm's method): <b>worse</b> "
    "or <b>better</b> with p &lt; 0.05, and below it the difference in points with its 95 % interval; "
    "<b>equivalent</b>: a difference beyond the margin is ruled out by two one-sided tests (TOST, corrected too); "
    "<b>unclear</b>: neither that nor a difference is shown: more problems are needed. Without right answers the same "
    "tests are made on a measure, named below the table, whose margin is a share of the distance from the target to "
    "the draft. Loops or cut-offs more frequent than the target's count as worse too. "
    "<b>Speedup</b> is the target's time over the arm's on the same problems; where quality is not known, or outputs "
    "loop, only a time ratio is given. Problems decoded as one batch share one time and count as one for its interval. "
    "<b>tau</b> is 1 + accepted draft tokens per round, pooled over rounds. "
    "<b>seconds</b>: per problem. <b>retained</b>: correct answers as a share of the target's, in percent. "
    "<b>s/correct</b>: all seconds over correct answers. "
    "<b>passes</b>: of the target, prompts not counted. <b>length</b>: tokens over the target's."
)
CSS = """
:root { color-scheme: light dark; --ink: #1f2328; --soft: #6b7280; --line: #e5e7eb; --ground: #f6f7f9;
  --card: #ffffff; --shade: #0f172a38; --worse: #c62828; --good: #1a7f4b; --warn: #9a6700; --d: #3b7dd8;
  --r: #e09f3e; --t: #9aa3ad; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e8eb; --soft: #9aa3ad; --line: #30363d; --ground: #0d1117;
  --card: #161b22; --shade: #9aa3ad66; --worse: #ff6b6b; --good: #4cc38a; --warn: #e3b341; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--ground); color: var(--ink); font: 16px/1.55 system-ui, "Segoe UI", sans-serif; }
main { max-width: 1320px; margin: 0 auto; padding: 2rem 1.25rem 4rem; }
h1 { font-size: 1.7rem; line-height: 1.2; margin: 0 0 .3rem; overflow-wrap: anywhere; }
h2 { font-size: 1.25rem; margin: 2.6rem 0 .2rem; }
h3 { font-size: 1rem; margin: 1.8rem 0 .6rem; }
p { margin: .4rem 0; max-width: 75ch; } .soft, figcaption, small { color: var(--soft); font-size: .84rem; }
code, pre { font-family: ui-monospace, Menlo, Consolas, monospace; overflow-wrap: anywhere; }
.card, figure { background: var(--card); border: 1px solid var(--line); border-radius: 10px; padding: .9rem 1rem; }
/* a shadow at a side where there is more */
.wide { overflow-x: auto; margin-top: .8rem; padding-inline: 0; background-repeat: no-repeat; background-image:
    linear-gradient(90deg, var(--card) 40%, transparent), linear-gradient(-90deg, var(--card) 40%, transparent),
    linear-gradient(90deg, var(--shade), transparent), linear-gradient(-90deg, var(--shade), transparent);
  background-position: left, right, left, right; background-size: 48px 100%, 48px 100%, 18px 100%, 18px 100%;
  background-attachment: local, local, scroll, scroll; }
.wide:focus-visible { outline: 2px solid var(--d); }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; font-size: .86rem; }
th { text-align: right; color: var(--soft); font-weight: 500; vertical-align: bottom; }
th, td { padding: .4rem .36rem; border-bottom: 1px solid var(--line); }
:is(th, td):first-child { padding-left: 1rem; } :is(th, td):last-child { padding-right: 1rem; }
td { text-align: right; vertical-align: top; } th.left, td.left { text-align: left; }
tr:last-child td { border-bottom: 0; }
td small { display: block; font-weight: 400; font-size: .78rem; } td, td small { white-space: nowrap; }
th { max-width: 8rem; }
td.arm { font-weight: 600; white-space: normal; overflow-wrap: break-word; min-width: 7rem; max-width: 16rem; }
li.worse, small.worse, tr.worse .verdict small, tr.worse .speed small { color: var(--worse); }
.verdict { font-weight: 600; }
:is(.equivalent, .same, .better) .verdict { color: var(--good); }
.unmeasured .verdict, .unclear .verdict { color: var(--warn); }
.worse .verdict, .worse .speed { color: var(--worse); font-weight: 700; }
ul.notes { margin: .8rem 0; padding-left: 1.1rem; } ul.notes li { margin: .25rem 0; }
.figures { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 460px), 1fr)); gap: 1rem; }
figure { margin: 0; } figure img { width: 100%; height: auto; display: block; } figcaption { margin-top: .5rem; }
.outputs { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 235px), 1fr)); gap: .8rem; }
.question { margin-bottom: .8rem; } .question p { white-space: pre-wrap; overflow-wrap: anywhere; }
.outputs pre { white-space: pre-wrap; margin: .5rem 0 0; font-size: .8rem; line-height: 1.45; }
.outputs header { font-weight: 600; overflow-wrap: anywhere; }
svg.origins { width: 100%; height: 7px; display: block; border-radius: 3px; margin-top: .4rem; }
.d { fill: var(--d); color: var(--d); } .r { fill: var(--r); color: var(--r); } .t { fill: var(--t); color: var(--t); }
.key { margin-left: .7rem; white-space: nowrap; }
.key i { display: inline-block; width: 1.2rem; height: 7px; border-radius: 3px; background: currentColor;
  margin-right: .35rem; }
details { margin: .8rem 0; } summary { cursor: pointer; font-weight: 600; }
details pre { overflow-x: auto; font-size: .78rem; }
@media (max-width: 700px) { main { padding: 1.2rem .8rem 3rem; } .wide:has(.headline) { padding-inline: .7rem; }
  :is(th, td):first-child { padding-left: .6rem; } .headline thead { display: none; }
  .headline tr { display: block; padding: .6rem 0; border-bottom: 1px solid var(--line); }
  .headline tr:last-child { border-bottom: 0; } .headline td { display: flex; justify-content: space-between; gap: 1rem;
  border: 0; padding: .12rem 0 !important; text-align: right; }
  .headline td::before { content: attr(data-name); color: var(--soft); font-weight: 400; }
  .headline td.arm { font-size: 1.05rem; display: block; text-align: left; }
  .headline td.arm::before { content: none; } td small { display: inline; }
  .headline td:is(.empty, .more) { display: none; }
  figure, .card { padding: .7rem; } }
"""


def write_report(runs: list[Run], out: Path) -> Path:
    """Write report.html and its figures as PNG files into the folder `out`; returns the page."""
    out.mkdir(parents=True, exist_ok=True)
    sections = []
    for number, (run, samples, summary) in enumerate(runs, 1):
        images = draw(summary)
        for name, themes in images.items():
            (out / (f"{name}.png" if len(runs) == 1 else f"run{number}-{name}.png")).write_bytes(themes["light"])
        heading = title(summary) if len(runs) > 1 else "Figures"
        sections.append(_section(heading, run, deduplicated(samples), summary, images))
    page = out / "report.html"
    part = page.with_suffix(".part")
    part.write_text(_page(runs, sections), encoding="utf-8", errors="backslashreplace")
    part.replace(page)
    return page


def _page(runs: list[Run], sections: list[str]) -> str:
    tables = "".join(_headline(run, summary, len(runs) > 1) for run, _, summary in runs)
    heading = _heading(runs)
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; img-src data:; style-src 'unsafe-inline'">
<title>{escape(heading)}, {escape(_date(runs[-1][0]))}: speed beside quality</title>
<style>{CSS}</style></head><body><main>
<p class="soft">semspec: speed beside quality</p><h1>{escape(heading)}</h1>
{tables}
<details><summary>How to read this</summary><p>{GUIDE}</p></details>
{"".join(sections)}
</main></body></html>
"""


def _heading(runs: list[Run]) -> str:
    """The tasks and the models of all runs, unless these are too many for a heading."""
    summaries = [summary for _, _, summary in runs]
    tasks, pairs = (dict.fromkeys(map(of, summaries)) for of in (lambda s: task_name(str(s["task"])), described))
    return f"{', '.join(tasks)}: {'; '.join(pairs) if len(pairs) <= NAMED else f'{len(pairs)} pairs of models'}"


def _date(run: dict[str, Any]) -> str:
    return str(run.get("created", ""))[:10]


def _headline(run: dict[str, Any], summary: dict[str, Any], titled: bool) -> str:
    grid = Grid.of_run(summary)
    head = "".join(f"<th{_left(column)}>{escape(grid.headings[key])}</th>" for key, column in grid.columns.items())
    rows = []
    for name, cells in grid.rows().items():
        row = []
        for key, cell in cells.items():
            kind = {"arm": "arm left", "quality": "verdict left", "speed": "speed"}.get(key, "")
            kind += " empty" if cell.text == NOTHING else ""
            kind += "" if grid.columns[key].narrow else " more"
            more = f"<small>{escape(cell.more)}</small>" if cell.more else ""
            text = _breakable(name) if key == "arm" else escape(cell.text)
            row.append(f'<td class="{kind}" data-name="{escape(grid.headings[key])}"><span>{text} {more}</span></td>')
        quality = escape(summary["arms"][name]["quality"])
        rows.append(f'<tr class="{quality}" data-arm="{escape(name)}">{"".join(row)}</tr>')
    what = title(summary) if titled else f"{summary['problems']} problems"
    items = "".join(f"<li{_worse(note)}>{escape(note)}</li>" for note in notes(summary))
    return (
        f'<p class="soft">{escape(what)}, {escape(_date(run))}</p>{_wide("Results")}<table class="headline">'
        f"<thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table></div>"
        f'<ul class="notes soft">{items}</ul>'
    )


def _wide(name: str) -> str:
    """Opens a box that scrolls sideways, by keyboard too."""
    return f'<div class="card wide" tabindex="0" role="region" aria-label="{name}">'


def _left(column: Column) -> str:
    return ' class="left"' if column.left else ""


def _worse(note: str) -> str:
    return ' class="worse"' if " is worse: " in note else ""


def _section(
    heading: str, run: dict[str, Any], samples: list[Sample], summary: dict[str, Any], images: dict[str, Any]
) -> str:
    figures = "".join(
        f'<figure><picture><source media="(prefers-color-scheme: dark)" srcset="{_data(themes["dark"])}">'
        f'<img src="{_data(themes["light"])}" alt="{WORDS[name]}"></picture>'
        f"<figcaption>{WORDS[name]}</figcaption></figure>"
        for name, themes in images.items()
    )
    state = "" if run.get("finished") else '<p class="soft">The run is not finished; figures will change.</p>'
    return (
        f"<h2>{escape(heading)}</h2>{state}"
        f'<div class="figures">{figures}</div>{_drafts(summary)}{_groups(summary)}'
        f"{examples(samples, summary)}{_details(run, summary)}"
    )


def _data(png: bytes) -> str:
    return f"data:image/png;base64,{b64encode(png).decode()}"


def _drafts(summary: dict[str, Any]) -> str:
    """Acceptance, with the two means that are both called tau elsewhere under two names."""
    head = [
        "tau, pooled over rounds",
        "tau, mean of requests",
        "accepted of drafted (trees: of the longest path), %",
        "tokens / target pass",
    ]
    head += ["relaxed of accepted, %", "relaxed of all tokens, %", "same tokens as target, %"]
    rows = {}
    for name, arm in summary["arms"].items():
        if arm["acceptance_rate"] is not None:
            counts = [(arm[key], 1) for key in ("tau_pooled", "tau_per_request_mean")]
            counts += [(arm["acceptance_rate"], 100), (arm["tokens_per_target_pass"], 1)]
            counts += [(arm["relaxed_share"], 100), (arm["divergence"], 100)]
            row = [Cell(NOTHING if value is None else f"{scale * value:.2f}") for value, scale in counts]
            rows[name] = [*row, percent(arm["identical_outputs"])]
    return _table("Drafts", "", head, rows) if rows else ""


def _groups(summary: dict[str, Any]) -> str:
    """Right answers by kind of problem, where there is more than one kind."""
    names = sorted({group for arm in summary["arms"].values() for group in arm["groups"]}, key=natural)
    rows = {name: [percent(arm["groups"].get(group)) for group in names] for name, arm in summary["arms"].items()}
    return _table("By kind of problem", "correct, %", names, rows) if len(names) > 1 else ""


def _table(words: str, corner: str, head: list[str], rows: dict[str, list[Cell]]) -> str:
    columns = f'<th class="left">{corner}</th>' + "".join(f"<th>{escape(name)}</th>" for name in head)
    lines = []
    for name, row in rows.items():
        texts = "".join(f"<td>{escape(cell.text)} <small>{escape(cell.more)}</small></td>" for cell in row)
        lines.append(f'<tr><td class="arm left">{_breakable(name)}</td>{texts}</tr>')
    table = f'<table class="plain"><thead><tr>{columns}</tr></thead><tbody>{"".join(lines)}</tbody></table>'
    return f"<h3>{words}</h3>{_wide(words)}{table}</div>"


def _breakable(name: str) -> str:
    """An arm's name, in which a line may break after a comma."""
    return escape(name).replace(",", ",<wbr>")


def _details(run: dict[str, Any], summary: dict[str, Any]) -> str:
    """Configuration, versions and hardware, and every figure, as JSON."""
    parts = {k: run[k] for k in ("created", "config", "arms", "versions", "hardware", "git") if k in run}
    texts = {"Configuration, versions, hardware": parts, "All figures": summary}
    blocks = []
    for words, what in texts.items():
        text = escape(json.dumps(what, indent=1, ensure_ascii=False))
        blocks.append(f"<details><summary>{words}</summary><pre>{text}</pre></details>")
    return "".join(blocks)
