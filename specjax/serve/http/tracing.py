"""Traces of requests for OpenTelemetry, with the extra `otel`.

A request with W3C's header `traceparent` has its span inside that trace.  The names of the
attributes are those of OpenTelemetry's conventions for generative models.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from specjax._internal.extras import install
from specjax.serve.handle import Served
from specjax.serve.http.answers import REASONS


class Tracing:
    """Sends a span for each text."""

    def __init__(self, endpoint: str | None, model: str, exporter: Any = None) -> None:
        """Connects to a collector.

        Args:
          endpoint: the address of a collector's traces for OTLP over HTTP, such as
            "http://localhost:4318/v1/traces".
          model: its name.
          exporter: what gets the spans instead, such as the exporter of a test.

        Raises:
          ValueError: the packages are not installed.
        """
        try:
            from opentelemetry import trace  # pyright: ignore[reportMissingImports]
            from opentelemetry.sdk.resources import (  # pyright: ignore[reportMissingImports]
                Resource,
            )
            from opentelemetry.sdk.trace import (  # pyright: ignore[reportMissingImports]
                TracerProvider,
            )
            from opentelemetry.sdk.trace.export import (  # pyright: ignore[reportMissingImports]
                BatchSpanProcessor,
            )
            from opentelemetry.trace.propagation import tracecontext  # pyright: ignore

            if exporter is None:
                from opentelemetry.exporter.otlp.proto.http import (  # pyright: ignore
                    trace_exporter,
                )

                exporter = trace_exporter.OTLPSpanExporter(endpoint=endpoint)
        except ImportError as error:
            raise ValueError(f"traces need {error.name}: {install('otel')}") from None
        self._model = model
        self._provider = TracerProvider(resource=Resource.create({"service.name": "specjax"}))
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("specjax")
        self._parents = tracecontext.TraceContextTextMapPropagator()
        self._kind = trace.SpanKind.SERVER

    def record(self, headers: Mapping[str, str], request_id: str, served: Served) -> None:
        """Sends the span of a text that has ended.

        Args:
          headers: of its request, with names in lower case.
          request_id: of its request.
          served: the text.
        """
        times, now = served.times, time.time() - time.perf_counter()
        ended = times.submitted if times.ended is None else times.ended
        span = self._tracer.start_span(
            "llm_request", self._parents.extract(dict(headers)), self._kind,
            start_time=_nanoseconds(times.submitted + now),
        )  # fmt: skip
        drafts = sum(guess.depth > 0 for guess in served.guesses)
        span.set_attributes({
            "gen_ai.operation.name": "text_completion", "gen_ai.provider.name": "specjax",
            "gen_ai.request.model": self._model, "gen_ai.response.model": self._model,
            "gen_ai.response.id": request_id, "gen_ai.request.seed": served.seed,
            "gen_ai.response.finish_reasons": [REASONS[served.finish]],
            "gen_ai.usage.input_tokens": served.prompt,
            "gen_ai.usage.output_tokens": len(served.tokens),
            "specjax.index": served.index, "specjax.copied_tokens": served.copied,
            "specjax.accepted_drafts": drafts, "specjax.steps": served.stats.target_passes,
        })  # fmt: skip
        if times.begun is not None:
            span.add_event("prompt", timestamp=_nanoseconds(times.begun + now))
            span.set_attribute("gen_ai.latency.time_in_queue", times.begun - times.submitted)
        if times.first is not None:
            span.add_event("first token", timestamp=_nanoseconds(times.first + now))
            first = times.first - times.submitted
            span.set_attribute("gen_ai.latency.time_to_first_token", first)
        span.end(_nanoseconds(ended + now))

    def close(self) -> None:
        """Sends what is left."""
        self._provider.shutdown()


def _nanoseconds(seconds: float) -> int:
    return int(seconds * 1e9)
