"""Usage of an answer as OpenAI reports it, and metrics as vLLM does, with a few more fields."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from semspec.serve.deltas import Finished


def usage_of(finished: Sequence[Finished], n: int) -> dict[str, Any]:
    """Tokens are counted from ids, never from text. A prompt counts once, however many (n) answers it has; what was
    cached of it is what the first of them to read it has found."""
    written = sum(end.stats.tokens for end in finished)
    prompts = {end.choice // n: end.prompt_tokens for end in finished}
    cached = {i: min(end.stats.cached_tokens for end in finished if end.choice // n == i) for i in prompts}
    cached = {i: min(count, prompts[i]) for i, count in cached.items()}
    read = sum(prompts.values())
    return {
        "prompt_tokens": read,
        "completion_tokens": written,
        "total_tokens": read + written,
        "prompt_tokens_details": {"cached_tokens": sum(cached.values())},
        "completion_tokens_details": {"reasoning_tokens": sum(end.thought for end in finished)},
    }


def metrics_of(finished: Sequence[Finished], detailed: bool = False) -> dict[str, Any]:
    """Of one answer; several have none."""
    if len(finished) != 1:
        return {"speculative_decoding": None}
    (end,) = finished
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
    """Rounds without a draft are not counted, as in vLLM."""
    stats, undrafted = end.stats, end.stats.drafts.get(0, 0)
    rounds = stats.rounds - undrafted
    histogram = [stats.histogram.get(n, 0) for n in range(max([end.num_draft_tokens, *stats.histogram]) + 1)]
    histogram[0] -= undrafted
    report: dict[str, Any] = {
        "mean_acceptance_length": round(1 + stats.accepted / rounds, 4) if rounds else 1.0,
        "draft_acceptance_rate": round(stats.acceptance_rate, 4),
        "acceptance_rate_per_position": [round(share, 4) for share in stats.acceptance_per_position],
        "acceptance_histogram": histogram,
        "num_spec_steps": rounds,
        "num_accepted_draft_tokens": stats.accepted,
        "num_draft_tokens": stats.drafted,
        "num_spec_tokens": end.num_draft_tokens,
        "num_target_passes": stats.target_passes,
        "verifier": end.verifier,
        "lossless": end.lossless,
        "relaxed_tokens": stats.relaxed,
        "seed": end.seed,
    }
    if stats.calls:  # round trips to the servers of a pair
        report |= {"calls": dict(stats.calls), "draft_lost": stats.calls["draft lost"] > 0}
    if end.drift is not None:
        report["profile_drift"] = end.drift.as_dict()
    if detailed:
        report["per_step_drafted"] = [drafted for drafted, _ in end.rounds]
        report["per_step_accepted"] = [accepted for _, accepted in end.rounds]
    return report


def _ms(seconds: float) -> float:
    return round(1000 * max(seconds, 0.0), 3)
