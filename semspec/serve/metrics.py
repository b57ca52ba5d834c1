"""What Prometheus sees. Names and meanings are vLLM's, under its prefix and under ours, so that dashboards work."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from functools import partial

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector
from prometheus_client.core import CounterMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from semspec.profile import DriftMonitor
from semspec.serve.deltas import Finished
from semspec.serve.engine import Engine
from semspec.serve.memory import pages

log = logging.getLogger("semspec.serve")
PREFIX, VLLM = "semspec:", "vllm:"
SUCCESSES = ("stop", "length", "thinking")
FAILURES = ("aborted", "deadline", "error")
SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
GAPS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 10)
LENGTHS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000)
SHARED = frozenset({
    "num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "prefix_cache_queries",
    "prefix_cache_hits", "num_preemptions", "prompt_tokens", "generation_tokens", "request_success",
    "time_to_first_token_seconds",
    "inter_token_latency_seconds", "request_time_per_output_token_seconds", "e2e_request_latency_seconds",
    "request_queue_time_seconds", "request_inference_time_seconds", "request_prefill_time_seconds",
    "request_decode_time_seconds", "request_prompt_tokens", "request_generation_tokens", "spec_decode_num_drafts",
    "spec_decode_num_draft_tokens", "spec_decode_num_accepted_tokens", "spec_decode_num_accepted_tokens_per_pos",
})  # fmt: skip
"""Names that vLLM has."""
FORMER = {"inter_token_latency_seconds": "time_per_output_token_seconds"}  # vLLM's, before it was renamed


class Metrics:
    def __init__(self, model: str = "semspec") -> None:
        self._own = CollectorRegistry()
        self.registry = CollectorRegistry()  # what is exposed
        ProcessCollector(registry=self.registry)  # memory, processor time, open files
        self.registry.register(Exposed(self._own, model))
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
        self.preemptions = self._counter("num_preemptions", "Times that a sequence gave way where the cache was full.")
        self.passes = self._counter("target_passes", "Target passes that verified or generated.", rule)
        self.succeeded = self._counter("request_success", "Sequences completed, by reason.", ("finished_reason",))
        self.failed = self._counter("request_failure", "Sequences not completed, by reason.", ("finished_reason",))
        for reason in SUCCESSES:
            self.succeeded.labels(reason)
        for reason in FAILURES:
            self.failed.labels(reason)
        self.drift = DriftMonitor()
        self.http_responses = self._counter("http_responses", "Responses, by status.", ("status",))
        client = ("client",)  # an API key, by its name
        self.client_sequences = self._counter("client_sequences", "Sequences ended, by client.", client)
        self.client_prompt_tokens = self._counter("client_prompt_tokens", "Prompt tokens, by client.", client)
        self.client_tokens = self._counter("client_generation_tokens", "Tokens generated, by client.", client)
        self.first_token = self._histogram("time_to_first_token_seconds", "From arrival to the first token.")
        self.seconds = self._histogram("e2e_request_latency_seconds", "From arrival to the end.")
        self.queued = self._histogram("request_queue_time_seconds", "From arrival to a slot.")
        self.inference = self._histogram("request_inference_time_seconds", "From a slot to the end.")
        self.prefill = self._histogram("request_prefill_time_seconds", "From a slot to the first token.")
        self.decode = self._histogram("request_decode_time_seconds", "From the first token to the end.")
        self.gaps = self._histogram(
            "inter_token_latency_seconds", "Between two rounds of an answer that brought tokens.", GAPS
        )
        self.per_token = self._histogram(
            "request_time_per_output_token_seconds", "Decode time of an answer by its tokens after the first.", GAPS
        )
        self.prompt_lengths = self._histogram("request_prompt_tokens", "Tokens of a prompt.", LENGTHS)
        self.lengths = self._histogram("request_generation_tokens", "Tokens of an answer.", LENGTHS)

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
        self._gauge("kv_cache_usage_perc", "Share of the cache's tokens in use, 0 to 1.").set_function(
            lambda: engine.cache_usage
        )
        self._gauge("kv_cache_pages_used", "Pages of the models' pools in use; 0 without pools.").set_function(
            lambda: pages(engine.pair)[0]
        )
        self._gauge("kv_cache_pages_remembered", "Those of them that only keep what was read before.").set_function(
            lambda: pages(engine.pair)[1]
        )
        self._own.register(PrefixCache(engine))

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
        read = finished.prompt_tokens if finished.first_of_prompt else 0
        self.prompt_tokens.inc(read)
        self.tokens.inc(stats.tokens)
        self.preemptions.inc(stats.preempted)
        (self.succeeded if finished.outcome in SUCCESSES else self.failed).labels(finished.outcome).inc()
        if finished.key is not None:
            self.client_sequences.labels(finished.key).inc()
            self.client_prompt_tokens.labels(finished.key).inc(read)
            self.client_tokens.labels(finished.key).inc(stats.tokens)
        self._times(finished)

    def _times(self, finished: Finished) -> None:
        tokens = finished.stats.tokens
        self.queued.observe(finished.queued)
        self.seconds.observe(finished.seconds)
        self.inference.observe(finished.seconds - finished.queued)
        self.prompt_lengths.observe(finished.prompt_tokens)
        self.lengths.observe(tokens)
        if tokens:
            self.first_token.observe(finished.first_token)
            self.prefill.observe(finished.first_token - finished.queued)
            self.decode.observe(finished.seconds - finished.first_token)
            for gap in finished.gaps:
                self.gaps.observe(gap)
        if tokens > 1:
            self.per_token.observe((finished.seconds - finished.first_token) / (tokens - 1))

    def _counter(self, name: str, what: str, labels: tuple[str, ...] = ()) -> Counter:
        return Counter(PREFIX + name, what, labels, registry=self._own)

    def _gauge(self, name: str, what: str) -> Gauge:
        return Gauge(PREFIX + name, what, registry=self._own)

    def _histogram(self, name: str, what: str, buckets: tuple[float, ...] = SECONDS) -> Histogram:
        return Histogram(PREFIX + name, what, registry=self._own, buckets=buckets)


class Exposed(Collector):
    """Every metric with the model's name, and those that vLLM has under its name as well."""

    def __init__(self, own: CollectorRegistry, model: str) -> None:
        self.own, self.model = own, model

    def collect(self) -> Iterator[Metric]:
        for family in self.own.collect():
            name = family.name.removeprefix(PREFIX)
            yield self._named(family, family.name)
            if name in SHARED:
                yield self._named(family, VLLM + name)
            if name in FORMER:
                yield self._named(family, VLLM + FORMER[name])

    def _named(self, family: Metric, name: str) -> Metric:
        found = Metric(name, family.documentation, family.type)
        found.samples = [
            sample._replace(
                name=name + sample.name.removeprefix(family.name),
                labels={**sample.labels, "model_name": self.model},
            )
            for sample in family.samples
        ]
        return found


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
