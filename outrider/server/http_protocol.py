"""BoundedHttp: uvicorn's HTTP protocol with limits on the size and time of a request's head, which arrives before the
API key is known.

The parser accepts a head of any size and waits for it without limit, so one client without a key could fill the memory
or occupy all connections. Header fields after a chunked body (trailers) count as part of the head, and are not used.
Bodies are bounded in guard.py.

A request that offers to switch protocols is answered in HTTP/1.1. Java's client offers HTTP/2 with every first request
(`Upgrade: h2c`), and the parser would otherwise take the body of that request for data of the other protocol."""

from __future__ import annotations

import asyncio
from typing import Any

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

MAX_HEAD_BYTES = 1 << 16  # request line, all fields and the empty line, without spaces around values
TOO_LARGE = "The head of the request is too large."
UPGRADING = (b"upgrade", b"http2-settings")  # headers of an offer, and what Connection says of them
MAX_FIELDS = 256  # of a head, or of a trailer
MAX_WAITING = 16  # requests that a client sends before it has the answers to earlier ones
# The parser calls Python for every chunk of a body: two hundred thousand times for the bytes of one read.
FREE_CHUNKS, MEAN_CHUNK_BYTES = 1024, 256  # what the chunks of a body must have on average, after the first ones
LARGE_PIECE = 1 << 16  # bytes of a body
HEAD_SECONDS = 60.0  # for a client to send a head, from its connection or from the head's first bytes


class HeadTooLarge(Exception):
    """Raised inside the parser's callbacks if the head of a request is too large. The parser then refuses the
    request."""


class TooManyParts(Exception):
    """Raised when a connection sent too many requests before the first of them was answered, or a body with too many
    chunks. The parser handles all received bytes without a pause, so the number of requests and chunks must be
    bounded."""


class StayingParser(httptools.HttpRequestParser):
    """An HTTP parser that stays in HTTP/1.1. If a request offers to switch to another protocol, the connection gets the
    request as if there were no offer."""

    def __init__(self, connection: BoundedHttp) -> None:
        super().__init__(connection)
        self.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn does, for requests in a row
        self._connection = connection

    @property
    def makes_offer(self) -> bool:
        """Whether the last head offers to switch to another protocol. CONNECT demands a switch, which is not an
        offer."""
        return self.should_upgrade() and self.get_method() != b"CONNECT"

    def feed_data(self, data: bytes) -> None:  # type: ignore[override]
        try:
            super().feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            if not self.makes_offer:
                raise
            self._connection.read_without_offer(data[upgrade.args[0] :])


class BoundedHttp(HttpToolsProtocol):
    """The protocol object of one connection. Between requests uvicorn's own timeout for idle connections applies."""

    parser: StayingParser
    _num_unread_bytes = 0  # bytes received of the current head; the piece that completes the head is not counted
    _num_field_bytes = 0  # bytes of the current head that the parser has read
    _num_fields = 0  # of the current head or trailer
    _num_chunks = 0  # of the current body
    _num_body_bytes = 0  # that have been received
    _is_in_head = True
    _may_be_in_trailer = False
    _num_requests = 0  # requests whose bodies have come whole
    _timer: asyncio.TimerHandle | None = None  # runs while a head is awaited

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.parser = StayingParser(self)
        self._unanswered: list[RequestResponseCycle] = []  # in the order in which they came

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._start_timer()

    def eof_received(self) -> None:
        self._end_requests()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        self._end_requests()
        super().connection_lost(exc)

    def _end_requests(self) -> None:
        """Tell every request of the connection that its client has left. uvicorn tells the last one alone, and would
        start the requests that wait for earlier answers, each of which would log an error."""
        self.pipeline.clear()
        for cycle in self._unanswered:
            cycle.disconnected = not cycle.response_complete
            cycle.message_event.set()
        self._unanswered.clear()

    def data_received(self, data: bytes) -> None:
        num_requests = self._num_requests
        super().data_received(data)
        is_in_fields = self._is_in_head or self._may_be_in_trailer
        if not is_in_fields or self._num_requests > num_requests or self.transport.is_closing():
            return
        self._num_unread_bytes += len(data)
        if self._num_unread_bytes > MAX_HEAD_BYTES:
            self.send_400_response(TOO_LARGE)
        elif self._is_in_head and self._timer is None:
            self._start_timer()

    def send_400_response(self, msg: str) -> None:
        is_too_large = self._num_field_bytes > MAX_HEAD_BYTES or self._num_fields > MAX_FIELDS
        super().send_400_response(TOO_LARGE if is_too_large else msg)

    def read_without_offer(self, rest: bytes) -> None:
        """Read on after the head of a request that offers to switch protocols. rest: the bytes after that head."""
        parser = self.parser
        lines = [b"%s %s HTTP/%s" % (parser.get_method(), self.url, parser.get_http_version().encode())]
        for name, value in self.headers:
            if name == b"connection":
                value = b",".join(word for word in value.split(b",") if word.strip().lower() not in UPGRADING)
            if name not in UPGRADING:
                lines.append(name + b": " + value)
        self.parser = StayingParser(self)
        self.parser.feed_data(b"\r\n".join([*lines, b"", rest]))

    def on_message_begin(self) -> None:
        self._num_field_bytes = self._num_fields = self._num_chunks = self._num_body_bytes = 0
        if len(self.pipeline) >= MAX_WAITING:
            raise TooManyParts
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        self._count(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._num_fields += 1
        if self._num_fields > MAX_FIELDS:
            raise HeadTooLarge
        self._count(len(name) + len(value) + len(": \r\n"))
        if self._is_in_head:
            super().on_header(name, value)

    def on_chunk_header(self) -> None:
        self._num_chunks += 1
        if self._num_chunks > FREE_CHUNKS + self._num_body_bytes // MEAN_CHUNK_BYTES:
            raise TooManyParts
        self._may_be_in_trailer, self._num_unread_bytes = True, 0

    def on_body(self, body: bytes) -> None:
        self._may_be_in_trailer = False
        self._num_body_bytes += len(body)
        cycle = self.cycle
        if not cycle.body and len(body) >= LARGE_PIECE:
            cycle.body = b""  # type: ignore[assignment]  # uvicorn's bytearray would copy the piece twice
        elif isinstance(cycle.body, bytes):
            cycle.body = bytearray(cycle.body)  # to which many small pieces are added in linear time
        super().on_body(body)

    def _count(self, num_bytes: int) -> None:
        self._num_field_bytes += num_bytes
        if self._num_field_bytes > MAX_HEAD_BYTES:
            raise HeadTooLarge

    def on_headers_complete(self) -> None:
        self._count(len(self.parser.get_method()) + len("  HTTP/1.1\r\n\r\n"))
        if self.parser.makes_offer:
            return
        self._is_in_head = False
        self._stop_timer()
        super().on_headers_complete()
        self._unanswered = [cycle for cycle in self._unanswered if not cycle.response_complete]
        if self.cycle is not None:
            self._unanswered.append(self.cycle)

    def on_message_complete(self) -> None:
        if self.parser.makes_offer:
            return
        self._is_in_head, self._may_be_in_trailer, self._num_unread_bytes = True, False, 0
        self._num_requests += 1
        super().on_message_complete()

    def _start_timer(self) -> None:
        self._timer = self.loop.call_later(HEAD_SECONDS, self._give_up)

    def _give_up(self) -> None:
        if self.cycle is None or self.cycle.response_complete:  # else a client that pipelines still gets its answer
            self.transport.close()

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
