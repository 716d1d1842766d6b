"""BoundedHttp: uvicorn's HTTP protocol with bounds on the head of a request, which comes before any key is known.

The parser keeps a head of any size for any time, so one client without a key could fill the memory or hold all
connections. Bodies have their bounds in guard.py.
"""

from __future__ import annotations

import asyncio

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

MAX_HEAD_BYTES = 1 << 16
HEAD_SECONDS = 60.0  # for a client to send a head, from its connection or from the head's first bytes


class BoundedHttp(HttpToolsProtocol):
    """Between requests uvicorn's own timeout for idle connections applies."""

    _num_head_bytes = 0
    _is_in_head = True
    _num_requests = 0  # whose bodies have come whole
    _timer: asyncio.TimerHandle | None = None  # runs while a head is awaited

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._start_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        num_requests = self._num_requests
        super().data_received(data)
        if not self._is_in_head or self._num_requests > num_requests or self.transport.is_closing():
            return
        self._num_head_bytes += len(data)
        if self._num_head_bytes > MAX_HEAD_BYTES:
            self.send_400_response("The head of the request is too large.")
        elif self._timer is None:
            self._start_timer()

    def on_headers_complete(self) -> None:
        self._is_in_head = False
        self._stop_timer()
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        self._is_in_head, self._num_head_bytes = True, 0
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
