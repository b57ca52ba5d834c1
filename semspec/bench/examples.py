"""A report's examples: a question, its right answer, and what every arm wrote, as harmless HTML."""

from __future__ import annotations

import json
from collections.abc import Iterable
from html import escape
from itertools import groupby
from typing import Any

from semspec.bench.folder import Sample
from semspec.loop.repetition import find_repetition
from semspec.tasks import Problem

EXAMPLES = 3  # problems shown
LONGEST, END = 1500, 500  # characters of a text that are shown, and how many of them from its end
KEY = {"d": "draft", "r": "draft, relaxed", "t": "target"}


def examples(samples: list[Sample], summary: dict[str, Any]) -> str:
    """Outputs of all arms side by side, first those problems on which the arms disagree most."""
    problems: dict[str, dict[str, Sample]] = {}
    for sample in sorted(samples, key=lambda s: (s["index"], s["repeat"])):
        problems.setdefault(sample["problem"], {}).setdefault(sample["arm"], sample)
    shown = sorted(problems.items(), key=lambda item: -_disagreement(item[1].values()))[:EXAMPLES]
    if not shown:
        return ""
    blocks = []
    for problem, outputs in shown:
        cards = "".join(_output(name, outputs[name], arm) for name, arm in summary["arms"].items() if name in outputs)
        head = f"<h3>Example: <code>{escape(problem)}</code></h3>{_question(outputs.values())}"
        blocks.append(f'{head}<div class="outputs">{cards}</div>')
    key = " ".join(f'<span class="key"><i class="{letter}"></i>{word}</span>' for letter, word in KEY.items())
    caption = f'<p class="soft">The bar shows which model wrote each token: {key}</p>'
    return f"<h2>Examples</h2>{caption}{''.join(blocks)}"


def _question(outputs: Iterable[Sample]) -> str:
    """Runs of older versions did not record it."""
    asked = next((s for s in outputs if s.get("question")), None)
    if asked is None:
        return ""
    answer = asked.get("answer")
    text = answer if isinstance(answer, str) else json.dumps(answer, ensure_ascii=False)
    right = "" if answer is None else f"<p><b>Right answer:</b> {escape(shortened(text))}</p>"
    return f'<div class="card question"><p>{escape(shortened(asked["question"]))}</p>{right}</div>'


def _disagreement(outputs: Iterable[Sample]) -> int:
    kinds = [(s["correct"], s["finish_reason"]) for s in outputs]
    return len(set(kinds))


def _output(name: str, sample: Sample, arm: dict[str, Any]) -> str:
    verdicts = {True: "right", False: "wrong", None: "not scored"}
    verdict = verdicts.get(sample["correct"]) or f"score {100 * sample['correct']:.0f} %"
    facts = [verdict, f"{len(sample['tokens'])} tokens", f"{sample['seconds']:.2f} s"]
    if sample["finish_reason"] == "length":
        facts.append("cut off at the limit")
    if loop := find_repetition(sample["tokens"]):
        facts.append(f"loops: {loop.period} tokens, {loop.repeats} times from token {loop.start}")
    wrong = ' class="worse"' if sample["correct"] == 0 or loop else ""
    # The draft alone is decoded as a target is, and its tokens are marked as a target's.
    origins = sample["origins"].replace("t", "d") if arm["role"] == "draft" else sample["origins"]
    return (
        f'<article class="card"><header>{escape(name)}</header><small{wrong}>{escape(", ".join(facts))}</small>'
        f"{_origins(origins)}<pre>{escape(shortened(sample['text']))}</pre></article>"
    )


def shortened(text: str) -> str:
    """A long text without its middle: answers are at the end."""
    if len(text) <= LONGEST:
        return text
    return f"{text[: LONGEST - END]}\n… {len(text) - LONGEST:,} characters left out …\n{text[-END:]}"


def asked(problem: Problem) -> dict[str, Any]:
    """The question and its right answer as a sample keeps them: of a long one the ends."""
    said = problem.prompt if isinstance(problem.prompt, str) else problem.prompt[-1]["content"]
    question = "\n\n".join([str(said), *problem.turns])
    answer = problem.answer if len(str(problem.answer)) <= LONGEST else shortened(str(problem.answer))
    return {"question": shortened(question), "answer": answer}


def _origins(origins: str) -> str:
    """One bar, as long as the output, coloured by the model that wrote each token."""
    start, bars = 0, []
    for letter, run in groupby(letter for letter in origins if letter in KEY):
        width = len(list(run))
        bars.append(f'<rect class="{letter}" x="{start}" width="{width}" height="1"/>')
        start += width
    shape = f'viewBox="0 0 {max(1, start)} 1" preserveAspectRatio="none" aria-hidden="true"'
    return f'<svg class="origins" {shape}>{"".join(bars)}</svg>'
