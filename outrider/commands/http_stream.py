"""A small HTTP client for event streams. It uses asyncio only, so that a load generator costs little, and no code of
the server."""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit


class HttpError(RuntimeError):
    """Raised if the server answers with a status other than 200, or with bytes that are not HTTP."""


@dataclass(frozen=True)
class Address:
    host: str
    port: int
    is_secure: bool
    prefix: str  # prefix of every path

    @classmethod
    def parse(cls, url: str) -> Address:
        parts = urlsplit(url if "://" in url else f"http://{url}")
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"{url!r} is not the address of a server: write one such as http://127.0.0.1:8000")
        secure = parts.scheme == "https"
        prefix = parts.path.rstrip("/").removesuffix("/v1")
        return cls(parts.hostname, parts.port or (443 if secure else 80), secure, prefix)


async def stream_events(address: Address, path: str, body: dict[str, Any],
                        key: str | None) -> AsyncGenerator[dict[str, Any], None]:
    """Send one POST, and yield the events of the answer until [DONE]."""
    reader, writer = await _request(address, "POST", path, json.dumps(body).encode(), key)
    try:
        text = b""
        async for chunk in _body(reader):
            *lines, text = (text + chunk).split(b"\n\n")
            for line in lines:
                data = line.strip().removeprefix(b"data:").strip()
                if data == b"[DONE]":
                    return
                if data:
                    yield json.loads(data)
    finally:
        writer.close()


async def model_names(address: Address, key: str | None) -> list[str]:
    """Return the names of the models that a server offers."""
    reader, writer = await _request(address, "GET", "/v1/models", b"", key)
    try:
        answer = json.loads(b"".join([chunk async for chunk in _body(reader)]))
        return [str(model["id"]) for model in answer["data"]]
    finally:
        writer.close()


async def _request(address: Address, method: str, path: str, body: bytes,
                   key: str | None) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    context = ssl.create_default_context() if address.is_secure else None
    reader, writer = await asyncio.open_connection(address.host, address.port, ssl=context, limit=1 << 20)
    lines = [f"{method} {address.prefix}{path} HTTP/1.1", f"Host: {address.host}", "Connection: close",
             "Content-Type: application/json", f"Content-Length: {len(body)}"]
    if key:
        lines.append(f"Authorization: Bearer {key}")
    writer.write("\r\n".join([*lines, "", ""]).encode() + body)
    return reader, writer


async def _body(reader: asyncio.StreamReader) -> AsyncGenerator[bytes, None]:
    """Yield pieces of the body as they arrive, without HTTP's chunk headers."""
    status = (await reader.readline()).split()
    headers: dict[str, str] = {}
    while (line := (await reader.readline()).strip()):
        name, _, value = line.decode("latin-1").partition(":")
        headers[name.lower()] = value.strip().lower()
    if len(status) < 2 or status[1] != b"200":
        said = await reader.read(2000)
        raise HttpError(f"status {status[1].decode() if len(status) > 1 else 'none'}: "
                        f"{said.decode(errors='replace').strip()}")
    if headers.get("transfer-encoding") != "chunked":
        while piece := await reader.read(1 << 16):
            yield piece
        return
    while size := int((await reader.readline()).split(b";")[0], 16):
        yield await reader.readexactly(size)
        await reader.readexactly(2)
