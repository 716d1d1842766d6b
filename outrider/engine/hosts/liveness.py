"""Signs of life between nodes, and queues that keep one slow reader from holding up a connection. No torch."""

from __future__ import annotations

import queue
import threading
import time
from contextlib import suppress
from multiprocessing.connection import Connection

from outrider.engine.hosts.channel import Channel

BEAT_SECONDS = 0.5  # between two signs of life of a node


class Silence:
    """For how long nothing has come from a peer. Only time counts in which this process itself runs, so a machine that
    was suspended does not give up its peers when it wakes."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._num_reads, self._last, self._seconds = -1, time.monotonic(), 0.0

    def look(self) -> float:
        """Return the seconds of silence. Called every BEAT_SECONDS."""
        now, reads = time.monotonic(), self._channel.num_reads
        heard = reads != self._num_reads
        self._seconds = 0.0 if heard else self._seconds + min(now - self._last, 2 * BEAT_SECONDS)
        self._num_reads, self._last = reads, now
        return self._seconds


class Outbox:
    """Writes messages into a pipe from a thread of its own. A rank that does not read would otherwise hold up the
    messages to all others of its node, perhaps the one that it waits for."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe
        self._messages: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        threading.Thread(target=self._write, name="outrider-outbox", daemon=True).start()

    def put(self, message: bytes) -> None:
        self._messages.put(message)

    def close(self) -> None:
        """Write what was put before, and end."""
        self._messages.put(None)

    def _write(self) -> None:
        with suppress(OSError):  # the reader has ended
            while (message := self._messages.get()) is not None:
                self._pipe.send_bytes(message)
