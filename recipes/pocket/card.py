"""The model card of a pair, written from what was measured and from the training logs; no figure is typed by hand.

PYTHONPATH=. python3 -m recipes.pocket.card --models semspec/pocket/models --title "version 1" < note.txt
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

MEASURES = "measures.json"


def percent(share: dict[str, float]) -> str:
    return f"{100 * share['share']:.1f} % [{100 * share['low']:.1f}, {100 * share['high']:.1f}]"


def limits(bar: dict[str, Any]) -> str:
    """The limits of a bar in words."""
    unit = 100 if isinstance(bar["found"], dict) else 1
    low, high = (f"{unit * bar[end]:.3g}" for end in ("low", "high"))
    sign = " %" if unit == 100 else ""
    if bar["low"] == 0:
        return f"at most {high}{sign}"
    return f"at least {low}{sign}" if bar["high"] == 1.0 and unit == 100 else f"{low} to {high}{sign}"


def trained(log: dict[str, Any]) -> str:
    tokens = log["log"][-1]["tokens"] / 1e6
    return (
        f"{log['parameters'] / 1e6:.2f}M parameters, {log['seconds'] / 60:.1f} minutes, {log['log'][-1]['step']} steps "
        f"of {log['batch_rows']} rows of {log['row_tokens']} tokens ({tokens:.0f}M), {log['rows']} rows of data, "
        f"{log['optimizer']}, peak rate {log['peak_rate']:g}, seed {log['seed']}"
    )


def card(measures: dict[str, Any], logs: dict[str, dict[str, Any]], title: str, note: str) -> str:
    figures, met = measures["figures"], sum(bar["met"] for bar in measures["bars"])
    lines = [
        f"# The pocket pair, {title}",
        "",
        "A target and a draft, Llama architecture, trained from scratch on the pocket world with `recipes/pocket` (one",
        "H200, torch 2.11, bf16 weights). The two learnt different habits of wording the same steps. Losses and probes",
        "over the whole training are in each folder's `training_log.json`.",
        "",
        *(f"- {role}: {trained(log)}" for role, log in logs.items()),
        "",
        note.strip(),
        "",
        f"Measured on {measures['problems']} held-out problems of the split `test` (temperature 0.6 unless said; "
        f"{measures['where']}); 95 % intervals. {met} of {len(measures['bars'])} bars are met.",
        "",
        "| what | measured | wanted | |",
        "|---|---|---|---|",
    ]
    for bar in measures["bars"]:
        found = percent(bar["found"]) if isinstance(bar["found"], dict) else f"{bar['found']:.2f}"
        lines.append(f"| {bar['bar']} | {found} | {limits(bar)} | {'met' if bar['met'] else '**missed**'} |")
    for role in logs:
        lines.append(f"| {role} correct, greedy | {percent(figures[f'{role} T 0']['correct'])} | reported | |")
        other = figures[f"{role} T 0.6 new templates"]
        lines.append(f"| {role} correct, held-out templates | {percent(other['correct'])} | reported | |")
        lines.append(f"| {role} invalid steps, held-out templates | {percent(other['invalid'])} | reported | |")
    lines += ["", "Correct by number of steps (temperature 0.6):", "", "| steps | target | draft |", "|---|---|---|"]
    by_steps = [figures[f"{role} T 0.6"]["by_steps"] for role in ("target", "draft")]
    lines += [f"| {steps} | {percent(by_steps[0][steps])} | {percent(by_steps[1][steps])} |" for steps in by_steps[0]]
    lines += [
        "",
        "An invalid step is the first of a solution that is wrong, useless or garbage; what follows it is not judged.",
        "Made again by: `python -m recipes.pocket.measure --target semspec/pocket/models/target --draft "
        "semspec/pocket/models/draft`.",
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", type=Path, required=True, help=f"folder with target, draft and {MEASURES}")
    parser.add_argument("--title", required=True)
    arguments = parser.parse_args()
    folder: Path = arguments.models
    logs = {role: json.loads((folder / role / "training_log.json").read_text()) for role in ("target", "draft")}
    measures = json.loads((folder / MEASURES).read_text())
    (folder / "README.md").write_text(card(measures, logs, arguments.title, sys.stdin.read()))


if __name__ == "__main__":
    main()
