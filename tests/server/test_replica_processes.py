"""`outrider serve --replicas 2` as processes: a replica is killed under load and started again, and nothing is left."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import openai
import psutil
import pytest

from tests.engine.harness import CONFIGS, byte_tokenizer, save_folder
from tests.server.rig import PATIENCE
from tests.server.test_serve import started

KEY = {"Authorization": "Bearer k"}
pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = save_folder(tmp_path_factory.mktemp("served") / "tiny-bytes", CONFIGS["llama"])
    byte_tokenizer().backend.save(str(path / "tokenizer.json"))
    return path


def wait_until_all_serve(process: subprocess.Popen[str], url: str) -> None:
    end = time.monotonic() + PATIENCE
    while time.monotonic() < end:
        assert process.poll() is None
        answer = httpx.get(f"{url}/health", timeout=PATIENCE)
        if answer.status_code == 200 and answer.json()["status"] == "healthy":
            return
        time.sleep(0.1)
    raise AssertionError("not healthy in time")


def replicas_of(process: subprocess.Popen[str]) -> list[psutil.Process]:
    return [child for child in psutil.Process(process.pid).children() if "spawn_main" in " ".join(child.cmdline())]


def metric(url: str, name: str) -> dict[str, float]:
    text = httpx.get(f"{url}/metrics", headers=KEY, timeout=PATIENCE).text
    return {engine: float(value) for engine, value in
            re.findall(rf'^vllm:{name}\{{[^}}]*engine="(\d)"[^}}]*\}} (\S+)$', text, re.MULTILINE)}


def stream(url: str, i: int) -> str:
    body = {"prompt": f"{i:03} " * 16, "max_tokens": 100, "ignore_eos": True, "stream": True, "temperature": 0}
    with httpx.stream("POST", f"{url}/v1/completions", json=body, headers=KEY, timeout=PATIENCE) as answer:
        text = "".join(answer.iter_text())
        return text if answer.status_code == 200 else f"status {answer.status_code}: {text}"


def test_a_killed_replica_harms_only_streams_that_had_begun_there(folder: Path) -> None:
    process, url = started(folder, "--replicas", "2", "--max-model-len", "200", "--num-pages", "256",
                           "--shutdown-timeout", "10")
    try:
        wait_until_all_serve(process, url)
        victim, other = replicas_of(process)
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="k", max_retries=0, timeout=PATIENCE)
        chunks = client.completions.create(model="tiny-bytes", prompt="hello", max_tokens=5, stream=True)
        assert sum(len(chunk.choices) for chunk in chunks) > 0
        with ThreadPoolExecutor(50) as pool:
            asked = [pool.submit(stream, url, i) for i in range(50)]
            while sum(metric(url, "generation_tokens_total").values()) < 200:
                time.sleep(0.02)
            victim.kill()
            texts = [each.result() for each in asked]
        whole = [text for text in texts if '"finish_reason":"length"' in text]
        cut = [text for text in texts if '"finish_reason":"length"' not in text]
        for text in cut:  # had begun on the replica that died: the client is told
            last = json.loads(text.strip().split("\n\n")[-2].removeprefix("data: "))
            assert "has died" in last["error"]["message"], text[-500:]
        assert len(whole) >= 25 and len(cut) <= 4, "at most two requests run at once on a replica"
        assert other.is_running()
        wait_until_all_serve(process, url)
        assert metric(url, "replica_restarts_total") in ({"0": 1.0, "1": 0.0}, {"0": 0.0, "1": 1.0})
        children = psutil.Process(process.pid).children(recursive=True)
        assert len(children) >= 4, "replicas and their workers"
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE) == 0
        assert not psutil.wait_procs(children, timeout=30)[1]
    finally:
        process.kill()


def test_a_replica_that_hangs_is_replaced_and_nothing_outlives_a_front_that_is_killed(folder: Path) -> None:
    process, url = started(folder, "--replicas", "2", "--stall-timeout", "10")
    try:
        wait_until_all_serve(process, url)
        replicas_of(process)[0].suspend()
        for i in range(4):  # those that reach it wait until it is killed, and go to the other
            body = {"prompt": f"{i} " * 20, "max_tokens": 4}
            answer = httpx.post(f"{url}/v1/completions", json=body, headers=KEY, timeout=PATIENCE)
            assert answer.status_code == 200, answer.text
        while sum(metric(url, "replica_restarts_total").values()) != 1:
            time.sleep(0.1)
        wait_until_all_serve(process, url)
        children = psutil.Process(process.pid).children(recursive=True)
        process.kill()
        assert not psutil.wait_procs(children, timeout=60)[1]
    finally:
        process.kill()


def test_settings_that_no_replica_can_start_with_end_the_front(tmp_path: Path) -> None:
    path = save_folder(tmp_path / "tiny-bytes", CONFIGS["llama"])
    byte_tokenizer().backend.save(str(path / "tokenizer.json"))
    (path / "config.json").write_text(json.dumps(CONFIGS["llama"] | {"surprise": 1}))
    process, _ = started(path, "--replicas", "2")
    assert process.stderr is not None
    left = process.stderr.read()
    assert process.wait(PATIENCE) == 2 and "surprise=1" in left and "Traceback" not in left, left
