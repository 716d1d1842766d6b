"""HostLink: node 0's side of the connection to another node. It has a pipe and a process object for each of the node's
ranks, so that `WorkerProcess` treats them like local ranks. No torch."""

from __future__ import annotations

import array
import queue
import threading
import time
from collections.abc import Callable, MutableSequence
from contextlib import suppress
from multiprocessing.connection import Connection
from multiprocessing.reduction import ForkingPickler
from typing import Any

from outrider.engine.hosts.channel import Channel, Frame, FrameKind, WrongToken
from outrider.engine.hosts.liveness import BEAT_SECONDS, Outbox, Silence
from outrider.engine.rank_watch import RankProcess
from outrider.runner.rank_link import HostPlace
from outrider.runner.rank_status import STATUS_FIELDS, RankStatus

CUT_OFF_SECONDS = 10.0  # without a byte from a node, until it is given up
LOST = 1 << 30  # the exit code of a rank whose node is lost


class RankPipe:
    """The pipe to a rank on another node. It has those methods of a Connection that the parent uses."""

    def __init__(self, rank: int, link: HostLink) -> None:
        self._rank, self._link = rank, link
        self.inbox: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()  # None: the rank has ended

    def send_bytes(self, data: bytes | memoryview) -> None:
        self._link.send(FrameKind.MESSAGE, data, self._rank)

    def recv_bytes(self) -> bytes:
        data = self.inbox.get()
        if data is None:
            raise EOFError
        return data

    def recv(self) -> Any:
        return ForkingPickler.loads(self.recv_bytes())


class RemoteProcess:
    """The process of a rank on another node. If the connection ends, the node kills the process."""

    def __init__(self, link: HostLink) -> None:
        self.pid: int | None = None
        self.exitcode: int | None = None
        self._link, self._ended = link, threading.Event()

    def exited(self, code: int) -> None:
        if self.exitcode is None:
            self.exitcode = code
        self._ended.set()

    def join(self, timeout: float | None = None) -> None:
        self._ended.wait(timeout)

    def kill(self) -> None:
        self._link.lose("its ranks were ended")


class RemoteRank(RankProcess):
    """A rank on another node. Its status arrives with the node's heartbeats."""

    def __init__(self, rank: int, link: HostLink) -> None:
        self.numbers: MutableSequence[int] = [0] * STATUS_FIELDS
        self.remote = RemoteProcess(link)
        super().__init__(rank, self.remote, RankStatus(self.numbers), link.place.words)
        self.pipe = RankPipe(rank, link)
        self._link = link

    @property
    def loss(self) -> str:
        return self._link.loss if self.remote.exitcode == LOST else ""

    def end(self, code: int) -> None:
        self.remote.exited(code)
        self.pipe.inbox.put(None)


class HostLink:
    """The connection to a node that has joined. `loss` is the reason why the connection has ended, or empty while it is
    open."""

    def __init__(self, channel: Channel, place: HostPlace, ranks: range) -> None:
        self.place, self.loss = place, ""
        self.on_loss: Callable[[HostLink], object] = _ignore
        self._channel, self._ending = channel, threading.Lock()
        self._links: dict[int, Outbox] = {}  # to rank 0, by rank
        self.ranks = [RemoteRank(rank, self) for rank in ranks]
        self._by_number = {own.rank: own for own in self.ranks}
        for work in (self._receive, self._beat, self._watch):
            threading.Thread(target=work, name=f"outrider-node-{place.node}", daemon=True).start()

    def start(self, job: bytes, links: dict[int, Connection]) -> None:
        """Have the node start its ranks. links: for each rank, the parent's end of a pipe whose other end rank 0
        has."""
        for rank, pipe in links.items():
            self._links[rank] = Outbox(pipe)
            threading.Thread(target=self._pass_on, args=(rank, pipe), name="outrider-link", daemon=True).start()
        with suppress(OSError):  # the node is lost, and its ranks have ended
            self._channel.send(FrameKind.START, job)

    def send(self, kind: FrameKind, body: bytes | memoryview, rank: int) -> None:
        self._channel.send(kind, body, rank)

    def lose(self, why: str) -> None:
        """End the connection. The node ends its ranks when it sees this."""
        with self._ending:
            if self.loss:
                return
            names = "rank" + "s" * (len(self.ranks) > 1) + " " + ", ".join(str(own.rank) for own in self.ranks)
            self.loss = f"node {self.place.node} ({self.place.address}) with {names} is lost: {why}"
        self._channel.close()
        for outbox in self._links.values():
            outbox.close()
        for own in self.ranks:
            own.end(LOST)
        self.on_loss(self)

    def _pass_on(self, rank: int, pipe: Connection) -> None:
        """Forward the messages that rank 0 writes for another rank."""
        with suppress(EOFError, OSError):
            while True:
                self._channel.send(FrameKind.LINK, pipe.recv_bytes(), rank)

    def _receive(self) -> None:
        try:
            while True:
                self._take(self._channel.receive())
        except (EOFError, OSError):
            self.lose("it has ended its connection")
        except (WrongToken, ValueError, KeyError) as error:
            self.lose(f"it sent what no node sends: {error}")

    def _take(self, frame: Frame) -> None:
        match frame.kind:
            case FrameKind.STATUS:
                self._take_status(frame.body)
            case FrameKind.MESSAGE:
                self._by_number[frame.rank].pipe.inbox.put(frame.body)
            case FrameKind.LINK:
                self._links[frame.rank].put(frame.body)
            case FrameKind.EXITED:
                self._by_number[frame.rank].end(int(frame.body))
            case FrameKind.FAILED:
                self.lose(frame.body.decode())
            case FrameKind.BEAT:
                pass
            case _:
                raise ValueError(f"it sent an unexpected message of kind {frame.kind.name}")

    def _take_status(self, body: bytes) -> None:
        numbers = array.array("q", body)  # none before the node has started its ranks
        for index, own in enumerate(self.ranks if numbers else ()):
            pid, *fields = numbers[index * (1 + STATUS_FIELDS) : (index + 1) * (1 + STATUS_FIELDS)]
            own.remote.pid = pid or None
            own.numbers[:] = fields

    def _beat(self) -> None:
        with suppress(OSError):
            while not self.loss:
                self._channel.send(FrameKind.BEAT)
                time.sleep(BEAT_SECONDS)

    def _watch(self) -> None:
        silence = Silence(self._channel)
        while not self.loss:
            time.sleep(BEAT_SECONDS)
            if silence.look() > CUT_OFF_SECONDS:
                self.lose(f"nothing has come from it for {CUT_OFF_SECONDS:.0f} s")


def _ignore(_: HostLink) -> None: ...
