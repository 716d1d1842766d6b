"""The selection of cells that stands for a grid: every combination occurs, few cells do, and it never changes."""

from __future__ import annotations

from itertools import product

import pytest

from tests.covering import combinations_of, covering, grid

AXES = ("abc", (5, 17, 64), (False, True), (False, True), (False, True), (False, True))
CELLS = list(product(*AXES))


@pytest.mark.parametrize(("strength", "most"), [(1, 3), (2, 12), (3, 36)])
def test_every_combination_of_the_grid_occurs_in_few_cells(strength: int, most: int) -> None:
    chosen = covering(CELLS, strength)
    everything = {one for cell in CELLS for one in combinations_of(cell, strength)}
    assert {one for cell in chosen for one in combinations_of(cell, strength)} == everything
    assert len(chosen) <= most and len(set(chosen)) == len(chosen)
    assert {one for cell in chosen[:-1] for one in combinations_of(cell, strength)} < everything, "no cell is in vain"


def test_combinations_that_no_cell_has_are_not_missed() -> None:
    cells = [cell for cell in CELLS if cell[:2] != ("a", 5)]
    assert all(cell in cells for cell in covering(cells, 2))


def test_every_cell_is_a_parameter_and_the_rest_is_for_the_long_tests() -> None:
    parameters = grid(CELLS, 2, also=[CELLS[-1]], arguments=lambda family, *rest: (family, rest))
    assert [(family, *rest) for family, rest in (parameter.values for parameter in parameters)] == CELLS
    quick = {(family, *rest) for family, rest in (parameter.values for parameter in parameters if not parameter.marks)}
    assert quick == {*covering(CELLS, 2), CELLS[-1]}
    assert parameters[0].id == "a-(5, False, False, False, False)"
