"""Metrics in Prometheus' text form, under the names that dashboards for vLLM already read. No client library is used.

The engine's counts are read from its statistics when a client asks for metrics. Times of requests are measured here.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from operator import attrgetter
from typing import Any

from outrider.core.feature_parts import ResultPart
from outrider.core.outputs import OutputIncrement, RequestMetrics
from outrider.core.params import SamplingParams
from outrider.engine.engine import Engine
from outrider.engine.stats import STEP_TOKENS, EngineStats
from outrider.lora_request import AdapterLoads
from outrider.server.logs import REQUEST_ID, log_request
from outrider.server.tracing import Tracing

FIRST_TOKEN = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0,
               80.0, 160.0, 640.0)
BETWEEN_TOKENS = (0.001, 0.0025, 0.005, 0.0075, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5,
                  5.0, 10.0, 20.0, 40.0, 80.0)
WHOLE_REQUEST = (0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0,
                 960.0, 1920.0)
SAMPLES = (1, 2, 5, 10, 20)
SLEEP_STATES = ("awake", "weights_offloaded", "discard_all")  # by the level of sleep
FIGURE_HEAD = ("name", "help_text", "is_count")
TOKENS = tuple(base * 10**power for power in range(6) for base in (1, 2, 5))


class Histogram:
    def __init__(self, name: str, help_text: str, bounds: Sequence[float]) -> None:
        self.name, self.help_text, self.bounds = name, help_text, bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value

    def lines(self, labels: str) -> Iterable[str]:
        yield from _head(self.name, self.help_text, "histogram")
        total = 0
        for bound, count in zip((*map(str, map(float, self.bounds)), "+Inf"), self.counts, strict=True):
            total += count
            yield f'vllm:{self.name}_bucket{{{labels},le="{bound}"}} {total}'
        yield f"vllm:{self.name}_sum{{{labels}}} {self.sum}"
        yield f"vllm:{self.name}_count{{{labels}}} {total}"


class ServerMetrics:
    """The metrics of one event loop."""

    def __init__(self, model_name: str, tracing: Tracing | None = None) -> None:
        self.model_name, self.tracing = model_name, tracing
        self._began = time.time()
        self._labels = f'model_name="{_escaped(model_name)}",engine="0"'
        self.first_token = Histogram("time_to_first_token_seconds", "Time to the first token.", FIRST_TOKEN)
        self.between = Histogram("inter_token_latency_seconds", "Time between runs of tokens.", BETWEEN_TOKENS)
        self.per_token = Histogram("request_time_per_output_token_seconds",
                                   "Mean time per output token of a request.", BETWEEN_TOKENS)
        self.whole = Histogram("e2e_request_latency_seconds", "Time of a whole request.", WHOLE_REQUEST)
        self.decode = Histogram("request_decode_time_seconds", "Time from the first token to the last.", WHOLE_REQUEST)
        self.queue = Histogram("request_queue_time_seconds", "Time until a request is first scheduled.", WHOLE_REQUEST)
        self.prefill = Histogram("request_prefill_time_seconds", "Time from there to the first token.", WHOLE_REQUEST)
        self.inference = Histogram("request_inference_time_seconds", "Time from there to the last one.", WHOLE_REQUEST)
        self.prompt_tokens = Histogram("request_prompt_tokens", "Prompt tokens of a request.", TOKENS)
        self.output_tokens = Histogram("request_generation_tokens", "Output tokens of a request.", TOKENS)
        self.longest = Histogram("request_max_num_generation_tokens", "Output tokens of the longest sample.", TOKENS)
        self.max_tokens = Histogram("request_params_max_tokens", "max_tokens of a request.", TOKENS)
        self.num_samples = Histogram("request_params_n", "Samples of a request.", SAMPLES)
        self.computed = Histogram("request_prefill_kv_computed_tokens",
                                  "Prompt tokens of a request that the prefix cache did not provide.", TOKENS)
        self.ends: Counter[str] = Counter()
        self.refused: Counter[int] = Counter({400: 0, 429: 0})  # by status; rates need a first value
        self.num_preemptions = 0

    def timer(self, request_id: str, prompt_len: int, params: SamplingParams) -> RequestTimer:
        return RequestTimer(self, request_id, prompt_len, params)

    def count_refused(self, status: int) -> None:
        self.refused[status] += 1

    def text(self, engine: Engine | None, num_restarts: int) -> str:
        lines = ["# HELP process_start_time_seconds When the server began, in seconds since 1970.",
                 "# TYPE process_start_time_seconds gauge", f"process_start_time_seconds {self._began:.2f}"]
        for histogram in (self.first_token, self.between, self.per_token, self.whole, self.queue, self.prefill,
                          self.decode, self.inference, self.prompt_tokens, self.output_tokens, self.longest,
                          self.max_tokens, self.num_samples, self.computed):
            lines += histogram.lines(self._labels)
        lines += self._counter("request_success", "Requests that ended, by reason.",
                               {f'finished_reason="{reason}"': count for reason, count in self.ends.items()})
        lines += self._counter("num_preemptions", "Preemptions of requests.", {"": self.num_preemptions})
        lines += self._counter("requests_refused", "Requests that were answered with an error, by its status.",
                               {f'status="{status}"': count for status, count in self.refused.items()})
        lines += self._counter("engine_restarts", "Times the engine failed and was started again.", {"": num_restarts})
        if engine is not None:
            lines += [*self._state_lines(engine), *self._step_lines(engine.stats)]
            for report in [*engine.reports.values(), engine.scheduler.cache.stats]:
                lines += self._report_lines(report)
        return "\n".join(lines) + "\n"

    def _state_lines(self, engine: Engine) -> Iterable[str]:
        scheduler, cache = engine.scheduler, engine.scheduler.cache
        yield from self._gauge("num_requests_running", "Samples that run.", scheduler.num_running)
        yield from self._gauge("num_requests_waiting", "Samples that wait.", scheduler.num_waiting)
        num_held_back = scheduler.num_held_back
        yield from self._gauges("num_requests_waiting_by_reason", "Samples that wait, for room or for others' trials.",
                                {'reason="capacity"': scheduler.num_waiting - num_held_back,
                                 'reason="deferred"': num_held_back})
        yield from self._gauges("engine_sleep_state", "1 for the state that the engine is in.",
                                {f'sleep_state="{state}"': int(level == engine.pause.sleep_level)
                                 for level, state in enumerate(SLEEP_STATES)})
        yield from self._gauge("weights_version", "Updates of the weights that were complete.", engine.weights_version)
        settings = {"block_size": min(group.page_tokens for group in cache.groups),
                    "num_gpu_blocks": cache.pool.num_usable, "enable_prefix_caching": cache.enable_prefix_caching}
        info = {"device": _escaped(engine.model.device_name), "max_model_len": engine.limits.max_len,
                "max_drafts": engine.limits.max_drafts}
        yield from self._gauges("engine_info", "What the engine serves with: device, longest context, most drafts.",
                                {",".join(f'{name}="{value}"' for name, value in info.items()): 1})
        yield from self._gauges("cache_config_info", "Settings of the cache: tokens of the smallest page, pages.",
                                {",".join(f'{name}="{value}"' for name, value in settings.items()): 1})
        adapters = engine.keepers.find(AdapterLoads)  # type: ignore[type-abstract]
        if adapters is not None:
            running, waiting = adapters.names_in_use()
            labels = {"max_lora": str(adapters.max_slots), "running_lora_adapters": ",".join(running),
                      "waiting_lora_adapters": ",".join(waiting)}
            yield from self._gauges("lora_requests_info", "Adapters of requests; the value is the time.",
                                    {",".join(f'{name}="{_escaped(value)}"' for name, value in labels.items()):
                                     time.time()})
        yield from self._gauge("kv_cache_usage_perc", "Share of the pages in use, 0 to 1.", cache.usage())
        yield from self._gauges("kv_cache_group_usage_perc", "Share of the pages that requests hold in a group.",
                                {f'group="{i}"': share for i, share in enumerate(cache.usage_by_group())})

    def _step_lines(self, stats: EngineStats) -> Iterable[str]:
        for name, help_text, value in (
            ("prompt_tokens", "Prompt tokens.", stats.num_prompt_tokens),
            ("generation_tokens", "Output tokens.", stats.num_generation_tokens),
            ("prefix_cache_queries", "Prompt tokens that were looked up in the prefix cache.", stats.num_prompt_tokens),
            ("prefix_cache_hits", "Prompt tokens that the prefix cache provided.", stats.num_hit_tokens),
            ("prompt_tokens_cached", "Prompt tokens that the prefix cache provided.", stats.num_hit_tokens),
            ("engine_steps", "Steps of the engine.", stats.num_steps),
            ("spec_decode_num_drafts", "Drafts: of one request in one step.", stats.num_drafts),
            ("spec_decode_num_draft_tokens", "Tokens of drafts.", stats.num_draft_tokens),
            ("spec_decode_num_accepted_tokens", "Tokens of drafts that were accepted.", stats.num_accepted_tokens),
            ("spec_decode_acceptance_losses", "Updates of weights after which no draft was accepted any more.",
             stats.num_acceptance_losses),
        ):
            yield from self._counter(name, help_text, {"": value})
        yield from self._counter("prompt_tokens_by_source", "Prompt tokens of scheduled requests, by their source.",
                                 {'source="local_compute"': stats.num_computed_prompt_tokens,
                                  'source="local_cache_hit"': stats.num_hit_tokens})
        steps = Histogram("iteration_tokens_total", "Tokens of a step, of prompts and drafts too.", STEP_TOKENS)
        for index, count in enumerate(list(stats.steps_by_tokens)):
            steps.counts[index] = count
        steps.sum = stats.num_step_tokens
        yield from steps.lines(self._labels)
        yield from self._counter("spec_decode_num_accepted_tokens_per_pos", "Accepted tokens of drafts, by position.",
                                 _numbered("position", stats.accepted_per_position))
        yield from self._counter("spec_decode_num_draft_tokens_per_pos", "Tokens of drafts, by position.",
                                 _numbered("position", stats.drafted_per_position))
        yield from self._counter("spec_decode_chosen_drafts", "How often so many drafts were chosen for a request.",
                                 _numbered("num_drafts", stats.chosen))
        yield from self._counter("spec_decode_drafter_faults", "Times a drafter raised or returned something wrong.",
                                 {f'drafter="{_escaped(drafter)}",kind="{kind.value}"': count
                                  for (drafter, kind), count in list(stats.drafter_faults.items())} or {"": 0})
        yield from self._gauges("spec_decode_drafter_off", "1 for a drafter that was switched off, with the reason.",
                                {f'drafter="{_escaped(drafter)}",reason="{_escaped(reason)}"': 1
                                 for drafter, reason in list(stats.drafters_off)})

    def _report_lines(self, report: ResultPart) -> Iterable[str]:
        """The metric lines of a feature's report."""
        for (name, help_text, is_count), figures in groupby(report.figures(), key=attrgetter(*FIGURE_HEAD)):
            write = self._counter if is_count else self._gauges
            yield from write(name, help_text, {figure.label: figure.value for figure in figures})

    def _counter(self, name: str, help_text: str, values: Mapping[str, float]) -> Iterable[str]:
        yield from _head(f"{name}_total", help_text, "counter")
        for label, value in values.items():
            number = f"{value:.3f}" if isinstance(value, float) else str(value)
            yield f"vllm:{name}_total{{{self._labels}{',' if label else ''}{label}}} {number}"

    def _gauge(self, name: str, help_text: str, value: float) -> Iterable[str]:
        return self._gauges(name, help_text, {"": value})

    def _gauges(self, name: str, help_text: str, values: Mapping[str, float]) -> Iterable[str]:
        yield from _head(name, help_text, "gauge")
        for label, value in values.items():
            yield f"vllm:{name}{{{self._labels}{',' if label else ''}{label}}} {value}"


