"""Triton multiplies float32 matrices in ten bits (TF32) unless a product says otherwise, so every product says it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import outrider

KERNELS = Path(outrider.__file__).parent / "kernels" / "gpu"
SIXTEEN_BITS_ONLY = {"_dot_of_halves"}  # functions that make their operands float16 themselves


def silent_products(source: str) -> Iterator[int]:
    """Lines of `tl.dot` without an `input_precision`."""
    for function in ast.walk(ast.parse(source)):
        if isinstance(function, ast.FunctionDef) and function.name not in SIXTEEN_BITS_ONLY:
            for node in ast.walk(function):
                if isinstance(node, ast.Call) and ast.unparse(node.func) == "tl.dot":
                    if all(keyword.arg != "input_precision" for keyword in node.keywords):
                        yield node.lineno


def test_every_product_of_a_kernel_says_how_it_multiplies_float32() -> None:
    files = sorted(KERNELS.rglob("*.py"))
    assert len(files) > 40
    assert [f"{file.name}:{line}" for file in files for line in silent_products(file.read_text())] == []


def test_a_product_that_says_nothing_is_found() -> None:
    kernel = "def f(a, b):\n    a = tl.dot(a, b, input_precision='ieee')\n    return tl.dot(a, b)"
    assert list(silent_products(kernel)) == [3]
