"""RankStatus shows a rank's state to its parent process. No torch here."""

from __future__ import annotations

import enum
from collections.abc import Iterator, MutableSequence
from contextlib import contextmanager


class Doing(enum.IntEnum):
    """The kind of work that a rank was last ordered to do."""

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
        """Return a number that rises whenever the rank begins some work, or no longer has to wait for other ranks."""
        return self._numbers[_PROGRESS]

    @property
    def words(self) -> str:
        did = _WORDS[Doing(self._numbers[_DOING])].format(self._numbers[_NUMBER])
        return f"{did} and waited for other ranks" if self.is_waiting else did
