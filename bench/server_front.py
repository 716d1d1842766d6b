"""Measures what HTTP costs: a server whose engine does next to nothing, and a model's streams beside offline ones.

    python bench/server_front.py [--streams 32] [--tokens 200] [--model smollm2]

First the server runs in this process and readers in another one; an event is one token of one stream. With a model,
`outrider serve` then runs in a process of its own, and rounds of `--batch` streams take turns with the same requests to
an `LLM` in this process, by the clock on the wall. Each part prints a line of JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import random
import socket
import statistics
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from types import SimpleNamespace
from typing import Any

import uvicorn

from outrider.async_llm import AsyncLLM
from outrider.core.checked_request import CheckedRequest
from outrider.core.outputs import OutputIncrement, RequestMetrics, SampleEnd, SampleKey
from outrider.core.params import SamplingParams
from outrider.engine.pause import Pause
from outrider.engine.stats import EngineStats
from outrider.server.app import build_app
from outrider.server.engine_host import EngineHost, Serving
from outrider.server.service import Service
from outrider.server.settings import ServerConfig


class FakeEngine:
    """Every step adds one token to every request."""

    is_forked = False

    def __init__(self) -> None:
        self.stats = EngineStats()
        self.limits = SimpleNamespace(max_requests=1024, max_len=1 << 20, vocab_size=1000)
        self.model = SimpleNamespace(name="fake", limits=self.limits, tokenizer=None)
        no_features = SimpleNamespace(start_check=lambda *_: None)
        self.checks = SimpleNamespace(features=no_features, check_all=self._check_all)
        self.runner = SimpleNamespace(close=lambda: None)
        self.pause = Pause()
        self._live: dict[str, list[Any]] = {}  # key, tokens that are left

    @property
    def has_work(self) -> bool:
        return bool(self._live)

    has_requests = has_work

    def check_running(self) -> None: ...

    def idle(self, quiet_seconds: float) -> float | None:
        return None

    @staticmethod
    def _check_all(prompts: list[Any], params: list[SamplingParams], *_: Any) -> list[CheckedRequest]:
        return [CheckedRequest(tuple(prompt["prompt_token_ids"]), own)
                for prompt, own in zip(prompts, params, strict=True)]

    def add(self, requests: dict[str, CheckedRequest]) -> None:
        for request_id, request in requests.items():
            self._live[request_id] = [SampleKey(request_id, 0, 0, RequestMetrics()), request.sampling.max_tokens]

    def abort(self, request_id: str) -> None:
        self._live.pop(request_id, None)

    def is_live(self, request_id: str) -> bool:
        return request_id in self._live

    def step(self) -> list[OutputIncrement]:
        time.sleep(0.002)  # a device's
        self.stats.num_steps += 1
        increments = []
        for request_id, entry in list(self._live.items()):
            entry[1] -= 1
            end = SampleEnd("length") if not entry[1] else None
            increments.append(OutputIncrement(entry[0], [7], " word", end=end))
            if end:
                del self._live[request_id]
        return increments

    def close(self) -> None: ...


def read_streams(port: int, prompts: list[list[int]], num_tokens: int, done: Any) -> None:
    """Reads everything and counts events; raw sockets, so that the reader costs little."""

    async def one(prompt: list[int]) -> int:
        body = json.dumps({"prompt": prompt, "max_tokens": num_tokens, "stream": True, "temperature": 0,
                           "ignore_eos": True}).encode()
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: "
                     + str(len(body)).encode() + b"\r\nContent-Type: application/json\r\n\r\n" + body)
        count = 0
        while data := await reader.read(1 << 16):
            count += data.count(b'"text":')
            if b"[DONE]" in data:
                break
        writer.close()
        assert count, "no event came"
        return count

    async def everyone() -> int:
        return sum(await asyncio.gather(*map(one, prompts)))

    began = time.perf_counter()
    done.put((asyncio.run(everyone()), time.perf_counter() - began))


def timed_streams(port: int, prompts: list[list[int]], num_tokens: int) -> tuple[int, float]:
    """Events and seconds of streams whose readers are in a process of their own."""
    context = multiprocessing.get_context("spawn")
    done = context.Queue()
    reader = context.Process(target=read_streams, args=(port, prompts, num_tokens, done))
    reader.start()
    while done.empty() and reader.is_alive():
        time.sleep(0.01)
    if done.empty():
        raise RuntimeError("the reader of the streams has ended without a count: see its error above")
    events, seconds = done.get()
    reader.join()
    return events, seconds


def measure_front(num_streams: int, num_tokens: int) -> dict[str, Any]:
    host = EngineHost(lambda: AsyncLLM.around(FakeEngine()))  # type: ignore[arg-type]
    server = uvicorn.Server(uvicorn.Config(build_app(Service(host, ServerConfig(), ("fake",))), log_level="warning"))
    own = socket.create_server(("127.0.0.1", 0))
    thread = threading.Thread(target=lambda: server.run(sockets=[own]), daemon=True)
    thread.start()
    while not isinstance(host.state, Serving):
        time.sleep(0.01)
    for _ in range(2):  # the first round warms up
        before = time.process_time()
        events, seconds = timed_streams(own.getsockname()[1], [[1, 2, 3]] * num_streams, num_tokens)
        cpu = time.process_time() - before
    server.should_exit = True
    thread.join()
    host.close()
    return {"streams": num_streams, "events": events, "events_per_second": round(events / seconds),
            "cpu_microseconds_per_event": round(cpu / events * 1e6, 1), "events_per_cpu_second": round(events / cpu)}


def measure_beside_offline(model: str, batch: int, prompt_len: int, num_tokens: int, rounds: int) -> dict[str, Any]:
    from outrider.llm import LLM

    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    settings = ["--max-num-seqs", str(batch), "--no-enable-prefix-caching", "--speculative-config", "none", "--port",
                str(port)]
    server = subprocess.Popen([sys.executable, "-m", "outrider.cli", "serve", model, *settings],
                              stderr=subprocess.DEVNULL)
    offline, served = [], []
    source = random.Random(0)
    try:
        with LLM(model, max_num_seqs=batch, enable_prefix_caching=False, speculative_config=None) as llm:
            params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
            while not is_ready(port):
                assert server.poll() is None, "the server has ended"
                time.sleep(0.1)
            for _ in range(1 + rounds):
                prompts = [[source.randrange(100, 1000) for _ in range(prompt_len)] for _ in range(batch)]
                served.append(timed_streams(port, prompts, num_tokens)[1])
                began = time.perf_counter()
                llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
                offline.append(time.perf_counter() - began)
    finally:
        server.terminate()
        server.wait()
    total = batch * num_tokens
    ratios = [own / other for own, other in zip(offline[1:], served[1:], strict=True)]  # the first round warms up
    return {"model": model, "batch": batch, "in": prompt_len, "out": num_tokens,
            "offline_tok_s": round(total / statistics.median(offline[1:]), 1),
            "served_tok_s": round(total / statistics.median(served[1:]), 1),
            "of_offline": round(statistics.median(ratios), 3), "of_offline_each_round": [round(r, 3) for r in ratios]}


def is_ready(port: int) -> bool:
    try:
        return urllib.request.urlopen(f"http://127.0.0.1:{port}/ready", timeout=5).status == 200
    except (urllib.error.URLError, OSError):
        return False


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--model", help="also measured, over HTTP and offline")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--model-tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    print(json.dumps(measure_front(args.streams, args.tokens)), flush=True)
    if args.model is not None:
        print(json.dumps(measure_beside_offline(args.model, args.batch, 16, args.model_tokens, args.rounds)))


if __name__ == "__main__":
    main()
