"""What Prometheus sees. Names are vLLM's with our prefix, so that existing dashboards need one change."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from functools import partial

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector
from prometheus_client.core import CounterMetricFamily
from prometheus_client.registry import Collector

from semspec.profile import DriftMonitor
from semspec.serve.deltas import Finished
from semspec.serve.engine import Engine

log = logging.getLogger("semspec.serve")
PREFIX = "semspec:"
SUCCESSES = ("stop", "length", "thinking")
FAILURES = ("aborted", "deadline", "error")
SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)


class Metrics:
    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)  # memory, processor time, open files
        rule = ("verifier",)
        self.drafts = self._counter("spec_decode_num_drafts", "Drafts verified.", rule)
        self.drafted = self._counter("spec_decode_num_draft_tokens", "Draft tokens verified.", rule)
        self.accepted = self._counter("spec_decode_num_accepted_tokens", "Draft tokens accepted.", rule)
        self.relaxed = self._counter(
            "spec_decode_num_relaxed_tokens", "Draft tokens accepted against the target's own choice.", rule
        )
        # Of each pair of names the second is the former one.
        drafted = ("spec_decode_num_reasoning_steps", "spec_decode_num_sentences_drafted")
        accepted = ("spec_decode_num_accepted_reasoning_steps", "spec_decode_num_sentences_accepted")
        self.steps = [self._counter(name, "Reasoning steps drafted.", rule) for name in drafted]
        self.accepted_steps = [self._counter(name, "Reasoning steps accepted.", rule) for name in accepted]
        self.positions = self._counter(
            "spec_decode_num_accepted_tokens_per_pos", "Draft tokens accepted, by position in the draft.", ("position",)
        )
        self.loops = self._counter("loops_detected", "Times a lossy rule repeated itself and was replaced.", rule)
        self.prompt_tokens = self._counter("prompt_tokens", "Prompt tokens, each prompt once.")
        self.tokens = self._counter("generation_tokens", "Tokens generated.")
        self.passes = self._counter("target_passes", "Target passes that verified or generated.", rule)
        self.succeeded = self._counter("request_success", "Sequences completed, by reason.", ("finished_reason",))
        self.failed = self._counter("request_failure", "Sequences not completed, by reason.", ("finished_reason",))
        for reason in SUCCESSES:
            self.succeeded.labels(reason)
        for reason in FAILURES:
            self.failed.labels(reason)
        self.drift = DriftMonitor()
        self.http_responses = self._counter("http_responses", "Responses, by status.", ("status",))
        self.first_token = self._histogram("time_to_first_token_seconds", "From arrival to the first token.")
        self.seconds = self._histogram("e2e_request_latency_seconds", "From arrival to the end.")
        self.queued = self._histogram("request_queue_time_seconds", "From arrival to a slot.")

    def watch(self, engine: Engine) -> None:
        """Gauges are read from the engine when they are asked for."""
        self._gauge("profile_drift_noticed", "1: recent requests are unlike those of the profile's calibration."
                    ).set_function(lambda: self.drift.noticed)  # fmt: skip
        for name in self.drift.recent:
            self._gauge(
                f"profile_drift_{name}", f"Mean {name} of recent requests, in the calibration's standard deviations."
            ).set_function(partial(self.drift.mean, name))
        self._gauge("num_requests_running", "Slots in use.").set_function(lambda: engine.running)
        self._gauge("num_requests_waiting", "Sequences without a slot.").set_function(lambda: engine.waiting)
        self._gauge("num_slots", "Slots.").set_function(lambda: engine.slots)
        self.registry.register(PrefixCache(engine))

    def finish(self, finished: Finished) -> None:
        """A sequence has ended, whatever the outcome."""
        stats, name = finished.stats, finished.verifier
        self.drafts.labels(name).inc(stats.rounds - stats.drafts.get(0, 0))
        self.drafted.labels(name).inc(stats.drafted)
        self.accepted.labels(name).inc(stats.accepted)
        self.relaxed.labels(name).inc(stats.relaxed)
        self.loops.labels(name).inc(stats.loops)
        for counter in self.steps:
            counter.labels(name).inc(stats.step_outcomes.total() - stats.step_outcomes["target"])
        for counter in self.accepted_steps:
            counter.labels(name).inc(stats.step_outcomes["accepted"])
        self.passes.labels(name).inc(stats.target_passes)
        for i, n in enumerate(stats.accepted_per_position):
            self.positions.labels(str(i)).inc(n)
        if finished.drift is not None and finished.outcome in SUCCESSES:
            before = self.drift.noticed
            self.drift.observe(finished.drift)
            if self.drift.noticed and not before:
                log.warning("requests are unlike those that the profile was calibrated on; its bound may not hold")
        self.prompt_tokens.inc(finished.prompt_tokens if finished.first_of_prompt else 0)
        self.tokens.inc(stats.tokens)
        (self.succeeded if finished.outcome in SUCCESSES else self.failed).labels(finished.outcome).inc()
        self.queued.observe(finished.queued)
        self.seconds.observe(finished.seconds)
        if stats.tokens:
            self.first_token.observe(finished.first_token)

    def _counter(self, name: str, what: str, labels: tuple[str, ...] = ()) -> Counter:
        return Counter(PREFIX + name, what, labels, registry=self.registry)

    def _gauge(self, name: str, what: str) -> Gauge:
        return Gauge(PREFIX + name, what, registry=self.registry)

    def _histogram(self, name: str, what: str) -> Histogram:
        return Histogram(PREFIX + name, what, registry=self.registry, buckets=SECONDS)


class PrefixCache(Collector):
    """What the target's prefix cache has counted."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    def collect(self) -> Iterator[CounterMetricFamily]:
        target = self.engine.pair.target if self.engine.pair else None
        for name, field, what in (
            ("prefix_cache_queries", "queries", "Prompt tokens looked up in the prefix cache."),
            ("prefix_cache_hits", "hits", "Prompt tokens found there."),
        ):
            yield CounterMetricFamily(PREFIX + name, what, value=getattr(target, field, 0))
