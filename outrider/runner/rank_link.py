"""What the hosts of several ranks tell each other, and what each of them shows of itself. No torch here.

Ranks must run the same sums in the same order. A decision that two ranks could take differently, because it depends on
a clock, on free memory or on a failure, is therefore taken by rank 0, or agreed on, through a `RankLink`.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, MutableSequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Generic, TypeVar, cast

from outrider.core.drafter_faults import words_of
from outrider.core.ranks import RankLost

Value = TypeVar("Value")


@dataclass(frozen=True)
class _Decided(Generic[Value]):
    """A decision of rank 0, or the words of the exception that it raised."""

    value: Value | None
    error: str | None = None


@dataclass(frozen=True)
class RankLink:
    """Pipes between the hosts of the ranks. Every rank calls the same methods in the same order, from one thread at a
    time."""

    rank: int = 0
    count: int = 1
    pipes: tuple[Connection, ...] = ()  # on rank 0 one to every other rank, in their order; elsewhere the one to rank 0

    def decide(self, make: Callable[[], Value]) -> Value:
        """The value that rank 0 makes, on every rank. If `make` raises there, this raises on every rank."""
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
        """The values of all ranks in their order, on every rank. Waits for all ranks."""
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
            return self.pipes[index].recv()
        except (EOFError, OSError) as error:
            raise self._lost(index) from error

    def _lost(self, index: int) -> RankLost:
        return RankLost(f"rank {self.rank} lost rank {index + 1 if self.rank == 0 else 0}: its process has ended")


ONE_RANK_LINK = RankLink()


class Doing(enum.IntEnum):
    """What a rank does."""

    STARTING = 0
    IDLE = 1
    STEP = 2
    COMMAND = 3
    WAITING = 4  # in a sum or a gather


_WORDS = {Doing.STARTING: "was starting", Doing.IDLE: "was idle", Doing.STEP: "ran step {}",
          Doing.COMMAND: "carried out command {}", Doing.WAITING: "waited for the other ranks in a sum"}
_BEATS, _PROGRESS, _DOING, _NUMBER = range(4)
STATUS_FIELDS = 4  # numbers that a rank shows of itself


class RankStatus:
    """What one rank shows of itself in memory that it shares with its parent. One process writes, the other reads."""

    def __init__(self, numbers: MutableSequence[int]) -> None:
        """numbers: STATUS_FIELDS shared 64-bit integers, zero at first."""
        self._numbers = numbers

    def beat(self) -> None:
        """Show that the process runs."""
        self._numbers[_BEATS] += 1

    def begin(self, doing: Doing, number: int | None = None) -> None:
        self._numbers[_DOING] = doing
        if number is not None:
            self._numbers[_NUMBER] = number
        self._numbers[_PROGRESS] += 1

    @property
    def doing(self) -> Doing:
        return Doing(self._numbers[_DOING])

    @property
    def beats(self) -> int:
        return self._numbers[_BEATS]

    @property
    def progress(self) -> int:
        """Rises whenever the rank begins something."""
        return self._numbers[_PROGRESS]

    @property
    def words(self) -> str:
        return _WORDS[self.doing].format(self._numbers[_NUMBER])
