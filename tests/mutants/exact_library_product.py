"""Exact mode leaves products with many token rows to the library, which adds in another order than for few."""

from __future__ import annotations

from typing import Any

from outrider.kernels.cpu import products

NAME = "exact mode with library products"
TESTS = ["tests/engine/test_exact_mode.py::test_bits_are_a_function_of_the_request[llama-chunks]"]


def apply() -> None:
    def inexact(*args: Any) -> Any:
        made = products.make_product(*args)
        made.few_rows = range(1, 65)  # where native products end on a machine that has a faster library
        return made

    products.make_exact_product = inexact
