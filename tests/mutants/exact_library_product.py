"""Exact mode leaves products with many token rows to the library, which adds in another order than for few."""

from __future__ import annotations

from typing import Any

from outrider.formats import dense

NAME = "exact mode with library products"
TESTS = ["tests/engine/test_exact_mode.py::test_bits_are_a_function_of_the_request[llama-chunks]"]


def apply() -> None:
    make_product = dense.make_product

    def inexact(*args: Any, exact: bool = False, **options: Any) -> Any:
        made = make_product(*args, **options)
        made.few_rows = range(1, 65)  # where native products end on a machine that has a faster library
        return made

    dense.make_product = inexact
