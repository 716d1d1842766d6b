"""What a server says of itself: metrics, health, the page, the life of its engine."""

from __future__ import annotations

import asyncio
import re
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from outrider import __version__
from outrider.async_llm import AsyncLLM
from outrider.server import restarts
from outrider.server.engine_host import Failed, Loading, Serving
from outrider.server.metrics import Histogram
from outrider.server.settings import ServerConfig
from tests.server.rig import Served, served_fixture, serving, tiny_engine

served = served_fixture(stall_timeout=0.5)


def values(served: Served) -> dict[str, float]:
    lines = [line for line in served.http.get("/metrics").text.splitlines() if not line.startswith("#")]
    assert re.fullmatch(r"process_start_time_seconds \d+\.\d+", lines.pop(0))
    assert all(re.fullmatch(r'vllm:\w+\{model_name="tiny",engine="0"(,\w+="[^"]*")*\} \S+', line) for line in lines)
    found = {re.sub(r'\{model_name="tiny",engine="0",?(.*)\} .*', r"\1", line): float(line.split()[-1])
             for line in lines}
    assert len(found) == len(lines), "a series came twice"
    return found


def test_metrics_count_requests_tokens_and_drafts(served: Served) -> None:
    before = values(served)
    for _ in range(2):
        assert served.post("/v1/completions", prompt="ab" * 20, max_tokens=30, temperature=0).status_code == 200
    served.assert_idle()
    after = values(served)
    assert after["vllm:prompt_tokens_total"] - before.get("vllm:prompt_tokens_total", 0) == 80
    assert after["vllm:generation_tokens_total"] - before.get("vllm:generation_tokens_total", 0) == 60
    assert after["vllm:prefix_cache_hits_total"] > 0
    assert after['vllm:request_success_totalfinished_reason="length"'] == 2
    drafted, accepted = (after[f"vllm:spec_decode_num_{name}_tokens_total"] for name in ("draft", "accepted"))
    assert drafted >= accepted > 0
    per_position = [v for k, v in after.items() if k.startswith("vllm:spec_decode_num_accepted_tokens_per_pos")]
    assert sum(per_position) == accepted
    assert sum(v for k, v in after.items() if k.startswith("vllm:spec_decode_chosen_drafts")) > 0
    for name in ("time_to_first_token_seconds", "e2e_request_latency_seconds", "request_prompt_tokens",
                 "request_queue_time_seconds", "request_prefill_time_seconds", "request_inference_time_seconds",
                 "request_max_num_generation_tokens", "request_params_n", "request_prefill_kv_computed_tokens"):
        assert after[f"vllm:{name}_count"] == after[f'vllm:{name}_bucketle="+Inf"'] == 2
    assert after["vllm:num_requests_running"] == after["vllm:num_requests_waiting"] == 0
    assert [after[f'vllm:num_requests_waiting_by_reasonreason="{why}"'] for why in ("capacity", "deferred")] == [0, 0]
    computed, hit = (after[f'vllm:prompt_tokens_by_source_totalsource="local_{source}"']
                     for source in ("compute", "cache_hit"))
    assert computed + hit == after["vllm:prompt_tokens_total"] and hit == after["vllm:prompt_tokens_cached_total"]
    assert computed == after["vllm:request_prefill_kv_computed_tokens_sum"] and after["vllm:request_params_n_sum"] == 2
    settings = 'block_size="16",num_gpu_blocks="255",enable_prefix_caching="True"'
    assert after[f"vllm:cache_config_info{settings}"] == 1
    num_steps = after["vllm:iteration_tokens_total_count"]
    assert num_steps == after['vllm:iteration_tokens_total_bucketle="+Inf"'] >= after["vllm:engine_steps_total"] > 0
    # Each prompt but its hits, each token but the last ones, and drafts.
    assert after["vllm:iteration_tokens_total_sum"] >= 80 - after["vllm:prefix_cache_hits_total"] + 58
    assert after['vllm:iteration_tokens_total_bucketle="1.0"'] < after['vllm:iteration_tokens_total_bucketle="64.0"']


