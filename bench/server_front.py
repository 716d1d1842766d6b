"""CPU time of the HTTP front per streamed event, with an engine that costs next to nothing.

    python bench/server_front.py [--streams 32] [--tokens 200]

The server runs in this process and readers in another one; an event is one token of one stream. The last line is JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import socket
import threading
import time
from types import SimpleNamespace
from typing import Any

import uvicorn

from outrider.core.outputs import OutputIncrement, RequestMetrics, SampleEnd, SampleKey
from outrider.core.params import SamplingParams
from outrider.engine.async_llm import AsyncLLM
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
        self.tokenizer = None
        self.checks = SimpleNamespace(check=lambda *args, **options: None)
        self.runner = SimpleNamespace(close=lambda: None)
        self._live: dict[str, list[Any]] = {}  # key, tokens that are left

    @property
    def has_work(self) -> bool:
        return bool(self._live)

    has_requests = has_work

    def check_running(self) -> None: ...

    def add(self, request_id: str, prompt: list[int], params: SamplingParams, **options: Any) -> None:
        self._live[request_id] = [SampleKey(request_id, 0, 0, RequestMetrics()), params.max_tokens]

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


def read_streams(port: int, num_streams: int, num_tokens: int, done: Any) -> None:
    """Reads everything and counts events; raw sockets, so that the reader costs little."""
    body = json.dumps({"prompt": [1, 2, 3], "max_tokens": num_tokens, "stream": True}).encode()

    async def one() -> int:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: "
                     + str(len(body)).encode() + b"\r\n\r\n" + body)
        count = 0
        while data := await reader.read(1 << 16):
            count += data.count(b'"text":')
            if b"[DONE]" in data:
                break
        writer.close()
        return count

    async def everyone() -> int:
        return sum(await asyncio.gather(*(one() for _ in range(num_streams))))

    began = time.perf_counter()
    done.put((asyncio.run(everyone()), time.perf_counter() - began))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=200)
    args = parser.parse_args()
    host = EngineHost(lambda: AsyncLLM.around(FakeEngine()))  # type: ignore[arg-type]
    server = uvicorn.Server(uvicorn.Config(build_app(Service(host, ServerConfig(), ("fake",))), log_level="warning"))
    own = socket.create_server(("127.0.0.1", 0))
    thread = threading.Thread(target=lambda: server.run(sockets=[own]), daemon=True)
    thread.start()
    while not isinstance(host.state, Serving):
        time.sleep(0.01)
    context = multiprocessing.get_context("spawn")
    done = context.Queue()
    for _ in range(2):  # the first round warms up
        reader = context.Process(target=read_streams, args=(own.getsockname()[1], args.streams, args.tokens, done))
        reader.start()
        before = time.process_time()
        events, seconds = done.get()
        cpu = time.process_time() - before
        reader.join()
    print(json.dumps({"streams": args.streams, "events": events, "events_per_second": round(events / seconds),
                      "cpu_microseconds_per_event": round(cpu / events * 1e6, 1),
                      "events_per_cpu_second": round(events / cpu)}))
    server.should_exit = True
    thread.join()
    host.close()


if __name__ == "__main__":
    main()
