"""What a server tells those who run it: a line for each request, as text or JSON, and OpenTelemetry's spans."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from outrider.server.logs import FIELDS, REQUESTS, JsonFormatter, TextFormatter
from outrider.server.tracing import Tracing
from tests.server.rig import MODEL, Served, serving

SPANS = InMemorySpanExporter()
TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serving() as served:
        provider = TracerProvider()
        provider.add_span_processor(SimpleSpanProcessor(SPANS))
        served.service.metrics.tracing = Tracing(provider)
        yield served


def test_a_line_for_every_request(served: Served, caplog: pytest.LogCaptureFixture,
                                  monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logging.getLogger("outrider"), "propagate", True)
    with caplog.at_level(logging.INFO, logger=REQUESTS.name):
        served.post("/v1/completions", prompt="abc", max_tokens=5, temperature=0, ignore_eos=True)
        with served.http.stream("POST", "/v1/completions", json={"prompt": "a", "max_tokens": 150, "stream": True}):
            pass  # the client leaves
        served.assert_idle()
    lines = [getattr(record, FIELDS) for record in caplog.records if record.name == REQUESTS.name]
    assert [line["finish_reason"] for line in lines] == ["length", "abort"]
    assert lines[0]["prompt_tokens"] == 3 and lines[0]["output_tokens"] == 5 and lines[0]["request_id"]
    assert 0 < lines[0]["first_token_seconds"] <= lines[0]["seconds"]


def test_lines_of_both_formats() -> None:
    record = logging.LogRecord("outrider.requests", logging.INFO, "x.py", 1, "request %s", ("ended",), None)
    setattr(record, FIELDS, {"output_tokens": 5})
    line = json.loads(JsonFormatter().format(record))
    assert line["message"] == "request ended" and line["level"] == "info" and line["output_tokens"] == 5
    assert line["time"].endswith("+00:00") and "\n" not in JsonFormatter().format(record)
    assert TextFormatter().format(record) == "outrider: info: request ended output_tokens=5"


def test_spans_of_a_request_are_below_the_clients_own(served: Served) -> None:
    SPANS.clear()
    answer = served.http.post("/v1/completions", json={"prompt": "abc", "max_tokens": 20, "temperature": 0},
                              headers={"traceparent": f"00-{TRACE}-{SPAN}-01"})
    assert answer.status_code == 200
    spans = {span.name: span for span in SPANS.get_finished_spans()}
    whole = spans["llm_request"]
    assert f"{whole.context.trace_id:032x}" == TRACE and f"{whole.parent.span_id:016x}" == SPAN
    assert whole.attributes["gen_ai.usage.prompt_tokens"] == 3 and whole.attributes["gen_ai.response.model"] == MODEL
    parts = [spans[name] for name in ("queue", "prefill", "decode")]
    assert all(part.parent.span_id == whole.context.span_id for part in parts)
    times = [whole.start_time, *(time for part in parts for time in (part.start_time, part.end_time)), whole.end_time]
    assert times == sorted(times)
