"""What a server tells those who run it: a line for each request, as text or JSON, and OpenTelemetry's spans."""

from __future__ import annotations

import json
import logging
import re
import sys
from collections.abc import Iterator

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from outrider.async_llm import AsyncLLM
from outrider.cli import _Formatter
from outrider.core import SamplingParams, StepResult
from outrider.engine.step_trace import StepTrace, TracedStep
from outrider.server.logs import FIELDS, REQUESTS, JsonFormatter, TextFormatter
from outrider.server.tracing import Tracing
from tests.engine.harness import Ask, add_request
from tests.server.rig import MODEL, Served, serving, tiny_engine

SPANS = InMemorySpanExporter()
TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serving(lambda: AsyncLLM.around(tiny_engine(eos_ids=(2,)).engine)) as served:
        provider = TracerProvider()
        provider.add_span_processor(SimpleSpanProcessor(SPANS))
        served.service.metrics.tracing = tracing = Tracing(provider)
        served.llm.engine.trace = StepTrace(tracing.record_step, steps_per_second=1e6)
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


FORGED = "lost\n\x1b[2J\x1b]0;title\x07outrider: error: the server was sold \x9b31m \u202efoo\r\x00"


@pytest.mark.parametrize("formatter", [TextFormatter(), JsonFormatter(), _Formatter()])
def test_text_of_others_neither_turns_a_terminal_nor_looks_like_a_line(formatter: logging.Formatter) -> None:
    try:
        raise ValueError(FORGED)
    except ValueError:
        raised = sys.exc_info()
    record = logging.LogRecord("outrider", logging.WARNING, "x.py", 1, "an adapter: %s", (FORGED,), raised)
    setattr(record, FIELDS, {"request_id": "a output_tokens=9", "model": 'x"\x1b[0m', "tokens": 3, "plain": "a-b/c"})
    first, *others = formatter.format(record).split("\n")
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202e]", "".join((first, *others)))
    assert all(line.startswith("  ") for line in others)
    if isinstance(formatter, TextFormatter):
        text = "\n".join((first, *others))
        assert 'request_id="a output_tokens=9" model="x\\"\\u001b[0m" tokens=3 plain=a-b/c' in text
        assert text.count("\n  \\x1b[2J\\x1b]0;title\\x07outrider: error: the server was sold") == 2


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


def test_spans_of_steps(served: Served) -> None:
    SPANS.clear()
    served.post("/v1/completions", prompt="abcabcabc", max_tokens=20, temperature=0, ignore_eos=True)
    formed = served.post("/v1/completions", prompt="a", max_tokens=9, structured_outputs={"regex": "[ab]{4}"})
    assert formed.status_code == 200, formed.text
    served.assert_idle()
    spans = SPANS.get_finished_spans()
    steps = [span for span in spans if span.name == "step"]
    assert steps and all(step.parent is None for step in steps)
    assert sum(step.attributes["outrider.output_tokens"] for step in steps) >= 20 + 4
    assert sum(step.attributes["outrider.admissions"] for step in steps) == 2
    assert max(step.attributes["outrider.draft_tokens"] for step in steps) >= 1
    has_grammars = False
    for step in steps:
        parts = [span for span in spans if span.parent and span.parent.span_id == step.context.span_id]
        names = [part.name for part in sorted(parts, key=lambda part: part.start_time)]
        assert [name for name in names if name != "grammars"] == [
            "schedule", "admit", "forward", "finish", "draft", "read"]
        assert all(step.start_time <= part.start_time <= part.end_time <= step.end_time for part in parts)
        has_grammars |= "grammars" in names
    assert has_grammars


def test_steps_are_traced_at_a_bounded_rate() -> None:
    """One step in ten seconds; every other step has no times."""
    rig, traced, now = tiny_engine(), list[TracedStep](), [0.0]
    rig.engine.trace = StepTrace(traced.append, steps_per_second=0.1, clock=lambda: now[0])
    for _ in range(2):
        rig.run([Ask([1, 2, 3], SamplingParams(max_tokens=8, temperature=0))])
        now[0] += 10
    assert len(traced) == 2 and len(rig.results) > 4
    assert [result.step for result in rig.results if result.times is not None] == [own.batch.step for own in traced]


def test_a_worker_that_tells_no_times_is_one_part() -> None:
    traced: list[TracedStep] = []
    trace = StepTrace(traced.append, steps_per_second=1)
    rig = tiny_engine()
    add_request(rig.engine, "a", [1, 2, 3], SamplingParams(max_tokens=1))
    batch = trace.schedule(rig.scheduler)
    assert batch is not None and batch.mode.is_traced
    trace.finish(StepResult(batch.step + 1, []))  # of another step
    trace.finish(StepResult(batch.step, [], seconds=0.25))
    (own,) = traced
    assert own.in_worker.parts == (("device", 0.25),) and own.began <= own.scheduled <= own.ended
