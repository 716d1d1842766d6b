"""The results of `LLM.get_metrics`: vLLM's metric types, filled with values of a running engine. No torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import accumulate

from outrider.engine.engine import Engine
from outrider.engine.stats import STEP_TOKENS


@dataclass
class Metric:
    name: str
    labels: dict[str, str] = field(default_factory=dict)


@dataclass
class CounterMetric(Metric):
    value: int = 0


@dataclass
class VectorMetric(Metric):
    values: list[int] = field(default_factory=list)


@dataclass
class GaugeMetric(Metric):
    value: float = 0.0


@dataclass
class HistogramMetric(Metric):
    count: int = 0
    sum: float = 0.0
    buckets: dict[str, int] = field(default_factory=dict)  # observations up to each bound


def engine_metrics(engine: Engine, model_name: str) -> list[Metric]:
    stats, scheduler = engine.stats, engine.scheduler
    labels = {"model_name": model_name, "engine": "0"}
    gauges = {
        "num_requests_running": scheduler.num_running,
        "num_requests_waiting": scheduler.num_waiting,
        "kv_cache_usage_perc": scheduler.cache.usage(),
    }
    counters = {
        "prompt_tokens": stats.num_prompt_tokens,
        "generation_tokens": stats.num_generation_tokens,
        "prefix_cache_queries": stats.num_prompt_tokens,
        "prefix_cache_hits": stats.num_hit_tokens,
        "spec_decode_num_drafts": stats.num_drafts,
        "spec_decode_num_draft_tokens": stats.num_draft_tokens,
        "spec_decode_num_accepted_tokens": stats.num_accepted_tokens,
    }
    most = engine.limits.max_drafts
    accepted = (stats.accepted_per_position + [0] * most)[:most]
    steps = list(accumulate(stats.steps_by_tokens + [0] * (len(STEP_TOKENS) + 1 - len(stats.steps_by_tokens))))
    bounds = [*map(str, STEP_TOKENS), "+Inf"]
    return [
        *(GaugeMetric(f"vllm:{name}", dict(labels), value) for name, value in gauges.items()),
        *(CounterMetric(f"vllm:{name}", dict(labels), number) for name, number in counters.items()),
        VectorMetric("vllm:spec_decode_num_accepted_tokens_per_pos", dict(labels), accepted),
        HistogramMetric("vllm:iteration_tokens_total", dict(labels), steps[-1], stats.num_step_tokens,
                  dict(zip(bounds, steps, strict=True))),
    ]
