"""Requests made from the server's OpenAPI document, sensible and not: no answer is a 5xx, no error names our insides.

    python -m bench.serve_fuzz --examples 200 --out results

Starts a server of its own with the pocket pair. Fails if an answer is a 5xx or tells of Python objects or files.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis import GenerationMode

from bench.serve import machine, server

INSIDES = re.compile(r"<(?:function|class|bound method)\b|\bobject at 0x|Traceback \(|site-packages|\b\w+\.py\b")
MAX_KEPT = 400  # characters of a body that went wrong


@dataclass
class Found:
    """By operation: how often each status was the answer; and every answer that should not have been."""

    statuses: dict[str, Counter[int]] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)


def fuzz(url: str, model: str, examples: int) -> Found:
    """So many requests of each kind, valid and not, for every operation of the document."""
    found = Found()
    for operation in schemathesis.openapi.from_url(url + "/openapi.json").get_all_operations():
        api = operation.ok()
        for mode in (GenerationMode.POSITIVE, GenerationMode.NEGATIVE):
            if mode is GenerationMode.POSITIVE or api.body:  # nothing can be wrong about what has no body
                _try(api, mode, model, examples, found)
    return found


def _try(api: Any, mode: GenerationMode, model: str, examples: int, found: Found) -> None:
    counts = found.statuses.setdefault(api.label, Counter())

    @settings(
        max_examples=examples, deadline=None, phases=[Phase.explicit, Phase.generate], database=None,
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(case=api.as_strategy(generation_mode=mode))
    def call(case: Any) -> None:
        hasten(case, model)
        answer = case.call(timeout=300)  # a busy machine takes its time
        counts[answer.status_code] += 1
        told = INSIDES.search(answer.text) if 400 <= answer.status_code < 500 else None
        if answer.status_code >= 500 or (told and told.group() not in str(case.body)):
            found.wrong.append(f"{api.label}: {answer.status_code} {answer.text[:MAX_KEPT]} to {case.body!r:.400}")

    call()


def hasten(case: Any, model: str) -> None:
    """Nearly every body would be refused for the name of its model, and the rest would write for long."""
    if isinstance(case.body, dict):
        if "model" in case.body and isinstance(case.body["model"], str):
            case.body["model"] = model
        if isinstance(case.body.get("n"), int) and case.body["n"] > 0:
            case.body["n"] = 1  # or thousands of answers are asked for, every other time
        if case.body.get("prompt") in ("", []) or _ids(case.body.get("prompt")):
            case.body["prompt"] = "as good as any"  # nearly all others are empty, or of words that a tiny model lacks
        case.body.pop("deadline", None)  # a microsecond is too short, and 504 the right word for it
        length = "max_output_tokens" if "responses" in case.path else "max_tokens"
        if isinstance(case.body.get(length), int | None) and case.path.startswith("/v1"):
            case.body[length] = 3
        if case.path.startswith("/api/"):
            case.body["options"] = {"num_predict": 3}


def _ids(prompt: Any) -> bool:
    return isinstance(prompt, list) and all(isinstance(token, int) for token in prompt)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--examples", type=int, default=200, help="of each operation, valid, and as many that are not")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryFile("w+") as log:
        with server(4, 512, log) as (url, _):
            began = time.monotonic()
            found = fuzz(url, "pocket", arguments.examples)
            seconds = round(time.monotonic() - began)
        log.seek(0)
        errors = [line for line in map(json.loads, log) if line["level"] == "error"]
    result = machine() | {
        "examples": arguments.examples, "seconds": seconds,
        "requests": sum(counts.total() for counts in found.statuses.values()),
        "statuses": {label: dict(sorted(counts.items())) for label, counts in sorted(found.statuses.items())},
        "wrong": found.wrong[:20], "failed": len(found.wrong), "errors_in_the_log": len(errors),
    }  # fmt: skip
    if arguments.out:
        arguments.out.mkdir(parents=True, exist_ok=True)
        (arguments.out / f"serve-fuzz-{result['date']}.json").write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result))
    sys.exit(bool(found.wrong or errors))


if __name__ == "__main__":
    main()
