"""Metrics that others' routers read: names, types and labels. A router that misses one takes the server for idle.

llm-d (`pkg/epp/server/options.go`) reads the queue, running requests, the share of the
cache, and the size and number of blocks; its metric of adapters is for adapters, which are not served. Dynamo reads the
same gauges, and counters and histograms for its planner and dashboards."""

from __future__ import annotations

import re

from outrider.replicas.joined_metrics import joined_metrics
from tests.server.rig import MODEL, serving

GAUGES = ("num_requests_waiting", "num_requests_running", "kv_cache_usage_perc", "cache_config_info")
COUNTERS = ("request_success", "num_preemptions", "prompt_tokens", "generation_tokens", "prefix_cache_queries",
            "prefix_cache_hits", "spec_decode_num_drafts", "spec_decode_num_draft_tokens",
            "spec_decode_num_accepted_tokens")
HISTOGRAMS = ("time_to_first_token_seconds", "inter_token_latency_seconds", "request_time_per_output_token_seconds",
              "e2e_request_latency_seconds", "request_queue_time_seconds", "request_prefill_time_seconds",
              "request_decode_time_seconds", "request_inference_time_seconds", "request_prompt_tokens",
              "request_generation_tokens", "request_max_num_generation_tokens", "iteration_tokens_total")
LABELS = f'model_name="{MODEL}",engine="0"'


def test_routers_find_the_metrics_that_they_read() -> None:
    with serving() as served:
        assert served.post("/v1/completions", prompt="abab" * 8, max_tokens=20, temperature=0).status_code == 200
        served.assert_idle()
        page = served.http.get("/metrics").text
    types = dict(re.findall(r"^# TYPE vllm:(\S+) (\w+)$", page, re.MULTILINE))
    for name in GAUGES:
        assert types[name] == "gauge" and f"\nvllm:{name}{{{LABELS}" in page
    for name in COUNTERS:  # a family of Prometheus' text form has its name with or without the ending
        assert types.get(f"{name}_total", types.get(name)) == "counter" and f"\nvllm:{name}_total{{{LABELS}" in page
    for name in HISTOGRAMS:
        assert types[name] == "histogram"
        for part in (f"bucket{{{LABELS},le=\"+Inf\"", f"sum{{{LABELS}", f"count{{{LABELS}"):
            assert f"\nvllm:{name}_{part}" in page
    (settings,) = re.findall(r"^vllm:cache_config_info\{(.*)\} 1$", page, re.MULTILINE)
    found = dict(re.findall(r'(\w+)="([^"]*)"', settings))
    assert int(found["block_size"]) == 16 and int(found["num_gpu_blocks"]) == 255
    (share,) = re.findall(r"^vllm:kv_cache_usage_perc\{.*\} (\S+)$", page, re.MULTILINE)
    assert 0 <= float(share) <= 1, "routers compare it with thresholds below one"
    joined = joined_metrics({0: page, 1: page}, {0: 0, 1: 0})
    for name in (*GAUGES, *(f"{name}_total" for name in COUNTERS)):
        assert {f'engine="{i}"' for i in (0, 1)} <= set(re.findall(rf'^vllm:{name}\{{.*?(engine="\d")', joined,
                                                                  re.MULTILINE)), name
