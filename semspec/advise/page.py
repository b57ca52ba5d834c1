"""Advice as a page that can be mailed, and for a terminal. Every text in it is shown, never interpreted."""

from __future__ import annotations

from html import escape

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from semspec.advise.advice import Advice, described, times
from semspec.advise.measure import EVERYTHING
from semspec.advise.predict import Prediction
from semspec.bench.report import CSS
from semspec.statistics import Estimate

OWN_CSS = """
main { max-width: 960px; } .yes { color: var(--good); } .no { color: var(--worse); } .unclear { color: var(--warn); }
.headline-text { font-size: 1.25rem; font-weight: 600; max-width: none; } pre { white-space: pre-wrap; }
svg.lengths { width: 100%; max-width: 560px; height: auto; } svg.lengths line { stroke: var(--ink); }
svg.lengths text { fill: var(--soft); font: 12px system-ui, sans-serif; }
svg.lengths .bar { fill: var(--d); } svg.lengths .best { fill: var(--good); }
"""
HEADS = ("drafter and rule", "draft length", "tokens a round", "tokens per second", "speedup", "likelihood lost")


def terminal(advice: Advice) -> RenderableType:
    colour = {"yes": "green", "no": "red", "unclear": "yellow"}[advice.pays]
    table = Table()
    for i, head in enumerate(HEADS):  # figures are never folded, only names and headings
        table.add_column(head.replace(" ", "\n") if i else head, no_wrap=bool(i))
    rows = [(_target_alone(advice), "")]
    rows += [(_cells(p), "bold" if p in (advice.take, advice.lossy) else "") for p in advice.predictions]
    for cells, style in rows:  # an interval below its figure, loops below that
        table.add_row(*(Text(cell.replace(" [", "\n[").replace("], ", "],\n")) for cell in cells), style=style)
    parts: list[RenderableType] = [
        Text("Does speculation pay here?", style="bold"),
        Text(advice.headline, style=colour),
    ]
    parts += [Text(advice.warning, style="yellow")] if advice.warning else []
    parts += [table, Text(_about(advice), style="dim"), Text("Settings", style="bold"), Text(advice.command)]
    parts += [Text("What to try next", style="bold"), *(Text(f"- {step}") for step in advice.steps)]
    return Group(*parts)


def html(advice: Advice) -> str:
    rows = [_target_alone(advice), *(_cells(p) for p in advice.predictions)]
    body = "".join(f"<tr>{_row(row)}</tr>" for row in rows)
    heads = "".join(f'<th class="left">{h}</th>' if not i else f"<th>{h}</th>" for i, h in enumerate(HEADS))
    shown = [p for p in (advice.take, advice.lossy) if p is not None and len(p.by_length) > 1]
    pictures = "".join(f"<figure>{_lengths(p)}<figcaption>{escape(_caption(p))}</figcaption></figure>" for p in shown)
    steps = "".join(f"<li>{escape(step)}</li>" for step in advice.steps)
    warning = f'<p class="unclear">{escape(advice.warning)}</p>' if advice.warning else ""
    names = escape(advice.target) + (f" with {escape(advice.draft)}" if advice.draft else "")
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>Speculation for {names}</title><style>{CSS}{OWN_CSS}</style></head><body><main>
<h1>Does speculation pay for {names}?</h1>
<p class="headline-text {advice.pays}">{escape(advice.headline)}</p>{warning}
<div class="card wide"><table><thead><tr>{heads}</tr></thead><tbody>{body}</tbody></table></div>
<p class="soft">{escape(_about(advice))}</p>
<h2>Settings</h2><pre class="card">{escape(advice.command)}</pre>
<h2>Draft lengths</h2><div class="figures">{pictures or "<p>None was predicted.</p>"}</div>
<h2>What to try next</h2><ul class="notes">{steps}</ul>
</main></body></html>
"""


def _target_alone(advice: Advice) -> tuple[str, ...]:
    return "target only", "", "1", _speed(advice.alone), "1", ""


def _cells(p: Prediction) -> tuple[str, ...]:
    name = described(p).rsplit(",", 1)[0] + (" (control)" if p.candidate.rule == EVERYTHING else "")
    return (
        name,
        str(p.draft_tokens),
        f"{p.tokens_per_round:.2f}",
        _speed(p.tokens_per_second),
        times(p.speedup),
        _loss(p),
    )


def _row(cells: tuple[str, ...]) -> str:
    first, *others = map(escape, cells)
    return f'<td class="left arm">{first}</td>' + "".join(f"<td>{cell}</td>" for cell in others)


def _loss(p: Prediction) -> str:
    if p.candidate.lossless:
        return "none"
    loops = f", {p.loops} loops" if p.loops else ""
    if p.loss is None:
        return f"not measurable{loops}"
    return f"{p.loss.value:z.0%} [{p.loss.low:z.0%}, {p.loss.high:z.0%}]{loops}"


def _speed(e: Estimate) -> str:
    digits = 0 if e.value >= 100 else 1
    return f"{e.value:.{digits}f} [{e.low:.{digits}f}, {e.high:.{digits}f}]"


def _about(advice: Advice) -> str:
    costs = ", ".join(f"{ms:.2f} ms ({rows})" for rows, ms in advice.passes.items())
    draft = "" if advice.draft_token is None else f"; a draft token {advice.draft_token:.2f} ms"
    how = "greedy" if not advice.temperature else f"temperature {advice.temperature:g}"
    return (
        f"From {advice.prompts} prompts, {how}, one at a time, on {advice.device}. Target passes (their tokens): "
        f"{costs}{draft}. "
        "Speedups are of the time for the same prompts, so a rule that writes more is slower by them. Intervals (95 %) "
        "are for another run over as many other prompts of this kind. Likelihood lost: how far the "
        "texts have gone from the target's own mean log-probability, 0 %, to that of accepting every draft token, "
        f"100 %; up to {advice.allowed_loss:.0%} is allowed here."
    )


def _caption(p: Prediction) -> str:
    return f"{p.candidate.rule}: speedup over the target alone by draft length, with 95 % intervals."


def _lengths(p: Prediction) -> str:
    """Bars of the speedup by draft length, with their intervals; the line is the target alone."""
    wide, high, top = 460, 220, max(max(e.high, e.value) if e.high == e.high else e.value for e in p.by_length.values())
    top = max(top, 1.0) * 1.05
    step = (wide - 40) / len(p.by_length)

    def y(value: float) -> float:
        return 10 + (high - 40) * (1 - value / top)

    parts = [f'<line x1="34" x2="{wide}" y1="{y(1):.1f}" y2="{y(1):.1f}" stroke-dasharray="4"/>']
    parts.append(f'<text x="0" y="{y(1) + 4:.1f}">1x</text>')
    for i, (n, e) in enumerate(p.by_length.items()):
        x, kind = 38 + i * step, "best" if n == p.draft_tokens else "bar"
        size = f'width="{step * 0.7:.1f}" height="{y(0) - y(e.value):.1f}"'
        parts.append(f'<rect class="{kind}" x="{x:.1f}" y="{y(e.value):.1f}" {size}/>')
        if e.low == e.low:
            middle = x + step * 0.35
            parts.append(f'<line x1="{middle:.1f}" x2="{middle:.1f}" y1="{y(e.low):.1f}" y2="{y(e.high):.1f}"/>')
        parts.append(f'<text x="{x + step * 0.35:.1f}" y="{high - 14}" text-anchor="middle">{n}</text>')
    label = escape(_caption(p), quote=True)
    return f'<svg class="lengths" role="img" aria-label="{label}" viewBox="0 0 {wide} {high}">{"".join(parts)}</svg>'
