"""Metrics that others' routers read: names, types and labels. A router that misses one takes the server for idle.

llm-d (`pkg/epp/server/options.go`) reads the queue, running requests, the share of the cache, the size and number of
blocks, and the adapters in use. Dynamo reads the same gauges, and counters and histograms for its planner and
dashboards."""

from __future__ import annotations

import re
import time
from pathlib import Path

import torch

from outrider.adapters import LoRARequest
from outrider.core.params import SamplingParams
from outrider.llm import LLM
from outrider.replicas.joined_metrics import joined_metrics
from outrider.server.metrics import ServerMetrics
from tests.adapters.folders import write_adapter
from tests.engine.harness import tiny_model
from tests.server.rig import MODEL, serving, tiny_engine

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


def test_routers_find_the_adapters_in_use(tmp_path: Path) -> None:
    """They are the labels of one gauge, as llm-d's scorer of adapters reads them."""
    write_adapter(tmp_path / "sql", tiny_model("llama", torch.float32), 1)
    write_adapter(tmp_path / "law", tiny_model("llama", torch.float32), 2)
    pattern = (r'^vllm:lora_requests_info\{.*max_lora="1",running_lora_adapters="(.*)",waiting_lora_adapters="(.*)"\} '
               r"(\d+)")
    with tiny_engine(enable_lora=True, max_loras=1, max_lora_rank=8) as rig:
        stepped, params = LLM.around(rig.engine).llm_engine, SamplingParams(max_tokens=4, ignore_eos=True)

        def adapters() -> tuple[str, str]:
            page = ServerMetrics(MODEL).text(rig.engine, 0)
            ((running, waiting, seconds),) = re.findall(pattern, page, re.MULTILINE)
            assert abs(int(seconds) - time.time()) < 600
            return running, waiting

        assert adapters() == ("", "")
        for name in ("sql", "law"):
            stepped.add_request(name, "abab", params, lora_request=LoRARequest(name, 1, str(tmp_path / name)))
        assert adapters() == ("", "law,sql")
        stepped.step()
        assert adapters() == ("sql", "law")
        while stepped.has_unfinished_requests():
            stepped.step()
        assert adapters() == ("", "")
