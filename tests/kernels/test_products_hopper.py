"""Hopper's kernel of exact products as far as no card is needed: it compiles, fits, and is chosen where it runs.

It has no interpreter. `tests/gpu/test_exact.py` compares its bits with those of other tiles on a card.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

triton = pytest.importorskip("triton", reason="needs the triton package")

import triton.experimental.gluon.language as gl
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon._runtime import GluonASTSource

from outrider.kernels.gpu.hopper import products as hopper
from outrider.kernels.gpu.hopper.products import NARROW, WIDE, HopperTile
from outrider.kernels.gpu.launch.triton_kernel import collecting
from outrider.kernels.gpu.linear import exact_linear as products
from tests.kernels.compiled import found_without_interpreter, overwritten_barriers

SHARED_BYTES = 232448  # that a program may have on a Hopper card


def compile_kernel(tile: HopperTile, k: int, chain: int) -> Any:
    function, layout = hopper._product_kernel.function, gl.NVMMASharedLayout(128, 16, rank=2)
    constants = {"K": k, "CHAIN": chain, "BLOCK_N": tile.block_n, "STAGES": tile.num_stages,
                 "FETCH_REGS": hopper.FETCH_REGISTERS, "MULTIPLY_REGS": hopper.MULTIPLY_REGISTERS}
    kinds = {"x_tiles": f"tensordesc<bf16[64,64],{layout}>", "w_tiles": f"tensordesc<bf16[{tile.block_n},64],{layout}>",
             "out": "*bf16"}
    signature = {name: "constexpr" if name in constants else kinds.get(name, "i32") for name in function.arg_names}
    return triton.compile(GluonASTSource(function, signature, constants), target=GPUTarget("cuda", 90, 32),
                          options={"num_warps": 4, "maxnreg": hopper.REGISTERS})


def test_compiles_for_the_card() -> None:
    for kernel in found_without_interpreter(__file__):
        assert kernel["shared"] <= SHARED_BYTES and kernel["multiplies"] and kernel["copies"]
        assert kernel["overwritten"] == [], "the card puts barriers back when it resumes a program that it had stopped"


def test_registers_are_shared_out() -> None:
    """The card gives registers in eights, and not more of them than the program has."""
    assert hopper.MULTIPLY_REGISTERS % 8 == hopper.FETCH_REGISTERS % 8 == 0
    assert 2 * hopper.MULTIPLY_REGISTERS + hopper.FETCH_REGISTERS <= 3 * hopper.REGISTERS


def test_tiles_fill_the_card() -> None:
    """Many outputs take the wide tile, unless more of them would wait for a last few; several chains never do."""
    assert hopper.choose_tile(4096, 28672, 4096, 4096, 132) is WIDE
    assert hopper.choose_tile(1024, 4096, 4096, 4096, 132) is WIDE  # 128 tiles
    assert hopper.choose_tile(1024, 4352, 4096, 4096, 132) is NARROW  # 136 tiles
    assert hopper.choose_tile(4096, 2560, 10240, 3584, 132) is NARROW


def launches(x: torch.Tensor, weight: torch.Tensor, **options: Any) -> list[str]:
    """Names of the kernels that a product launches, with those that are compiled for later steps."""
    found: list[str] = []
    with collecting(lambda function, args, options: found.append(function.__name__)):
        products.exact_linear(x, weight, **options)
    return found


def test_takes_many_rows_that_the_copy_engine_can_read(monkeypatch: pytest.MonkeyPatch) -> None:
    many, few = torch.zeros(600, 64, dtype=torch.bfloat16), torch.zeros(5, 64, dtype=torch.bfloat16)
    weight, own = torch.zeros(40, 64, dtype=torch.bfloat16), "_product_kernel"
    assert own not in launches(many, weight)  # no card
    monkeypatch.setattr(hopper, "is_hopper", lambda device: True)
    assert launches(many, weight)[0] == own and launches(many, weight).count(own) == 3
    assert launches(few, weight)[0] != own and launches(few, weight).count(own) == 2, "later steps have more token rows"
    wider = torch.zeros(600, 72, dtype=torch.bfloat16)
    assert launches(wider[:, :64], weight)[0] == own, "rows at a distance"
    assert own not in launches(wider, torch.zeros(40, 72, dtype=torch.bfloat16)), "columns that no tile divides"
    assert own not in launches(many, weight, bias=torch.zeros(40)), "a bias"
    assert own not in launches(many, weight, out_dtype=torch.float32)
    odd = torch.zeros(600, 65, dtype=torch.bfloat16)
    for other in (odd[:, :64], odd.view(-1)[4:-596].view(600, 64), many.float(), many.half()):
        assert own not in launches(other, weight.to(other.dtype))


if __name__ == "__main__":
    made = [compile_kernel(WIDE, 2560, 2560), compile_kernel(NARROW, 10240, 3584)]
    print(json.dumps([{"shared": kernel.metadata.shared, "multiplies": "wgmma.mma_async" in kernel.asm["ptx"],
                       "copies": "cp.async.bulk.tensor" in kernel.asm["ptx"],
                       "overwritten": overwritten_barriers(kernel.asm["ptx"])} for kernel in made]))
