"""The page in a real browser: what tests do with it, and a server's answers made up for it."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Sequence
from typing import Any

import pytest

ASK = "Mia has 4 bags with 6 pens each. How many pens does Mia have?"
CHROMIUM = shutil.which("chromium")
browser_only = pytest.mark.skipif(CHROMIUM is None, reason="no chromium here to open the page with")
Spans = Sequence[tuple[str, str, str]]  # text, origin, channel


def ask(page: Any, text: str = ASK) -> None:
    page.fill("#prompt", text)
    page.press("#prompt", "Enter")


def done(page: Any) -> None:
    page.locator("#send").wait_for(state="visible")


def figure(answer: Any, name: str) -> float:
    return float(re.sub("[−×%]", "", answer.locator(f"[data-figure={name}]").inner_text()))


def shown(answer: Any) -> str:
    return re.sub(r"\s+", "", "".join(answer.locator(".token").all_inner_texts()))


def stream(*rounds: Spans, drafted: int = 2, seconds: float = 0.5, finish: str = "stop") -> str:
    """The events of an answer, a round at a time; spans have texts, origins and channels."""
    events: list[Any] = []
    tokens = relaxed = 0
    for spans in rounds:
        trace: dict[str, Any] = {"spans": [], "relaxed": [], "tokens": len(spans), "drafted": drafted}
        for text, origin, channel in spans:
            trace["spans"].append({"text": text, "origin": origin, "channel": channel, "token": tokens})
            if origin == "relaxed":
                trace["relaxed"].append({"token": tokens, "text": text, "instead": "<b>x</b>", "why": "<i>y</i>"})
                relaxed += 1
            tokens += 1
        trace["accepted"] = min(drafted, len(spans) - 1)
        events.append({"choices": [{"index": 0, "delta": {}, "finish_reason": None, "trace": trace}]})
    events.append({"choices": [{"index": 0, "delta": {}, "finish_reason": finish}]})
    told = {"num_target_passes": len(rounds), "relaxed_tokens": relaxed, "verifier": "exact"}
    metrics = {"generation_time_ms": 1000 * seconds, "speculative_decoding": told}
    events.append({"choices": [], "usage": {"completion_tokens": tokens}, "metrics": metrics})
    return "".join(f"data: {json.dumps(event)}\n\n" for event in events) + "data: [DONE]\n\n"


def saying(text: str, origin: str = "draft", **more: Any) -> str:
    """An answer of one round."""
    return stream([(text, origin, "content")], **more)


def answering(page: Any, answer: Callable[[dict[str, Any]], str]) -> list[dict[str, Any]]:
    """Let requests be answered by a function of their bodies; returns the list in which the bodies will be."""
    asked: list[dict[str, Any]] = []

    def handle(route: Any) -> None:
        asked.append(route.request.post_data_json)
        route.fulfill(status=200, content_type="text/event-stream", body=answer(asked[-1]))

    page.route("**/v1/chat/completions", handle)
    return asked
