"""Where data cannot show a loss nothing is certified, nothing is called equivalent, and the reason is told."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from semspec.bench.summary import summarise
from semspec.bench.table import notes
from semspec.bench.verdict import Margin
from tests.bench.test_summary import arm, many, run_of

Special = Callable[[int], dict[str, Any]]


def with_draft(*methods: str) -> dict[str, Any]:
    run = run_of(*methods)
    run["arms"].insert(1, arm("draft", "draft"))
    return run


def right(share: float, off: int = 0, **more: Any) -> Special:
    """Right on that share of problems, evenly spread; each arm with tokens of its own."""
    return lambda i: {
        "correct": int((i + 1) * share) > int(i * share) and (off == 0 or i % off != 0), "tokens": [i, off], **more,
    }  # fmt: skip


def verdicts(samples: list[dict[str, Any]], margin: str | None = None) -> tuple[dict[str, Any], str]:
    run = with_draft("fly", "exact")
    next(a for a in run["arms"] if a["name"] == "exact")["lossless"] = True
    summary = summarise(run, samples, Margin.parse(margin))
    json.dumps(summary, allow_nan=False)
    return summary["arms"], " ".join(notes(summary))


@pytest.mark.parametrize("share", [0.0, 0.01, 0.05])
def test_nothing_is_equivalent_where_all_right_answers_fit_in_the_margin(share: float) -> None:
    cut = {"finish_reason": "length"} if not share else {}
    none, wrong = right(share, **cut), right(0.0, 1, **cut)
    samples = many(600, none=none, draft=wrong, fly=wrong, exact=none)
    arms, said = verdicts(samples)
    for name in ("draft", "fly"):
        assert arms[name]["quality"] == ("worse" if share > 0.01 else "unclear")
        assert arms[name]["quality"] == "worse" or arms[name]["speedup"] is None
    assert arms["exact"]["quality"] == "equivalent" and arms["exact"]["speedup"] is not None, "token for token"
    if arms["fly"]["quality"] == "unclear":
        assert "too few for a margin of 3 points" in arms["fly"]["speedup_refused"] and "No speedup" in said
    assert ("--max-new-tokens" in said and "quality is of beginnings" in said) == (not share)


def test_nothing_is_equivalent_where_the_draft_alone_would_be() -> None:
    samples = many(600, none=right(0.9), draft=right(0.9, 300), fly=right(0.9, 200), exact=right(0.9, 500))
    arms, said = verdicts(samples)
    assert [arms[name]["quality"] for name in ("draft", "fly", "exact")] == ["unclear"] * 3
    assert arms["fly"]["speedup"] is None and "the draft alone is within the margin" in said
    assert arms["exact"]["speedup"] is not None, "what is lossless is so by its rule"
    seen, _ = verdicts(many(600, none=right(0.9), draft=right(0.9, 5), fly=right(0.9, 200), exact=right(0.9)))
    assert seen["fly"]["quality"] == "equivalent" and seen["draft"]["quality"] == "worse"
    tight, _ = verdicts(samples, "0.2")
    assert tight["fly"]["speedup_refused"] is None, "a margin within which the draft is not"


def test_what_accepts_everything_is_the_control_where_no_model_drafts() -> None:
    run = run_of("fly", "accept-all:k=4")
    samples = many(600, **{"none": right(0.9), "fly": right(0.9, 200), "accept-all:k=4": right(0.9, 300)})
    found = summarise(run, samples)["arms"]
    assert found["fly"]["quality"] == "unclear" and "accept-all:k=4, which checks nothing" in str(
        found["fly"]["speedup_refused"]
    )
