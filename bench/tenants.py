"""One key of a server attacks, another one asks for five tokens: how much later its first token comes.

    python bench/tenants.py smollm2 --max-model-len 4096        # every further flag is the server's own
    python bench/tenants.py smollm2 --attacks tools priority --clients 8

Starts `outrider serve` with two keys. The victim's streams run one after the other, at first alone and then during each
attack, whose clients send their next request when they have the answer to the last. One line of JSON for each attack:
milliseconds to the first token (median, 90th percentile, most) and to the answer of /health, the statuses that the
attackers saw, and megabytes of the server's process before, at most and at the end.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing import get_context
from multiprocessing.queues import Queue
from typing import Any

Address = tuple[str, int]
VICTIM, ATTACKER = "victim-key", "attacker-key"
SETTLE_SECONDS = 3.0  # between an attack and what is measured after it


def chat(**fields: Any) -> tuple[str, bytes]:
    return "/v1/chat/completions", json.dumps({"messages": [{"role": "user", "content": "x"}], "max_tokens": 1}
                                              | fields).encode()


def tool(index: int) -> dict[str, Any]:
    return {"type": "function", "function": {"name": f"f{index}"}}


def parts(num: int) -> list[dict[str, str]]:
    return [{"type": "text", "text": ""}] * num


def response(num: int) -> tuple[str, bytes]:
    item = {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": ""}] * num}
    return "/v1/responses", json.dumps({"input": [item, {"role": "user", "content": "x"}], "max_output_tokens": 1}
                                       ).encode()


BUSY = {"prompt": "x y z", "max_tokens": 1000, "ignore_eos": True, "priority": -1000, "stream": True}
# By name: the route and the body that is sent again and again.
ATTACKS: dict[str, Callable[[], tuple[str, bytes]]] = {
    "priority": lambda: ("/v1/completions", json.dumps(BUSY).encode()),
    "tools": lambda: chat(tools=[tool(i) for i in range(200_000)], tool_choice="none"),
    "accepted tools": lambda: chat(tools=[tool(i) for i in range(1000)], tool_choice="none"),
    "parts": lambda: chat(messages=[{"role": "user", "content": parts(400_000)}]),
    "accepted parts": lambda: chat(messages=[{"role": "user", "content": parts(30_000)}]),
    "metadata": lambda: ("/v1/responses", b'{"input":"x","metadata":{"a":[' + b"[]," * 4_000_000 + b"[]]}}"),
    "ids": lambda: ("/detokenize", b'{"tokens":[' + b"1," * 5_000_000 + b"1]}"),
    "prompt ids": lambda: ("/v1/completions", b'{"prompt":[' + b"1," * 2_000_000 + b"1]}"),
    "biases": lambda: ("/v1/completions", json.dumps({"prompt": "x", "logit_bias": {str(i): 1 for i in range(900_000)}}
                                                     ).encode()),
    "text": lambda: ("/v1/completions", json.dumps({"prompt": "a\n" * 5_000_000}).encode()),
    "broken": lambda: ("/v1/completions", b'{"prompt":[' + b'"a",' * 3_000_000),
    "chats": lambda: chat(),
    "samples": lambda: ("/v1/completions", json.dumps({"prompt": ["x"] * 256, "n": 128, "max_tokens": 1}).encode()),
    "words": lambda: ("/v1/completions", json.dumps({"prompt": "x", "max_tokens": 1, "stop": [
        f"stop {i}" for i in range(64)], "bad_words": [f"some word {i}" for i in range(800)]}).encode()),
    "allowed ids": lambda: ("/v1/completions", json.dumps({
        "prompt": "x", "max_tokens": 4, "allowed_token_ids": list(range(40_000)),
        "logit_bias": {str(i): 1 for i in range(4096)}}).encode()),
    "accepted ids": lambda: ("/detokenize", b'{"tokens":[' + b"3000," * 65_535 + b"1]}"),
    "accepted text": lambda: ("/tokenize", json.dumps({"prompt": "a b " * 100_000}).encode()),
    "lists of ids": lambda: ("/v1/completions", b'{"max_tokens":1,"prompt":[' + b",".join(
        [b"[" + b"1," * 8000 + b"1]"] * 256) + b"]}"),
    "too large": lambda: ("/v1/completions", b'{"prompt":"' + b"a" * 20_000_000 + b'"}'),
}


@dataclass
class Seen:
    first: list[float] = field(default_factory=list)  # seconds
    health: list[float] = field(default_factory=list)
    statuses: Counter[int] = field(default_factory=Counter)

    def row(self) -> dict[str, Any]:
        ms = sorted(1000 * seconds for seconds in self.first)
        return {"first_token_ms": [round(statistics.median(ms), 1), round(ms[int(0.9 * (len(ms) - 1))], 1),
                                   round(ms[-1], 1)],
                "health_ms": round(1000 * max(self.health), 1), "statuses": dict(self.statuses)}


async def ask(address: Address, path: str, body: bytes | None, key: str) -> tuple[int, float, bytes]:
    """Status, seconds to the first piece of the answer's body, and the answer."""
    began = time.perf_counter()
    reader, writer = await asyncio.open_connection(*address, limit=1 << 22)
    try:
        method = "GET" if body is None else "POST"
        head = (f"{method} {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nAuthorization: Bearer {key}"
                f"\r\nContent-Type: application/json\r\nContent-Length: {len(body or b'')}\r\n\r\n")
        writer.write(head.encode() + (body or b""))
        answer = await reader.readuntil(b"\r\n\r\n")
        status = int(answer.split(maxsplit=2)[1])
        rest = await reader.read(1)
        seconds = time.perf_counter() - began
        rest += await reader.read(-1)
    finally:
        writer.close()
    return status, seconds, rest