def test_a_histogram_counts_up_to_its_bounds() -> None:
    histogram = Histogram("x", "X.", (1, 2))
    for value in (0.5, 1, 1.5, 9):
        histogram.observe(value)
    assert [line.split()[-1] for line in histogram.lines("l")][-5:] == ["2", "3", "4", "12.0", "4"]


def test_every_answer_has_a_request_id(served: Served) -> None:
    body = {"prompt": "x", "max_tokens": 2}
    for path, status, more in (("/v1/completions", 200, {}), ("/v1/completions", 200, {"stream": True}),
                               ("/v1/completions", 400, {"temperature": "hot"}), ("/v1/nothing", 404, {})):
        answer = served.http.post(path, json=body | more, headers={"X-Request-Id": "job-17/a"})
        assert (answer.status_code, answer.headers["x-request-id"]) == (status, "job-17/a")
    made = [served.http.get("/health").headers["x-request-id"] for _ in range(2)]
    assert made[0] != made[1] and all(re.fullmatch("[0-9a-f]{32}", own) for own in made)
    assert served.client().models.with_raw_response.list().request_id, "what OpenAI's client reads it by"
    for wrong in ("two words", "x" * 129):
        refused = served.http.post("/v1/completions", json=body, headers={"X-Request-Id": wrong})
        assert refused.status_code == 400 and "X-Request-Id must have from 1 to" in refused.json()["error"]["message"]
        assert re.fullmatch("[0-9a-f]{32}", refused.headers["x-request-id"])


