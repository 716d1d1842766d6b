"""RankLink carries messages between the host processes of several ranks. No torch here.

Ranks must run the same sums in the same order. A decision that two ranks could take differently, because it depends on
a clock, on free memory or on a failure, is therefore taken by rank 0, or agreed on, through a `RankLink`: which
captured step runs, what is captured while the engine is idle, how many measurements start-up makes, how many pages
there are, and whether every rank has what a row needs. Batches, commands and errands are pickled once and sent to every
rank in one order; rank 0 answers batches, all ranks answer commands.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Generic, TypeVar, cast

from outrider.core.drafter_faults import words_of
from outrider.core.ranks import RankLost

if TYPE_CHECKING:
    from outrider.runner.rank_status import RankStatus

Value = TypeVar("Value")


@dataclass(frozen=True)
class _Decided(Generic[Value]):
    """A decision of rank 0, or the message of the exception that it raised instead."""

    value: Value | None
    error: str | None = None


class Unwatched:
    """The status of a rank that no parent process watches. A rank with a parent has a `RankStatus`."""

    def waiting(self) -> AbstractContextManager[None]:
        return nullcontext()


@dataclass(frozen=True)
class HostPlace:
    """The machine ("node") of a rank. Every node has the same number of ranks, in the order of nodes."""

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
    status: RankStatus | Unwatched = Unwatched()
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
                raise RuntimeError(f"rank 0 failed and its error ends all ranks: {decided.error}")
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