class RequestTimer:
    """The times of one prompt, from its arrival to the end of its last sample."""

    def __init__(self, metrics: ServerMetrics, request_id: str, prompt_len: int, params: SamplingParams) -> None:
        self._metrics, self._request_id, self._header_id = metrics, request_id, REQUEST_ID.get()
        self._prompt_len, self._max_tokens = prompt_len, params.max_tokens
        self._began = time.perf_counter()
        self._first: float | None = None
        self._last = self._began
        self._num_tokens = [0] * params.n  # by sample
        self._ends: list[str] = []

    def observe(self, increments: Sequence[OutputIncrement]) -> None:
        now, metrics = time.perf_counter(), self._metrics
        if self._first is None:
            self._first = now
            metrics.first_token.observe(now - self._began)
        else:
            metrics.between.observe(now - self._last)
        self._last = now
        for increment in increments:
            self._num_tokens[increment.sample.sample_index] += len(increment.token_ids)
            if increment.end is not None:
                self._ends.append(increment.end.finish_reason or "abort")
                if len(self._ends) == len(self._num_tokens):
                    self._finish(increment.sample.metrics, now - self._first)

    def close(self) -> None:
        """Stop timing: the request is over, finished or not."""
        if len(self._ends) < len(self._num_tokens):
            self._metrics.ends["abort"] += 1
            log_request(request_id=self._request_id, x_request_id=self._header_id, finish_reason="abort",
                        **self._counts())

    def _finish(self, counted: RequestMetrics, decode_seconds: float) -> None:
        metrics, longest = self._metrics, max(self._num_tokens)
        metrics.whole.observe(self._last - self._began)
        metrics.decode.observe(decode_seconds)
        metrics.longest.observe(longest)
        scheduled, first = counted.first_scheduled_time, counted.first_token_time
        if scheduled is not None:
            metrics.queue.observe(scheduled - counted.arrival_time)
            metrics.inference.observe(time.perf_counter() - scheduled)
            if first is not None:
                metrics.prefill.observe(first - scheduled)
        if longest > 1:
            metrics.per_token.observe(decode_seconds / (longest - 1))
        metrics.prompt_tokens.observe(self._prompt_len)
        metrics.output_tokens.observe(sum(self._num_tokens))
        metrics.num_samples.observe(len(self._num_tokens))
        metrics.computed.observe(self._prompt_len - counted.num_cached_tokens)
        if self._max_tokens is not None:
            metrics.max_tokens.observe(self._max_tokens)
        metrics.num_preemptions += counted.num_preemptions
        metrics.ends.update(self._ends)
        log_request(request_id=self._request_id, x_request_id=self._header_id, finish_reason=",".join(self._ends),
                    **self._counts(),
                    cached_tokens=counted.num_cached_tokens, draft_tokens=counted.num_draft_tokens,
                    accepted_tokens=counted.num_accepted_tokens)
        if metrics.tracing is not None:
            metrics.tracing.record(counted, {
                "gen_ai.request.id": self._request_id, "gen_ai.response.model": metrics.model_name,
                "gen_ai.usage.prompt_tokens": self._prompt_len,
                "gen_ai.usage.completion_tokens": sum(self._num_tokens),
                "gen_ai.response.finish_reasons": self._ends, "outrider.cached_tokens": counted.num_cached_tokens,
                "outrider.draft_tokens": counted.num_draft_tokens,
                "outrider.accepted_tokens": counted.num_accepted_tokens})

    def _counts(self) -> dict[str, Any]:
        first = None if self._first is None else round(self._first - self._began, 6)
        return {"prompt_tokens": self._prompt_len, "output_tokens": sum(self._num_tokens), "first_token_seconds": first,
                "seconds": round(time.perf_counter() - self._began, 6)}


def _head(name: str, help_text: str, kind: str) -> Iterable[str]:
    yield f"# HELP vllm:{name} {help_text}"
    yield f"# TYPE vllm:{name} {kind}"


def _numbered(label: str, counts: Sequence[int]) -> dict[str, int]:
    return {f'{label}="{i}"': count for i, count in enumerate(counts)}


def _escaped(value: str) -> str:
    return value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
