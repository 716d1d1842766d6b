"""Bursts over HTTP on any OpenAI-compatible server: streams that begin at once, medians over several bursts.

    outrider serve bench/configs/llama8b --load-format dummy --max-model-len 4096
    python bench/http_bursts.py http://127.0.0.1:8000 [--streams 16 64] [--bursts 5] [--rounds 1]

Every stream asks `/v1/completions` for `--rounds` answers, one after the other, with new prompts of token ids. A burst
of each size that is not counted comes first. One line of JSON for each size: tokens per second, first token and gap
between events in milliseconds. Raw sockets, and bodies made beforehand, so that the client costs little.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import time
import urllib.request
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit


@dataclass
class Seen:
    """The times that the streams of one burst saw, in seconds."""

    first: list[float] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)
    num_answers: int = 0

    def add(self, sent: float, stamps: list[float]) -> None:
        self.num_answers += 1
        self.first.append(stamps[0] - sent)
        self.gaps += [after - before for before, after in zip(stamps, stamps[1:], strict=False)]


@dataclass(frozen=True)
class Shape:
    num_in: int
    num_out: int
    rounds: int


def request_bytes(model: str, host: str, prompt: list[int], num_out: int) -> bytes:
    body = json.dumps({"model": model, "prompt": prompt, "max_tokens": num_out, "ignore_eos": True, "temperature": 0,
                       "stream": True}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n" \
           f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    return head.encode() + body


async def stream(address: tuple[str, int], requests: list[bytes], seen: Seen) -> None:
    for request in requests:
        sent, stamps = time.perf_counter(), list[float]()
        reader, writer = await asyncio.open_connection(*address, limit=1 << 22)
        writer.write(request)
        status = await reader.readline()
        if b" 200 " not in status:
            raise RuntimeError(f"the server answered {status!r}: {(await reader.read(2000))!r}")
        async for line in reader:
            if line.startswith(b"data: {") and b'"text"' in line:
                stamps.append(time.perf_counter())
        writer.close()
        seen.add(sent, stamps)


def burst(address: tuple[str, int], model: str, streams: int, shape: Shape, source: random.Random) -> dict[str, float]:
    def one() -> bytes:
        return request_bytes(model, address[0], [source.randrange(100, 30000) for _ in range(shape.num_in)],
                             shape.num_out)

    requests, seen = [[one() for _ in range(shape.rounds)] for _ in range(streams)], Seen()

    async def everyone() -> float:
        start = time.perf_counter()
        await asyncio.gather(*(stream(address, own, seen) for own in requests))
        return time.perf_counter() - start

    seconds = asyncio.run(everyone())
    first, gaps = sorted(seen.first), sorted(seen.gaps)

    def at(values: list[float], share: float) -> float:
        return values[min(len(values) - 1, int(share * len(values)))] * 1e3

    return {"tok_s": seen.num_answers * shape.num_out / seconds, "first_p50": at(first, 0.5),
            "first_p99": at(first, 0.99), "gap_p50": at(gaps, 0.5), "gap_p99": at(gaps, 0.99), "gap_max": at(gaps, 1.0)}


def served_model(url: str) -> str:
    with urllib.request.urlopen(f"{url}/v1/models", timeout=30) as answer:
        return str(json.load(answer)["data"][0]["id"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url", help="of the server, without /v1")
    parser.add_argument("--streams", type=int, nargs="+", default=[16, 32, 64, 128, 256, 512])
    parser.add_argument("--bursts", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=1, help="answers of each stream; several make a closed loop")
    parser.add_argument("--tokens-in", type=int, default=512)
    parser.add_argument("--tokens-out", type=int, default=256)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    url, source = args.url.rstrip("/"), random.Random(args.seed)
    parts = urlsplit(url)
    assert parts.hostname is not None and parts.port is not None, f"{url!r} is no http://host:port"
    address, model = (parts.hostname, parts.port), served_model(url)
    for streams in args.streams:
        burst(address, model, streams, Shape(args.tokens_in, 16, 1), source)
        shape = Shape(args.tokens_in, args.tokens_out, args.rounds)
        found = [burst(address, model, streams, shape, source) for _ in range(args.bursts)]
        row: dict[str, Any] = {"streams": streams, "bursts": args.bursts, "rounds": args.rounds}
        row |= {name: round(statistics.median(own[name] for own in found), 1) for name in found[0]}
        row["first_p99_each"] = [round(own["first_p99"]) for own in found]
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
