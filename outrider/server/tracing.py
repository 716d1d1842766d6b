"""OpenTelemetry traces, an optional extra: spans of requests, and of a few of the engine's steps.

A request's span contains spans of its queue, prefill and decode times. They are made when the request has ended, so
they take no time while tokens are generated. A step's span contains `schedule` and the parts of its run; only a bounded
number of steps a second gets a span. On a CPU the parts are `admit`, `forward`, `finish`, `draft` and `read`, and those
of features, such as `grammars`. The parts of a captured step cannot be timed, so on a GPU they are one span,
`device`."""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextvars import ContextVar
from typing import Any

from outrider.core.outputs import RequestMetrics
from outrider.engine.step_trace import TracedStep

NEEDS = "--otlp-traces-endpoint needs OpenTelemetry: pip install 'outrider[otel]'"
TRACE_PARENT: ContextVar[str | None] = ContextVar("traceparent", default=None)  # the client's span, if it sent one


class Tracing:
    def __init__(self, provider: Any) -> None:
        """provider: OpenTelemetry's TracerProvider."""
        self._provider = provider
        self._tracer = provider.get_tracer("outrider")

    @classmethod
    def to(cls, endpoint: str, service_name: str) -> Tracing:
        """Make a Tracing that sends spans to a collector, as OTLP over HTTP."""
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
        except ModuleNotFoundError as error:
            raise ValueError(f"{NEEDS} ({error.name} is missing)") from None
        provider = TracerProvider(resource=Resource.create({"service.name": service_name}))
        provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint)))
        return cls(provider)

    def record(self, metrics: RequestMetrics, attributes: Mapping[str, Any]) -> None:
        """Record the spans of a request that has just ended. Its times are on the clock of perf_counter."""
        from opentelemetry.trace import set_span_in_context
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        parent = TRACE_PARENT.get()
        context = None if parent is None else TraceContextTextMapPropagator().extract({"traceparent": parent})
        offset, now = time.time_ns() - time.perf_counter_ns(), time.perf_counter()
        ends = {"queue": metrics.first_scheduled_time, "prefill": metrics.first_token_time, "decode": now}
        span = self._tracer.start_span("llm_request", context, attributes=attributes,
                                       start_time=_nanoseconds(metrics.arrival_time, offset))
        inside, begin = set_span_in_context(span), metrics.arrival_time
        for name, end in ends.items():
            if end is not None:
                part = self._tracer.start_span(name, inside, start_time=_nanoseconds(begin, offset))
                part.end(_nanoseconds(end, offset))
                begin = end
        span.end(_nanoseconds(now, offset))

    def record_step(self, step: TracedStep) -> None:
        """Record the spans of a step after its result was read. They are a separate trace, because a step serves many
        requests.

        Below the step are `schedule` and the parts that the worker timed: on a CPU `admit`, `forward`, `grammars` (if a
        request has one), `finish`, `draft` (if there is a drafter) and `read`. On a GPU a step is one captured graph,
        whose parts cannot be timed, so they are one span, `device`."""
        from opentelemetry.trace import set_span_in_context

        batch, result = step.batch, step.result
        attributes: dict[str, Any] = {
            "outrider.step": batch.step, "outrider.requests": batch.num_requests, "outrider.tokens": batch.num_tokens,
            "outrider.draft_tokens": sum(batch.num_drafts), "outrider.admissions": len(batch.admissions),
            "outrider.accepted_tokens": sum(own.num_accepted for own in result.requests),
            "outrider.output_tokens": sum(len(own.run) for own in result.requests)}
        if result.uncaptured is not None:
            attributes["outrider.uncaptured"] = result.uncaptured.name.lower()
        span = self._tracer.start_span("step", attributes=attributes, start_time=int(step.began * 1e9))
        inside, end = set_span_in_context(span), step.in_worker.began
        parts = [("schedule", step.began, step.scheduled)]
        for name, seconds in step.in_worker.parts:
            parts.append((name, end, end + seconds))
            end += seconds
        for name, start, stop in parts:
            self._tracer.start_span(name, inside, start_time=int(start * 1e9)).end(int(stop * 1e9))
        span.end(int(max(step.ended, end) * 1e9))

    def close(self) -> None:
        self._provider.shutdown()


def _nanoseconds(seconds: float, offset: int) -> int:
    return int(seconds * 1e9) + offset
