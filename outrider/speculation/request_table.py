"""RequestTable: stores numbers for every request in one numpy array, so that one operation can change the numbers of
all requests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

Ints: TypeAlias = NDArray[np.int64]
Floats: TypeAlias = NDArray[np.float64]


NOBODY = 0  # the row of requests that have none: its numbers stay 0


class RequestTable:
    """An array with a row of numbers for each request, zeros at first. The row of a forgotten request is reused."""

    def __init__(self, *shape: int) -> None:
        self.values: Floats = np.zeros((1, *shape))
        self._row_of: dict[int, int] = {}
        self._free: list[int] = []

    def find(self, request_id: int) -> int:
        """Return the index of the request's row, or NOBODY if the request has none."""
        return self._row_of.get(request_id, NOBODY)

    def find_all(self, request_ids: Sequence[int]) -> Ints:
        """Return the index of each request's row, or NOBODY for a request that has none."""
        find = self._row_of.get
        return np.array([find(request_id, NOBODY) for request_id in request_ids], dtype=np.int64)

    def add(self, request_id: int) -> int:
        """Return the index of the request's row, which is added if it is missing."""
        row = self._row_of.get(request_id)
        if row is None:
            if not self._free:
                self._grow()
            row = self._row_of[request_id] = self._free.pop()
            self.values[row] = 0.0
        return row

    def add_all(self, request_ids: Sequence[int]) -> Ints:
        """Return the index of each request's row. Missing rows are added."""
        rows = self.find_all(request_ids)
        if not rows.all():
            rows = np.array([self.add(request_id) for request_id in request_ids])
        return rows

    def forget(self, request_id: int) -> None:
        row = self._row_of.pop(request_id, NOBODY)
        if row != NOBODY:
            self._free.append(row)

    def _grow(self) -> None:
        num = len(self.values)
        self.values = np.concatenate([self.values, np.zeros((num + 7, *self.values.shape[1:]))])
        self._free = list(range(len(self.values) - 1, num - 1, -1))
