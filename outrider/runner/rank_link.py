"""RankLink carries messages between the host processes of several ranks. RankStatus shows a rank's state to its parent.
No torch here.

Ranks must run the same sums in the same order. A decision that two ranks could take differently, because it depends on
a clock, on free memory or on a failure, is therefore taken by rank 0, or agreed on, through a `RankLink`: which
captured step runs, what is captured while the engine is idle, how many measurements start-up makes, how many pages
there are, and whether every rank has what a row needs. Batches, commands and errands are pickled once and sent to every
rank in one order; rank 0 answers batches, all ranks answer commands.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator, MutableSequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Generic, TypeVar, cast

from outrider.core.drafter_faults import words_of
from outrider.core.ranks import RankLost

Value = TypeVar("Value")


@dataclass(frozen=True)
class _Decided(Generic[Value]):
    """A decision of rank 0, or the message of the exception that it raised instead."""

    value: Value | None
    error: str | None = None


class Doing(enum.IntEnum):
    """The kind of work that a rank was last told to do."""

    START = 0
    NOTHING = 1
    STEP = 2
    COMMAND = 3


_WORDS = {Doing.START: "was starting", Doing.NOTHING: "was idle", Doing.STEP: "ran step {}",
          Doing.COMMAND: "carried out command {}"}
_BEATS, _PROGRESS, _DOING, _NUMBER, _WAITS = range(5)
STATUS_FIELDS = 5  # numbers that a rank shows of itself


class RankStatus:
    """The state of one rank in shared memory, which the rank's process writes and its parent reads."""

    def __init__(self, numbers: MutableSequence[int]) -> None:
        """numbers: STATUS_FIELDS shared 64-bit integers, zero at first."""
        self._numbers = numbers

    def beat(self) -> None:
        """Increment the counter that shows that the process runs."""
        self._numbers[_BEATS] += 1

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """A context that marks the rank as waiting for other ranks, in a sum or for an agreement. Meanwhile another
        thread of the rank may take the next step from the parent."""
        self._numbers[_WAITS] = 1
        yield
        self._numbers[_WAITS] = 0
        self._numbers[_PROGRESS] += 1

    def begin(self, doing: Doing, number: int | None = None) -> None:
        self._numbers[_DOING] = doing
        if number is not None:
            self._numbers[_NUMBER] = number
        self._numbers[_PROGRESS] += 1

    @property
    def is_waiting(self) -> bool:
        return bool(self._numbers[_WAITS])

    @property
    def is_starting(self) -> bool:
        return self._numbers[_DOING] == Doing.START

    @property
    def beats(self) -> int:
        return self._numbers[_BEATS]

    @property
    def progress(self) -> int:
        """A number that rises whenever the rank begins some work, or no longer has to wait for other ranks."""
        return self._numbers[_PROGRESS]

    @property
    def words(self) -> str:
        did = _WORDS[Doing(self._numbers[_DOING])].format(self._numbers[_NUMBER])
        return f"{did} and waited for other ranks" if self.is_waiting else did


@dataclass(frozen=True)
class HostPlace:
    """The machine ("node") of a rank. Every node has equally many ranks, in the order of nodes."""

    node: int = 0
    num_nodes: int = 1
    address: str = "127.0.0.1"  # at which the ranks of other nodes reach it

    @property
    def words(self) -> str:
        return f" on node {self.node} ({self.address})" if self.num_nodes > 1 else ""


@dataclass(frozen=True)
class RankLink:
    """Pipes between the host processes of the ranks. Every rank calls the same methods in the same order, from one
    thread at a time."""

    rank: int = 0
    count: int = 1
    pipes: tuple[Connection, ...] = ()  # on rank 0 one to every other rank, in their order; elsewhere the one to rank 0
    status: RankStatus = field(default_factory=lambda: RankStatus([0] * STATUS_FIELDS))  # a parent may look at it
    host: HostPlace = HostPlace()

    @property
    def num_local(self) -> int:
        """The number of ranks on this rank's machine."""
        return self.count // self.host.num_nodes

    def decide(self, make: Callable[[], Value]) -> Value:
        """Call `make` on rank 0, and return its value on every rank. If `make` raises, this raises on every rank."""
        if self.rank > 0:
            decided = cast("_Decided[Value]", self._receive(0))
            if decided.error is not None:
                raise RuntimeError(f"rank 0 raised {decided.error}")
            return cast(Value, decided.value)
        try:
            value = make()
        except Exception as error:
            self._send_all(_Decided(None, words_of(error)))
            raise
        self._send_all(_Decided(value))
        return value

    def gather(self, value: Value) -> list[Value]:
        """Wait for the values of all ranks, and return them in rank order on every rank."""
        if self.rank > 0:
            self._send(0, value)
            return cast("list[Value]", self._receive(0))
        values = [value, *(cast(Value, self._receive(index)) for index in range(len(self.pipes)))]
        self._send_all(values)
        return values

    def _send_all(self, message: object) -> None:
        for index in range(len(self.pipes)):
            self._send(index, message)

    def _send(self, index: int, message: object) -> None:
        try:
            self.pipes[index].send(message)
        except OSError as error:
            raise self._lost(index) from error

    def _receive(self, index: int) -> object:
        try:
            with self.status.waiting():
                return self.pipes[index].recv()
        except (EOFError, OSError) as error:
            raise self._lost(index) from error

    def _lost(self, index: int) -> RankLost:
        return RankLost(f"rank {self.rank} lost rank {index + 1 if self.rank == 0 else 0}: its process has ended")


ONE_RANK_LINK = RankLink()
