"""Clients of every temper at once, for the server at an address. Counts how they ended."""

from __future__ import annotations

import asyncio
import json
import random
import re
from collections import Counter
from collections.abc import Callable, Coroutine
from typing import Any, NamedTuple

PATIENCE = 240.0  # seconds that a client waits for its answer before it counts as forgotten
HUGE = 1 << 40  # bytes that a client says it will send
STATUSES = {200, 429, 503}  # of a request with nothing wrong with it


class Answer(NamedTuple):
    status: int
    retry_after: float | None  # seconds
    body: bytes

    @classmethod
    def parse(cls, answer: bytes) -> Answer:
        assert answer, "no answer"
        head, _, body = answer.partition(b"\r\n\r\n")
        told = re.search(rb"^retry-after: (\d+)", head, re.MULTILINE | re.IGNORECASE)
        return cls(int(head.split(maxsplit=2)[1]), None if told is None else float(told[1]),
                   _joined(body) if b"transfer-encoding: chunked" in head.lower() else body)


class Storm:
    """Raises AssertionError where a client that waits for its answer gets none, or one that is the server's fault.
    Who is told to come back later waits as long as it was told before it sends its next request."""

    def __init__(self, url: str, seed: int, max_len: int, key: str = "none") -> None:
        self._host, port = url.removeprefix("http://").split(":")
        self._port = int(port)
        self._random = random.Random(seed)
        self._max_len, self._key = max_len, key
        self.statuses: Counter[int] = Counter()  # of requests with nothing wrong with them
        self.ends: Counter[str] = Counter()

    async def run(self, num_requests: int, concurrency: int) -> None:
        kinds: list[Callable[[], Coroutine[Any, Any, float | None]]] = [
            self.patient, self.patient, self.patient, self.whole, self.leaving, self.leaving, self.slow,
            self.half_sent, self.too_long, self.bad_json, self.huge, self.embedding]
        left = num_requests

        async def client() -> None:
            nonlocal left
            while left > 0:
                left -= 1
                wait = await asyncio.wait_for(self._random.choice(kinds)(), PATIENCE)
                if wait is not None and left > 0:
                    await asyncio.sleep(wait)

        await asyncio.gather(*(client() for _ in range(concurrency)))

    # Kinds of clients

    async def patient(self, **fields: Any) -> float | None:
        return self._judge_stream(await self._answer(self._body(stream=True, **fields)))

    async def whole(self) -> float | None:
        answer = await self._answer(self._body(stream=False))
        wait = self._judge_status(answer)
        if wait is None:
            assert all(choice["finish_reason"] for choice in json.loads(answer.body)["choices"])
            self.ends["whole"] += 1
        return wait

    async def slow(self) -> float | None:
        reader, writer = await self._sent(self._body(stream=True))
        parts = []
        for _ in range(20):
            parts.append(await reader.read(64))
            await asyncio.sleep(0.02)
        parts.append(await reader.read(-1))
        writer.close()
        return self._judge_stream(Answer.parse(b"".join(parts)))

    async def leaving(self) -> None:
        _, writer = await self._sent(self._body(stream=self._random.random() < 0.7))
        await asyncio.sleep(self._random.random() / 5)
        writer.close()
        self.ends["left"] += 1

    async def half_sent(self) -> None:
        body = self._body(stream=True)
        _, writer = await self._sent(body[: self._random.randrange(1, len(body))], declared=len(body))
        await asyncio.sleep(self._random.random() / 20)
        writer.close()
        self.ends["left"] += 1

    async def too_long(self) -> None:
        await self._refused(json.dumps({"prompt": [1] * (self._max_len + 1)}).encode(), 400)

    async def bad_json(self) -> None:
        await self._refused(self._random.choice([b"{", b"[1", b"\xff", b'{"prompt": }']), 400)

    async def huge(self) -> None:
        await self._refused(b"{", 413, declared=HUGE)

    async def embedding(self) -> float | None:
        answer = await self._answer(json.dumps({"input": [[1, 2, 3], [4] * 20]}).encode(), "/v1/embeddings")
        wait = self._judge_status(answer)
        if wait is None:
            assert len(json.loads(answer.body)["data"]) == 2
            self.ends["embedding"] += 1
        return wait

    # Inside

    def _body(self, **fields: Any) -> bytes:
        chosen = self._random
        given = {"prompt": [chosen.randrange(3, 250)] * chosen.randrange(1, 30), "max_tokens": chosen.randrange(1, 40),
                 "n": chosen.choice([1, 1, 1, 2]), "temperature": chosen.choice([0.5, 1.0]),
                 "priority": chosen.randrange(3), "speculative": chosen.choice([None, False, 2])}
        return json.dumps(given | fields).encode()

    def _judge_status(self, answer: Answer) -> float | None:
        """None if the request was served, else the seconds after which it may be sent again."""
        self.statuses[answer.status] += 1
        assert answer.status in STATUSES, answer
        if answer.status == 200:
            return None
        assert json.loads(answer.body)["error"]["message"]
        assert answer.retry_after is not None, answer
        return answer.retry_after

    def _judge_stream(self, answer: Answer) -> float | None:
        """Whole, or with an error that says so: never just cut off."""
        wait, body = self._judge_status(answer), answer.body
        if wait is None:
            assert body.endswith(b"data: [DONE]\n\n"), body[-300:]
            has_error = b'data: {"error"' in body
            assert has_error or b'"finish_reason":"' in body
            self.ends["error event" if has_error else "stream"] += 1
        return wait

    async def _refused(self, body: bytes, status: int, declared: int | None = None) -> None:
        answer = await self._answer(body, declared=declared)
        assert answer.status in {status, 429, 503}, answer
        self.ends["refused"] += 1

    async def _answer(self, body: bytes, path: str = "/v1/completions", declared: int | None = None) -> Answer:
        reader, writer = await self._sent(body, path, declared)
        answer = await reader.read(-1)
        writer.close()
        return Answer.parse(answer)

    async def _sent(self, body: bytes, path: str = "/v1/completions",
                    declared: int | None = None) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await asyncio.open_connection(self._host, self._port)
        length = len(body) if declared is None else declared
        writer.write(f"POST {path} HTTP/1.1\r\nHost: [::]\r\nConnection: close\r\nContent-Type: application/json\r\n"
                     f"Authorization: Bearer {self._key}\r\nContent-Length: {length}\r\n\r\n".encode() + body)
        return reader, writer


def _joined(chunked: bytes) -> bytes:
    parts = []
    while chunked:
        size, _, chunked = chunked.partition(b"\r\n")
        parts.append(chunked[: int(size, 16)])
        chunked = chunked[int(size, 16) + 2 :]
    return b"".join(parts)
