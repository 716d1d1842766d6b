"""Sends HTTP requests of the front to one replica, over its unix socket. First the head of the answer arrives, then
pieces of its body.

Every request has its own connection. Connecting to a unix socket takes microseconds, and no request can be lost on an
old connection that the replica is just closing.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterable

import httptools

Headers = list[tuple[bytes, bytes]]
PIECE_BYTES = 1 << 16
# Headers that belong to one connection, or that the front writes itself.
OWN_HEADERS = frozenset({b"connection", b"keep-alive", b"proxy-connection", b"te", b"trailer", b"transfer-encoding",
                         b"upgrade", b"http2-settings", b"expect", b"content-length"})


class ReplicaLost(ConnectionError):
    """Raised if a connection to the replica could not be made, or ended before the answer did."""


class _Reading:
    """The part of a replica's answer that has been parsed so far."""

    def __init__(self) -> None:
        self.headers: Headers = []
        self.pieces: list[bytes] = []
        self.has_head = self.is_complete = False

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        self.has_head = True

    def on_body(self, body: bytes) -> None:
        self.pieces.append(body)

    def on_message_complete(self) -> None:
        self.is_complete = True


class Answer:
    """A replica's answer whose head has arrived; `pieces` reads the body. `close` ends the connection, which aborts the
    request."""

    def __init__(self, status: int, headers: Headers, reading: _Reading, parser: httptools.HttpResponseParser,
                 reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.status, self.headers = status, headers
        self._reading, self._parser, self._reader, self._writer = reading, parser, reader, writer

    @property
    def content_type(self) -> bytes:
        return next((value for name, value in self.headers if name == b"content-type"), b"")

    async def pieces(self) -> AsyncGenerator[bytes, None]:
        """Yield pieces of the body as they arrive. Raises ReplicaLost if the connection ends too early."""
        while True:
            pieces, self._reading.pieces = self._reading.pieces, []
            if pieces:
                yield b"".join(pieces)
            if self._reading.is_complete:
                return
            await _read_some(self._reader, self._parser)

    async def body(self) -> bytes:
        return b"".join([piece async for piece in self.pieces()])

    def close(self) -> None:
        self._writer.close()


async def ask(path: str, method: str, target: bytes, headers: Iterable[tuple[bytes, bytes]] = (),
              body: bytes = b"") -> Answer:
    """Send a request to the server at a unix socket, and wait for the head of its answer."""
    try:
        reader, writer = await asyncio.open_unix_connection(path, limit=PIECE_BYTES)
    except OSError as error:
        raise ReplicaLost(str(error)) from None
    try:
        lines = [b"%s %s HTTP/1.1" % (method.encode(), target)]
        lines += [name + b": " + value for name, value in headers if name not in OWN_HEADERS]
        lines += [b"connection: close", b"content-length: %d" % len(body), b"", b""]
        writer.write(b"\r\n".join(lines) + body)
        reading = _Reading()
        parser = httptools.HttpResponseParser(reading)
        while not reading.has_head:
            await _read_some(reader, parser)
        reading.is_complete |= method == "HEAD"
        kept = [(name, value) for name, value in reading.headers
                if name not in OWN_HEADERS or name == b"content-length"]
        return Answer(parser.get_status_code(), kept, reading, parser, reader, writer)
    except BaseException:
        writer.close()
        raise


async def _read_some(reader: asyncio.StreamReader, parser: httptools.HttpResponseParser) -> None:
    try:
        data = await reader.read(PIECE_BYTES)
        if not data:
            raise ReplicaLost("the replica closed the connection")
        parser.feed_data(data)
    except OSError as error:
        raise ReplicaLost(str(error)) from None
    except httptools.HttpParserError as error:
        raise ReplicaLost(f"the replica's answer is not HTTP: {error}") from None
