"""Streams: objects from which asyncio readers get the outputs of their requests, each in its reader's event loop.

A stream gets the increment of each step. It keeps either one growing output, of which its reader gets copies, or the
increments that its reader has not seen. A slow reader therefore costs no more memory than its output, and no request
waits for it.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod

from outrider.core.any_output import Output
from outrider.core.failures import OwnFailure
from outrider.core.output_reader import OutputReader
from outrider.core.outputs import OutputIncrement


class RequestError(RuntimeError):
    """Raised if a request failed while it ran. The message is the `error` of its output."""


class ParamsError(RequestError):
    """Raised if a request failed because of its own parameters."""

    def __init__(self, request_id: str, failure: OwnFailure) -> None:
        super().__init__(f"request {request_id}: {failure}")
        self.failure = failure


class Stream(ABC):
    """Gives a reader the outputs of one request. `put` and `fail` run in the reader's event loop."""

    def __init__(self, request_id: str, loop: asyncio.AbstractEventLoop) -> None:
        self.request_id = request_id
        self.loop = loop
        self.is_done = False
        self.is_aborted = False  # before the engine got the request
        self._error: BaseException | None = None
        self._is_ready = False  # something has come that the reader has not seen
        self._waiter: asyncio.Future[None] | None = None  # the reader's, while it waits

    @abstractmethod
    def put(self, increment: OutputIncrement) -> None: ...

    def fail(self, error: BaseException) -> None:
        self._error = error
        self._wake()

    def _wake(self) -> None:
        self._is_ready = True
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def _wait(self) -> None:
        """Wait until there is something to read. A new future for each wait costs half as much as an
        `asyncio.Event`."""
        if not self._is_ready:
            self._waiter = self.loop.create_future()
            await self._waiter
        self._is_ready = False
        if self._error is not None:
            self.is_done = True
            raise self._error

    def _raise_if(self, failed: str | None) -> None:
        if failed is not None:  # whatever else the request has running is aborted when its reader leaves
            if isinstance(failed, OwnFailure):
                raise ParamsError(self.request_id, failed)
            raise RequestError(f"request {self.request_id}: {failed}")


class GrowingOutput(Stream):
    """A stream that keeps the whole output and gives its reader copies, or parts of it."""

    def __init__(self, output: Output, reader: OutputReader, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(output.request_id, loop)
        self._output, self._reader = output, reader

    def put(self, increment: OutputIncrement) -> None:
        self._output.grow(increment)
        if self._reader.is_due(self._output):
            self._wake()

    async def next(self) -> Output:
        await self._wait()
        output = self._reader.read(self._output)  # the reader's own: what it has read never changes
        self.is_done = output.finished
        self._raise_if(output.error)
        return output


class Increments(Stream):
    """A stream that keeps the increments that its reader has not seen, which take as much memory as that part of the
    output."""

    def __init__(self, request_id: str, loop: asyncio.AbstractEventLoop, num_samples: int) -> None:
        super().__init__(request_id, loop)
        self._unread: list[OutputIncrement] = []
        self._num_left = num_samples  # samples that have not ended
        self._failed: str | None = None

    def put(self, increment: OutputIncrement) -> None:
        self._unread.append(increment)
        if increment.end is not None:
            self._num_left -= 1
            self._failed = self._failed or increment.end.error
        self._wake()

    async def next(self) -> list[OutputIncrement]:
        await self._wait()
        unread, self._unread = self._unread, []
        self.is_done = self._num_left == 0
        self._raise_if(self._failed)
        return unread
