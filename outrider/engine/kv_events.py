"""KvEvents: publishes which pages the prefix cache holds, so that external routers (llm-d, Dynamo) can send a request
to the engine that has its prefix cached. Messages go through ZeroMQ and msgpack in vLLM's wire format.

The engine's thread only hands over a list at the end of a step. A thread of its own packs and sends the lists, and
answers subscribers who ask for batches that they missed. No step waits for it: if the queue is full, a batch is
dropped. Its sequence number is then missing, and the next batch begins with AllBlocksCleared, so that no subscriber
keeps pages in its list that are gone."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from outrider.cache.events import AllRemoved, CacheEvent, CacheEvents
from outrider.cache.groups import CacheLayout
from outrider.config import KVEventsConfig
from outrider.engine.kv_event_wire import EventWriter
from outrider.engine.step_watcher import StepWatcher
from outrider.sched.scheduler import Scheduler

NEEDS = "kv_events_config needs pyzmq and msgpack: pip install 'outrider[events]' (in a clone: '.[events]')"
REPLAY_SECONDS = 0.05  # at most so long a subscriber waits for an answer while no events come
CLOSE_SECONDS = 1.0
SEQUENCE_BYTES = 8
END = (-1).to_bytes(SEQUENCE_BYTES, "big", signed=True)  # in place of a sequence number: the replay is over
log = logging.getLogger("outrider")
_Batch = tuple[int, float, list[CacheEvent]]  # sequence number, time, events


class EventSockets:
    """The ZeroMQ sockets of cache events. They are opened before a model is loaded, so that an address that cannot be
    used is reported at once."""

    def __init__(self, config: KVEventsConfig) -> None:
        try:
            import msgpack
            import zmq
        except ModuleNotFoundError as error:
            raise ValueError(f"{NEEDS} ({error.name} is missing)") from None
        self.config = config
        self.pack = msgpack.Packer().pack
        self._context = zmq.Context()
        self.publishing = self._context.socket(zmq.PUB)
        self.publishing.set_hwm(config.hwm)
        self.replaying: Any = None
        try:
            self._open(self.publishing, config.endpoint, zmq.ZMQError, is_bound=config.is_bound)
            if config.replay_endpoint is not None:
                self.replaying = self._context.socket(zmq.ROUTER)
                self._open(self.replaying, config.replay_endpoint, zmq.ZMQError, is_bound=True)
        except ValueError:
            self.close()
            raise

    def _open(self, socket: Any, endpoint: str, failure: type[Exception], *, is_bound: bool) -> None:
        address = with_rank(endpoint, self.config.data_parallel_rank)
        if self.config.token_ids and not is_local(address):
            log.warning("events of the prefix cache reveal the token ids of all prompts and answers at %s: "
                        "make sure that only the router can connect", address)
        try:
            (socket.bind if is_bound else socket.connect)(address)
        except failure as error:
            raise ValueError(f"kv_events_config: cannot publish at {address}: {error}; choose another "
                             "endpoint") from None

    def close(self) -> None:
        self._context.destroy(linger=0)


def is_local(address: str) -> bool:
    """Whether only this machine can reach the address."""
    return not address.startswith("tcp://") or address.startswith(("tcp://127.", "tcp://localhost:", "tcp://[::1]:"))


def with_rank(endpoint: str, rank: int) -> str:
    """Return the address of one replica, as vLLM does: a TCP port is raised by the replica's number, and any other
    address gets the number as a suffix."""
    if rank == 0:
        return endpoint
    if not endpoint.startswith("tcp://"):
        return f"{endpoint}_dp{rank}"
    host, _, port = endpoint.rpartition(":")
    if not port.isdigit():
        raise ValueError(f"kv_events_config: the address {endpoint!r} needs a port, because each replica takes the "
                         "next higher one: write it as tcp://HOST:PORT")
    return f"{host}:{int(port) + rank}"


class KvEvents(StepWatcher):
    """Publishes an engine's cache events, which the cache notes in `record`."""

    def __init__(self, layout: CacheLayout, sockets: EventSockets,
                 labels: Mapping[str, str] = MappingProxyType({})) -> None:
        """labels: public names of cache keys, by key."""
        self.record = CacheEvents(layout, labels)
        self.num_dropped = 0  # batches
        config = sockets.config
        self._writer = EventWriter(layout, tells_tokens=config.token_ids, secret=config.hash_secret)
        self._sockets = sockets
        self._next_number = 0
        self._was_dropped = False
        self._batches: queue.Queue[_Batch | None] = queue.Queue(sockets.config.max_queue_size)
        self._sent: deque[tuple[bytes, bytes]] = deque(maxlen=sockets.config.buffer_steps)
        self._topic = sockets.config.topic.encode()
        self._thread = threading.Thread(target=self._run, name="outrider-kv-events", daemon=True)
        self._thread.start()

    def follow(self, scheduler: Scheduler) -> None:
        self.record.remove_all()
        scheduler.cache.pool.events = self.record

    def flush(self) -> None:
        """Hand the events since the last call to the publishing thread. Never waits."""
        events = self.record.take()
        if not events:
            return
        if self._was_dropped:
            events.insert(0, AllRemoved())
        number, self._next_number = self._next_number, self._next_number + 1
        try:
            self._batches.put_nowait((number, time.time(), events))
            self._was_dropped = False
        except queue.Full:
            if not self._was_dropped:
                log.warning("events of the prefix cache come faster than they can be published: some are dropped. "
                            "The router's list of pages is incomplete until it asks for the dropped events")
            self._was_dropped = True
            self.num_dropped += 1

    def close(self) -> None:
        """Publish the remaining events and end the thread. Waits at most a second for a free place in the queue, and at
        most another second for the thread."""
        self.flush()
        try:
            self._batches.put(None, timeout=CLOSE_SECONDS)
        except queue.Full:
            return  # the thread does not get on, and ends with the process
        self._thread.join(CLOSE_SECONDS)

    def _run(self) -> None:
        try:
            while True:
                try:
                    batch = self._batches.get(timeout=REPLAY_SECONDS)
                except queue.Empty:
                    self._replay()
                    continue
                if batch is None:
                    return
                self._publish(*batch)
                self._replay()
        except Exception:
            log.exception("publishing events of the prefix cache failed: no more are published")
        finally:
            self._sockets.close()

    def _publish(self, number: int, seconds: float, events: list[CacheEvent]) -> None:
        sockets = self._sockets
        payload = sockets.pack([seconds, self._writer.write(events), sockets.config.data_parallel_rank])
        numbered = number.to_bytes(SEQUENCE_BYTES, "big")
        sockets.publishing.send_multipart((self._topic, numbered, payload))
        self._sent.append((numbered, payload))

    def _replay(self) -> None:
        """Answer subscribers that ask for all batches from a sequence number on, as far as those batches are still
        stored."""
        socket = self._sockets.replaying
        while socket is not None and socket.poll(0):
            client, *rest = socket.recv_multipart()
            if len(rest) != 2 or len(rest[1]) != SEQUENCE_BYTES:
                log.warning("a request for missed events is ignored, because it is not a number of 8 bytes")
                continue
            for numbered, payload in list(self._sent):
                if numbered >= rest[1]:
                    socket.send_multipart((client, b"", self._topic, numbered, payload))
            socket.send_multipart((client, b"", b"", END, b""))
