"""Prometheus metrics, under the names of vLLM, so that its dashboards read them."""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from specjax.serve.engine import Engine
from specjax.serve.handle import Served

_SECONDS = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0,
)  # fmt: skip


class _Loads(Collector):
    """Collects the load of the engine whenever the metrics are read."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def collect(self) -> Iterable[Metric]:
        load = self._engine.load()
        names, values = ["model_name"], [self._engine.target.name]
        for name, text, value in (
            ("vllm:num_requests_running", "Requests in a slot.", load.running),
            ("vllm:num_requests_waiting", "Requests that wait for a slot.", load.waiting),
            ("vllm:kv_cache_usage_perc", "Share of the caches that rows fill.", load.cache_share),
            ("specjax:host_share", "The host's share of recent turns.", load.host_share),
            ("specjax:steps_per_turn", "Steps of the next turn.", load.steps),
        ):
            gauge = GaugeMetricFamily(name, text, labels=names)
            gauge.add_metric(values, value)
            yield gauge
        info = GaugeMetricFamily(
            "vllm:cache_config_info", "Tokens of a block, and blocks of all rows.",
            labels=[*names, "block_size", "num_gpu_blocks"],
        )  # fmt: skip
        blocks = self._engine.blocks
        info.add_metric([*values, str(blocks.size), str(blocks.count)], 1.0)
        yield info
        for name, text, value in (
            ("vllm:prompt_tokens", "Tokens of prompts.", load.prompt_tokens),
            ("vllm:prefix_cache_queries", "Tokens looked for in slots.", load.prompt_tokens),
            ("vllm:prefix_cache_hits", "Tokens copied from slots.", load.copied_tokens),
            ("vllm:num_preemptions", "Rows that gave their pages to others.", load.set_back),
            ("specjax:compiled_programs", "Programs compiled.", self._engine.compiled()),
        ):
            counter = CounterMetricFamily(name, text, labels=names)
            counter.add_metric(values, value)
            yield counter


class Metrics:
    """Counts of the texts that were served."""

    def __init__(self, engine: Engine) -> None:
        self.registry = CollectorRegistry()
        self.registry.register(_Loads(engine))
        self._name, self._depth = engine.target.name, max(engine.max_depth, 1)
        labels = ["model_name"]

        def counter(name: str, text: str, *more: str) -> Counter:
            return Counter(name, text, [*labels, *more], registry=self.registry)

        def histogram(name: str, text: str) -> Histogram:
            return Histogram(name, text, labels, registry=self.registry, buckets=_SECONDS)

        self._drafts = counter("vllm:spec_decode_num_drafts", "Steps with drafts.")
        self._drafted = counter("vllm:spec_decode_num_draft_tokens", "Drafts.")
        self._accepted = counter("vllm:spec_decode_num_accepted_tokens", "Accepted drafts.")
        self._by_position = counter(
            "vllm:spec_decode_num_accepted_tokens_per_pos", "Accepted drafts by depth.", "position"
        )
        self._tokens = counter("vllm:generation_tokens", "New tokens.")
        self._ended = counter("vllm:request_success", "Texts by their end.", "finished_reason")
        self._refused = counter("specjax:requests_refused", "Requests by status.", "status")
        self._first = histogram("vllm:time_to_first_token_seconds", "Until the first token.")
        self._between = histogram("vllm:inter_token_latency_seconds", "Between two tokens, mean.")
        self._whole = histogram("vllm:e2e_request_latency_seconds", "Until the last token.")
        self._queued = histogram("vllm:request_queue_time_seconds", "Until the prompt was read.")
        for position in range(self._depth):
            self._by_position.labels(self._name, position)
        for metric in (self._drafts, self._drafted, self._accepted, self._tokens):
            metric.labels(self._name)

    def count(self, served: Served) -> None:
        """Counts a text that has ended."""
        name = self._name
        steps = [step for step in served.steps if step.offered]
        self._drafts.labels(name).inc(len(steps))
        self._drafted.labels(name).inc(sum(step.offered for step in steps))
        self._accepted.labels(name).inc(sum(step.accepted for step in steps))
        for position in range(self._depth):
            at = sum(step.accepted > position for step in steps)
            self._by_position.labels(name, position).inc(at)
        self._tokens.labels(name).inc(len(served.tokens))
        reason = {"eos": "stop", "limit": "length", "cancelled": "abort"}.get(served.finish, "stop")
        self._ended.labels(name, reason).inc()
        times = served.times
        if times.begun is not None:
            self._queued.labels(name).observe(times.begun - times.submitted)
        if times.first is not None and times.ended is not None:
            self._first.labels(name).observe(times.first - times.submitted)
            self._whole.labels(name).observe(times.ended - times.submitted)
            if len(served.tokens) > 1:
                between = (times.ended - times.first) / (len(served.tokens) - 1)
                self._between.labels(name).observe(between)

    def refuse(self, status: int) -> None:
        self._refused.labels(self._name, status).inc()

    def text(self) -> bytes:
        return generate_latest(self.registry)