class Server:
    """`outrider serve` with two keys, until the block ends."""

    def __init__(self, flags: list[str]) -> None:
        command = [sys.executable, "-m", "outrider.cli", "serve", *flags, "--port", "0", "--api-key", VICTIM,
                   "--api-key", ATTACKER]
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        assert self.process.stderr is not None
        text = ""
        while (found := re.search(r" at http://([\d.]+):(\d+)", text)) is None:
            line = self.process.stderr.readline()
            assert line, text
            text += line
        self.address = found[1], int(found[2])
        threading.Thread(target=self.process.stderr.read, daemon=True).start()  # or the server waits to write its log

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *exc: object) -> None:
        self.process.send_signal(signal.SIGTERM)
        self.process.wait()

    @property
    def megabytes(self) -> float:
        with open(f"/proc/{self.process.pid}/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGESIZE") / 1e6

    async def wait_ready(self) -> None:
        while (await ask(self.address, "/health", None, VICTIM))[0] != 200:
            await asyncio.sleep(0.2)


async def ask_victim(server: Server, num: int) -> Seen:
    """The victim's requests, one after the other. Each has a prompt of its own."""
    seen = Seen()
    for index in range(num):
        prompt = f"{time.perf_counter()} {index}"
        body = json.dumps({"prompt": prompt, "max_tokens": 5, "ignore_eos": True, "stream": True}).encode()
        status, seconds, _ = await ask(server.address, "/v1/completions", body, VICTIM)
        assert status == 200, status
        seen.first.append(seconds)
        seen.health.append((await ask(server.address, "/health", None, VICTIM))[1])
    return seen


def send_for_ever(address: Address, path: str, body: bytes, num_clients: int, statuses: Queue[int]) -> None:
    """The attackers, in a process of their own: what it costs to send must not delay the victim."""

    async def client() -> None:
        while True:
            try:
                statuses.put((await ask(address, path, body, ATTACKER))[0])
            except (ConnectionError, asyncio.IncompleteReadError):
                statuses.put(0)

    async def clients() -> None:
        await asyncio.gather(*(client() for _ in range(num_clients)))

    asyncio.run(clients())


async def attack(server: Server, path: str, body: bytes, num_clients: int, num_requests: int) -> tuple[Seen, float]:
    """Measure the victim during an attack, and the most megabytes that the server had."""
    spawn = get_context("spawn")
    statuses: Queue[int] = spawn.Queue()
    process = spawn.Process(target=send_for_ever, args=(server.address, path, body, num_clients, statuses))
    process.start()
    most = [server.megabytes]

    async def watch() -> None:
        while True:
            most.append(server.megabytes)
            await asyncio.sleep(0.1)

    watching = asyncio.create_task(watch())
    await asyncio.sleep(SETTLE_SECONDS)
    seen = await ask_victim(server, num_requests)
    watching.cancel()
    process.kill()
    process.join()
    while not statuses.empty():
        seen.statuses[statuses.get()] += 1
    return seen, max(most)


async def stored_body(server: Server) -> tuple[str, bytes]:
    """A short body that names the largest response which the server stores."""
    for num in (300_000, 30_000):
        status, _, answer = await ask(server.address, *response(num), ATTACKER)
        if status == 200:
            break
    body = answer[answer.index(b"{") : answer.rindex(b"}") + 1]
    return "/v1/responses", json.dumps({"input": "x", "max_output_tokens": 1,
                                        "previous_response_id": json.loads(body)["id"]}).encode()


async def measure(args: argparse.Namespace) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    with Server(args.flags) as server:
        await server.wait_ready()
        await ask_victim(server, 5)
        for name in args.attacks:
            path, body = await stored_body(server) if name == "stored" else ATTACKS[name]()
            num_clients = args.streams if name == "priority" else args.clients
            before = server.megabytes
            alone = await ask_victim(server, args.requests)
            seen, most = await attack(server, path, body, num_clients, args.requests)
            await asyncio.sleep(args.rest)
            megabytes = [round(before), round(most), round(server.megabytes)]
            rows.append({"attack": name, "clients": num_clients, "alone": alone.row(), "attacked": seen.row(),
                         "megabytes": megabytes})
            print(json.dumps(rows[-1]), flush=True)
    return rows


def parse(given: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--attacks", nargs="+", choices=[*ATTACKS, "stored"], default=[*ATTACKS, "stored"])
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--streams", type=int, default=80, help="clients of the attack with priorities")
    parser.add_argument("--requests", type=int, default=20, help="of the victim, in each part")
    parser.add_argument("--rest", type=float, default=SETTLE_SECONDS, help="seconds before memory is read again")
    args, flags = parser.parse_known_args(given)
    args.flags = [flag for flag in flags if flag != "--"]
    return args


if __name__ == "__main__":
    asyncio.run(measure(parse()))