def test_a_surprise_has_a_request_id_too(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    def surprise(name: str | None) -> str:
        raise KeyError("nobody thought of this")

    monkeypatch.setattr(served.service, "check_model", surprise)
    answer = served.http.post("/v1/completions", json={"prompt": "x"}, headers={"X-Request-Id": "odd"})
    assert answer.status_code == 500 and answer.headers["x-request-id"] == "odd"
    assert answer.headers["connection"] == "close", "uvicorn closes it, so no client may send another request on it"


@pytest.mark.parametrize("path", ["/sleep", "/wake_up", "/v1/load_lora_adapter", "/v1/unload_lora_adapter"])
def test_known_routes_that_are_not_served_say_what_to_do(served: Served, path: str) -> None:
    answer = served.http.post(path, json={})
    assert answer.status_code == 404
    assert answer.json()["error"]["message"].startswith(f"{path} is not supported: ")


def test_health_version_and_the_page(served: Served) -> None:
    assert served.http.get("/health").content == b"" and served.http.get("/ready").status_code == 200
    assert served.http.get("/version").json() == {"version": __version__}
    page = served.http.get("/")
    assert page.status_code == 200 and "Outrider" in page.text
    text = re.sub(r'<link rel="icon" href="data:[^"]*">', "", page.text)
    text = text.replace("element.src = url", "")  # an image of the user, of which the policy allows data URLs alone
    assert not re.search(r"""(src|href)\s*=|url\(|https?://""", text), "the page loads something from elsewhere"
    policy = page.headers["content-security-policy"]
    assert "script-src 'sha256-" in policy and "img-src data:;" in policy


def test_health_fails_while_steps_have_stopped(served: Served) -> None:
    inner, may_go_on = served.llm.engine.step, threading.Event()
    served.llm.engine.step = lambda: (may_go_on.wait(), inner())[1]  # type: ignore[method-assign]
    answers: list[int] = []
    client = threading.Thread(target=lambda: answers.append(served.post("/v1/completions", prompt="x").status_code))
    client.start()
    try:
        served.wait_for(lambda: served.http.get("/health").status_code == 503)
        assert "no step" in served.http.get("/health").json()["error"]["message"]
    finally:
        may_go_on.set()
        client.join()
        served.llm.engine.step = inner  # type: ignore[method-assign]
    served.wait_for(lambda: served.http.get("/health").status_code == 200)
    assert answers == [200]


def break_engine(served: Served) -> None:
    served.llm.engine.step = lambda: 1 / 0  # type: ignore[method-assign, assignment, return-value]
    answer = served.post("/v1/completions", prompt="x")
    assert answer.status_code == 503 and "ZeroDivision" not in answer.text


def test_a_failed_engine_is_started_again_and_given_up_in_the_end() -> None:
    with serving(max_restarts=1, stall_timeout=0.4) as served:
        first = served.llm
        break_engine(served)
        served.wait_for(lambda: isinstance(served.host.state, Serving) and served.host.state.llm is not first)
        break_engine(served)
        served.wait_for(lambda: isinstance(served.host.state, Failed))
        assert served.host.num_restarts == 1 and not first.is_running
        assert served.http.get("/health").status_code == 503 and served.http.get("/metrics").status_code == 200
        assert served.error("/v1/completions", 503, prompt="x")["type"] == "ServiceUnavailableError"


def test_an_engine_that_fails_after_an_update_is_not_started_with_older_weights() -> None:
    with serving(max_restarts=3, stall_timeout=0.4) as served:
        served.llm.engine.take_new_weights()
        break_engine(served)
        served.wait_for(lambda: isinstance(served.host.state, Failed))
        assert served.host.num_restarts == 0
        assert "weights that a trainer gave" in served.http.get("/health").json()["error"]["message"]


@pytest.mark.parametrize(("max_restarts", "is_served"), [(3, True), (2, False)])
def test_a_restart_that_fails_is_one_of_the_restarts(max_restarts: int, is_served: bool,
                                                     monkeypatch: pytest.MonkeyPatch) -> None:
    """As where the device's memory is not free yet. A first start that fails ends the server at once."""
    monkeypatch.setattr(restarts, "FIRST_SECONDS", 0.001)
    starts: list[bool] = []

    def start() -> AsyncLLM:
        starts.append(len(starts) in (0, 3))
        if not starts[-1]:
            raise MemoryError("no memory yet")
        return AsyncLLM.around(tiny_engine().engine)

    with serving(start, max_restarts=max_restarts, stall_timeout=0.4) as served:
        break_engine(served)
        served.wait_for(lambda: len(starts) > max_restarts and not isinstance(served.host.state, Loading))
        assert isinstance(served.host.state, Serving if is_served else Failed)
        assert starts == [True, False, False, True][: max_restarts + 1] and served.host.num_restarts == max_restarts


def test_a_worker_that_dies_while_nothing_runs_is_noticed() -> None:
    with serving(stall_timeout=0.4) as served:
        first = served.llm
        served.host._has_worker = lambda llm: llm is not first
        served.wait_for(lambda: isinstance(served.host.state, Serving) and served.host.state.llm is not first)
        assert served.host.num_restarts == 1 and not first.is_running
        assert served.http.get("/health").status_code == 200


def test_requests_may_wait_for_an_engine_that_sleeps() -> None:
    """It is not taken for one that is stalled, however long that takes."""
    with serving(stall_timeout=0.2) as served, ThreadPoolExecutor(1) as pool:
        first = served.llm
        asyncio.run(first.sleep(level=1))
        answer = pool.submit(served.post, "/v1/completions", prompt="x", max_tokens=4)
        served.wait_for(lambda: first.engine.num_requests)
        time.sleep(1.0)
        assert served.llm is first and first.is_running and not answer.done()
        assert served.http.get("/health").status_code == 200
        asyncio.run(first.wake_up())
        assert answer.result().status_code == 200 and served.host.num_restarts == 0


def test_it_answers_while_the_model_loads() -> None:
    may_load = threading.Event()

    def start() -> AsyncLLM:
        may_load.wait()
        return AsyncLLM.around(tiny_engine().engine)

    served = Served(start, ServerConfig())
    try:
        served.wait_for(lambda: served._server.started)
        assert isinstance(served.host.state, Loading)
        assert served.http.get("/health").status_code == 503 and served.http.get("/v1/models").status_code == 200
        answer = served.post("/v1/completions", prompt="x")
        assert answer.status_code == 503 and answer.headers["retry-after"] and "loading" in answer.text
        may_load.set()
        served.wait_for(lambda: served.http.get("/ready").status_code == 200)
    finally:
        may_load.set()
        served.close()
