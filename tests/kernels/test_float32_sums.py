"""Float32 sums of a Triton product, as Triton compiles them: no chain of additions runs through all tiles.

The tests run this file as a program, in a process without Triton's interpreter.
"""

from __future__ import annotations

import json
import re

import pytest

pytest.importorskip("triton", reason="needs the triton package")

import triton
import triton.language as tl

from outrider.kernels.gpu.common import add_product
from tests.kernels.compiled import found_without_interpreter


@triton.jit
def _product_kernel(x, weight, out, K: tl.constexpr):
    row, column = tl.arange(0, 16), tl.arange(0, 32)
    acc = tl.zeros([16, 32], dtype=tl.float32)
    for start in range(0, K, 64):
        k = start + tl.arange(0, 64)
        value = tl.load(x + row[:, None] * K + k[None, :])
        acc = add_product(acc, value, tl.trans(tl.load(weight + column[:, None] * K + k[None, :])))
    tl.store(out + row[:, None] * 32 + column[None, :], acc)


def begins_with_nothing(element: str) -> bool:
    """Whether the product of a tile begins with 0, and not with the sum of the tiles before it."""
    signature = {"x": f"*{element}", "weight": f"*{element}", "out": "*fp32", "K": "constexpr"}
    source = triton.compiler.ASTSource(_product_kernel, signature, {"K": 1024})
    compiled = triton.compile(source, target=triton.backends.compiler.GPUTarget("cuda", 90, 32))
    (begin,) = re.findall(r"tt\.dot [^,]+, [^,]+, (%\w+)", compiled.asm["ttir"])
    return re.search(rf"{re.escape(begin)} = arith\.constant dense<0\.0", compiled.asm["ttir"]) is not None


@pytest.mark.long
def test_float32_tiles_are_summed_one_by_one() -> None:
    assert found_without_interpreter(__file__) == {"fp32": True, "bf16": False}


if __name__ == "__main__":
    print(json.dumps({element: begins_with_nothing(element) for element in ("fp32", "bf16")}))
