"""`outrider.ray:app` on a cluster of two nodes that are processes of this machine."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import psutil
import pytest

from tests.engine.harness import CONFIGS, byte_tokenizer, save_folder
from tests.server.rig import PATIENCE

pytestmark = pytest.mark.long
ray = pytest.importorskip("ray")
SETTINGS: dict[str, Any] = {"device": "cpu", "dtype": "float32", "num_pages": 256, "max_model_len": 200,
                            "max_num_seqs": 4, "admin": True}
STORE_BYTES = 80 << 20


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = save_folder(tmp_path_factory.mktemp("served") / "tiny-bytes", CONFIGS["llama"])
    byte_tokenizer().backend.save(str(path / "tokenizer.json"))
    return path


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    from ray import serve
    from ray.cluster_utils import Cluster

    # Processes that Ray starts import the package from where this one has it.
    os.environ["PYTHONPATH"] = str(Path(__file__).parents[2])
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 3, "object_store_memory": STORE_BYTES,
                                                            "include_dashboard": False})
    cluster.add_node(num_cpus=3, object_store_memory=STORE_BYTES)
    ray.init(address=cluster.address, log_to_driver=False)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    serve.start(http_options={"host": "127.0.0.1", "port": port}, proxy_location="HeadOnly")
    yield f"http://127.0.0.1:{port}"
    serve.shutdown()
    ray.shutdown()
    cluster.shutdown()


def deploy(folder: Path, **settings: Any) -> None:
    from ray import serve

    from outrider.ray import app

    serve.run(app({"model": str(folder), **SETTINGS, **settings}), name="outrider", route_prefix="/")


def wait_for(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.1)


def num_running() -> int:
    from ray import serve

    states = serve.status().applications["outrider"].deployments["Engine"].replica_states
    return int(states.get("RUNNING", 0))


def engine_processes() -> list[psutil.Process]:
    """The actors of replicas."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        if re.search(r"ServeReplica:outrider:Engine", " ".join(process.info["cmdline"] or [])):
            found.append(process)
    return found


def num_ended(metrics: str) -> Counter[str]:
    """Requests that have ended, by replica."""
    ended: Counter[str] = Counter()
    for engine, count in re.findall(r'^vllm:request_success_total\{.*engine="(\d)".*\} (\d+)$', metrics, re.MULTILINE):
        ended[engine] += int(count)
    return ended


def complete(url: str, prompt: str, **more: Any) -> dict[str, Any]:
    answer = httpx.post(f"{url}/v1/completions", json={"prompt": prompt, "max_tokens": 4, **more}, timeout=PATIENCE)
    assert answer.status_code == 200, answer.text
    return answer.json()


def stream(url: str, i: int) -> str:
    body = {"prompt": f"{i:03} " * 16, "max_tokens": 100, "ignore_eos": True, "stream": True, "temperature": 0}
    with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=PATIENCE) as answer:
        return f"{answer.status_code}\n\n" + "".join(answer.iter_text())


def test_replicas_on_ray_route_by_prefix_and_outlive_a_death(url: str, folder: Path) -> None:
    deploy(folder, replicas=2)
    wait_for(lambda: num_running() == 2)
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=PATIENCE)
    chunks = list(client.completions.create(model="tiny-bytes", prompt="hello", max_tokens=5, stream=True))
    assert len(chunks) >= 2 and chunks[-1].choices[0].finish_reason in ("length", "stop")
    assert httpx.post(f"{url}/v1/completions", json={"promt": "x"}, timeout=PATIENCE).status_code == 400

    # Eight groups of prompts with 96 common tokens: one replica would provide them to all but the first of each group.
    starts = [f"{group} shares a beginning, ".ljust(96, str(group)) for group in range(8)]
    asked = [f"{start}end {i}" for i in range(10) for start in starts]
    with ThreadPoolExecutor(4) as pool:
        first = list(pool.map(lambda text: complete(url, text), asked[:8]))
        later = list(pool.map(lambda text: complete(url, text), asked[8:]))
    assert len(first) == 8
    hits = sum(answer["usage"]["prompt_tokens_details"]["cached_tokens"] for answer in later)
    assert hits >= 0.9 * 96 * 72

    metrics = httpx.get(f"{url}/metrics", timeout=PATIENCE).text
    assert set(re.findall(r'^vllm:num_requests_running\{.*engine="(\d)".*\} 0$', metrics, re.MULTILINE)) == {"0", "1"}
    assert sum(num_ended(metrics).values()) == 81

    def both_serve() -> bool:
        # On a busy machine Ray may find a replica too slow to be asked for a while.
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(lambda i: complete(url, f"{i} is new at {time.monotonic()} " * 4), range(8)))
        ended = num_ended(httpx.get(f"{url}/metrics", timeout=PATIENCE).text)
        return len(ended) == 2 and min(ended.values()) > 0

    wait_for(both_serve)
    assert httpx.post(f"{url}/reset_prefix_cache", timeout=PATIENCE).json() == {"success": True}
    victims = engine_processes()
    assert len(victims) == 2
    with ThreadPoolExecutor(50) as pool:
        streams = [pool.submit(stream, url, i) for i in range(50)]
        wait_for(lambda: sum(each.done() for each in streams) >= 3)
        victims[0].send_signal(signal.SIGKILL)
        texts = [each.result() for each in streams]
    whole = [text for text in texts if '"finish_reason":"length"' in text]
    for text in texts:
        if text not in whole:  # it had begun on the replica that died: the client is told
            last = json.loads(text.strip().split("\n\n")[-2].removeprefix("data: "))
            assert "has died" in last["error"]["message"], text[-500:]
    assert len(whole) >= 25
    wait_for(lambda: num_running() == 2)
    assert complete(url, "and on")["choices"]


def test_a_client_that_leaves_ends_its_request(url: str, folder: Path) -> None:
    deploy(folder, replicas=1)
    wait_for(lambda: num_running() == 1)
    body = {"prompt": "x", "max_tokens": 190, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=PATIENCE) as answer:
        next(answer.iter_text())

    def is_aborted() -> bool:
        metrics = httpx.get(f"{url}/metrics", timeout=PATIENCE).text
        return 'finished_reason="abort"} 1' in metrics and " 0\n" in metrics.split("num_requests_running{")[1]

    wait_for(is_aborted)


def test_replicas_scale_with_the_load_and_back(url: str, folder: Path) -> None:
    deploy(folder, replicas=1, max_replicas=2, target_ongoing_requests=2, upscale_delay_s=1, downscale_delay_s=2)
    wait_for(lambda: num_running() == 1)
    with ThreadPoolExecutor(12) as pool:
        is_over = False

        def ask_on(i: int) -> None:
            while not is_over:
                complete(url, f"{i} " * 20, max_tokens=100, ignore_eos=True)

        asking = [pool.submit(ask_on, i) for i in range(12)]
        try:
            wait_for(lambda: num_running() == 2)
        finally:
            is_over = True
        for each in asking:
            each.result()
    wait_for(lambda: num_running() == 1)
