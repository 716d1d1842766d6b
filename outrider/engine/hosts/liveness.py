"""Heartbeats between nodes, and queues that prevent one slow reader from blocking a connection. No torch."""

from __future__ import annotations

import queue
import threading
import time
from contextlib import suppress
from multiprocessing.connection import Connection

from outrider.engine.hosts.channel import Channel

BEAT_SECONDS = 0.5  # between two signs of life of a node


class Silence:
    """Measures how long a peer has sent nothing. Time in which this process itself does not run is not counted, so a
    machine that wakes from suspension does not give up its peers."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._num_reads, self._last, self._seconds = -1, time.monotonic(), 0.0

    def look(self) -> float:
        """Return the seconds without a message. Called every BEAT_SECONDS."""
        now, reads = time.monotonic(), self._channel.num_reads
        heard = reads != self._num_reads
        self._seconds = 0.0 if heard else self._seconds + min(now - self._last, 2 * BEAT_SECONDS)
        self._num_reads, self._last = reads, now
        return self._seconds


class Outbox:
    """Writes messages into a pipe on a separate thread. Otherwise a rank that does not read would delay the messages to
    all other ranks of its node, perhaps to the rank that it waits for."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe
        self._messages: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        threading.Thread(target=self._write, name="outrider-outbox", daemon=True).start()

    def put(self, message: bytes) -> None:
        self._messages.put(message)

    def close(self) -> None:
        """Write all queued messages, and end."""
        self._messages.put(None)

    def _write(self) -> None:
        with suppress(OSError):  # the reader has ended
            while (message := self._messages.get()) is not None:
                self._pipe.send_bytes(message)
