"""Reads the HTTP answer to a GET request, with limits on the size of its head and its body."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

MAX_LINES = 100  # of the head
MAX_CHUNK_LINE = 1024
PIECE = 1 << 16


@dataclass(frozen=True)
class HttpAnswer:
    status: int
    location: str  # of a redirect
    body: bytes


async def read_answer(reader: asyncio.StreamReader, max_bytes: int) -> HttpAnswer:
    """Read an answer, and its body if the status is 200. Raises ValueError, or an error of asyncio, for an answer that
    is malformed, compressed or larger than `max_bytes`."""
    version, _, rest = (await _line(reader)).partition(" ")
    status = rest[:3]
    if not version.startswith("HTTP/1.") or not status.isdigit():
        raise ValueError("the answer is not HTTP")
    headers: dict[str, str] = {}
    for _ in range(MAX_LINES):
        line = await _line(reader)
        if not line:
            break
        name, _, value = line.partition(":")
        headers[name.strip().lower()] = value.strip()
    else:
        raise ValueError("the answer has too many header lines")
    body = await _body(reader, headers, max_bytes) if status == "200" else b""
    return HttpAnswer(int(status), headers.get("location", ""), body)


async def _line(reader: asyncio.StreamReader) -> str:
    return (await reader.readuntil(b"\n")).strip().decode("latin-1")


async def _body(reader: asyncio.StreamReader, headers: dict[str, str], max_bytes: int) -> bytes:
    if headers.get("content-encoding", "identity").lower() != "identity":  # a few bytes may unpack to gigabytes
        raise ValueError("the body is compressed, which is not supported")
    coding, declared = headers.get("transfer-encoding", "").lower(), headers.get("content-length")
    if coding == "chunked":
        return await _chunks(reader, max_bytes)
    if coding or (declared is not None and not (declared.isdigit() and int(declared) <= max_bytes)):
        raise ValueError("the body has an unsupported transfer coding, or is too large")
    if declared is not None:
        return await reader.readexactly(int(declared))
    parts, size = [], 0
    while piece := await reader.read(PIECE):
        parts.append(piece)
        size += len(piece)
        if size > max_bytes:
            raise ValueError("the body is too large")
    return b"".join(parts)


async def _chunks(reader: asyncio.StreamReader, max_bytes: int) -> bytes:
    parts, size = list[bytes](), 0
    while True:
        line = await reader.readuntil(b"\n")
        length = int(line[:MAX_CHUNK_LINE].split(b";")[0], 16)
        size += length
        if length < 0 or size > max_bytes:
            raise ValueError("the body is too large")
        if length == 0:
            return b"".join(parts)
        parts.append(await reader.readexactly(length))
        if await reader.readline() not in (b"\r\n", b"\n"):
            raise ValueError("a chunk does not end with a line break")
