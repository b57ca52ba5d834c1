"""What an answer took: OpenAI's usage, and vLLM's metrics with a few more fields."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from semspec.serve.deltas import Finished


def usage_of(ends: Sequence[Finished], n: int) -> dict[str, int]:
    """Tokens are counted from ids, never from text. A prompt counts once, however many (n) answers it has."""
    written = sum(end.stats.tokens for end in ends)
    prompts = {end.choice // n: end.prompt_tokens for end in ends}
    read = sum(prompts.values())
    return {"prompt_tokens": read, "completion_tokens": written, "total_tokens": read + written}


def metrics_of(ends: Sequence[Finished], detailed: bool = False) -> dict[str, Any]:
    """Of one answer, or None for the parts that make no sense for several."""
    if len(ends) != 1:
        return {"speculative_decoding": None}
    (end,) = ends
    writing = end.seconds - end.first_token
    gaps = max(end.stats.tokens - 1, 1)
    busy = end.seconds - end.queued
    return {
        "time_to_first_token_ms": _ms(end.first_token),
        "generation_time_ms": _ms(busy),
        "queue_time_ms": _ms(end.queued),
        "mean_itl_ms": _ms(writing / gaps),
        "tokens_per_second": round(end.stats.tokens / busy, 2) if busy > 0 else None,
        "speculative_decoding": speculation_of(end, detailed),
    }


def speculation_of(end: Finished, detailed: bool) -> dict[str, Any]:
    stats = end.stats
    longest = max([end.longest, *stats.histogram])
    said: dict[str, Any] = {
        "mean_acceptance_length": round(stats.tau, 4),
        "draft_acceptance_rate": round(stats.acceptance_rate, 4),
        "acceptance_histogram": [stats.histogram.get(n, 0) for n in range(longest + 1)],
        "num_spec_steps": stats.rounds - stats.drafts.get(0, 0),
        "num_accepted_draft_tokens": stats.accepted,
        "num_draft_tokens": stats.drafted,
        "num_spec_tokens": end.longest,
        "num_target_passes": stats.target_passes,
        "verifier": end.verifier,
        "lossless": end.lossless,
        "relaxed_tokens": stats.relaxed,
        "seed": end.seed,
    }
    if detailed:
        said["per_step_drafted"] = [drafted for drafted, _ in end.steps]
        said["per_step_accepted"] = [accepted for _, accepted in end.steps]
    return said


def _ms(seconds: float) -> float:
    return round(1000 * max(seconds, 0.0), 3)
