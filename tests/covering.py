"""Large grids of test cases: the quick tests run a selection in which every combination of a few axes occurs, and the
long tests run the whole grid.

A mistake that needs two or three conditions at once is met by a selection that holds every pair or every triple of
values, with a small part of the cells.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import combinations
from typing import Any

import pytest

Values = tuple[Any, ...]
ORDINARY = 100  # examples of a test that asks for no number of its own


def combinations_of(cell: Values, strength: int) -> frozenset[tuple[Any, ...]]:
    """Every combination of `strength` axes of a cell, each as the axes' indices and values."""
    return frozenset((axes, tuple(cell[i] for i in axes)) for axes in combinations(range(len(cell)), strength))


def num_examples(quick: int) -> int:
    """Examples of a test of hypothesis that has to make engines or interpret kernels: so many in the quick tests, and
    as large a part of the long profile's as that is of an ordinary test's."""
    from hypothesis import settings

    return quick * settings().max_examples // ORDINARY


def covering(cells: Iterable[Values], strength: int) -> list[Values]:
    """A selection of the cells in which every combination occurs that occurs in any cell, found greedily: the cell
    with the most new combinations is next, the first of equals. It is the same in every process."""
    held = {cell: combinations_of(cell, strength) for cell in cells}
    missing = frozenset[tuple[Any, ...]]().union(*held.values())
    chosen: list[Values] = []
    while missing:
        best = max(held, key=lambda cell: len(held[cell] & missing))
        chosen.append(best)
        missing -= held.pop(best)
    return chosen


def grid(cells: Sequence[Values], strength: int, also: Iterable[Values] = (),
         arguments: Callable[..., Values] = lambda *cell: cell) -> list[Any]:
    """A test's parameters, one for each cell; those outside the covering selection and `also` are for the long tests.
    `arguments`: what the test takes for a cell's values, if not the values themselves."""
    quick = {*covering(cells, strength), *also}
    return [pytest.param(*(given := arguments(*cell)), id="-".join(map(str, given)),
                         marks=() if cell in quick else pytest.mark.long) for cell in cells]
