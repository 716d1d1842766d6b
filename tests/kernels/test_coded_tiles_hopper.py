"""Hopper's kernel of products with int4 and int8 codes for 65 token rows and more: its results by the emulator of
Gluon, and what the compiler makes of it. `tests/gpu/test_coded_tiles.py` compares its results on a card."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

triton = pytest.importorskip("triton", reason="needs the triton package")

import triton.experimental.gluon.language as gl
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon._runtime import GluonASTSource

from outrider.kernels import ops, scaled
from outrider.kernels.code_kinds import CODES
from outrider.kernels.gpu.hopper.coded import rows as coded_rows
from outrider.kernels.gpu.hopper.coded import tiles as coded_tiles
from outrider.kernels.gpu.hopper.coded.tiles import SHAPES, TilePlan, TileShape, make_plan
from outrider.kernels.gpu.hopper.coded.tiles_kernel import coded_tiles_kernel
from outrider.kernels.gpu.launch.triton_kernel import collecting
from outrider.kernels.gpu.linear.scaled import scaled_linear
from outrider.kernels.scaled import Scaled
from tests.kernels.compiled import found_without_interpreter, overwritten_barriers
from tests.kernels.descriptors import stray_descriptors
from tests.kernels.gluon_emulator import emulate

SHARED_BYTES = 233472 - 1024  # of a program that has a multiprocessor for itself
REGISTERS = 65536  # of a multiprocessor
# Codes and columns of a scale.
FORMS = {
    "Q4_K": ("int4", 32), "Q2_K": ("int4", 16), "Q6_K": ("int8", 16), "Q8_0": ("int8", 32), "int8 of 64": ("int8", 64),
    "int4": ("int4", 128), "int4 with zeros": ("int4", 128), "int4 with float16 scales": ("int4", 128),
}
SMALL, SHORT, TALL, WIDE, LOW = SHAPES


def make(form: str, n: int, k: int) -> tuple[Scaled, torch.Tensor]:
    """(a weight in tiles, its numbers)."""
    generator = torch.Generator().manual_seed(n + k)
    code, group = FORMS[form]
    groups, width = k // group, k // scaled.codes_per_byte(code)
    codes = torch.randint(0, 256, (n, width), generator=generator, dtype=torch.uint8).view(scaled.code_dtype(code))
    scales = (0.5 + torch.rand(groups, n, generator=generator)) / 64
    zeros = torch.randint(-8, 9, (groups, n), generator=generator).half().T if "zeros" in form else None
    offsets = (torch.randn(groups, n, generator=generator) / 32).bfloat16().T if form in ("Q4_K", "Q2_K") else None
    weight = Scaled(code, group, codes, scales.to(torch.float16 if "float16" in form else torch.bfloat16).T, zeros,
                    offsets=offsets)
    numbers = weight.numbers().double()
    return weight.tiled(), numbers


class Emulated:
    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return lambda *args, **options: emulate(coded_tiles_kernel, grid, args, options)


def short_rings(weight: Scaled, shape: TileShape, splits: int) -> TilePlan:
    """A plan whose places are written several times."""
    return replace(make_plan(weight, shape, splits, 2), num_stages=2, num_x_stages=3)


def error(made: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((made.double() - wanted).norm() / wanted.norm())


@pytest.mark.parametrize("form", FORMS)
def test_products(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Odd numbers of token rows, tiles that lie partly outside, several programs for a tile, biases and gates."""
    monkeypatch.setattr(coded_tiles, "coded_tiles_kernel", Emulated())
    torch.manual_seed(0)
    for shape, splits, num_rows, activation in (
        (SMALL, 2, 65, None), (SHORT, 2, 70, None), (TALL, 3, 300, None), (TALL, 1, 130, "silu"), (WIDE, 2, 259, None),
        (LOW, 1, 67, "gelu_pytorch_tanh"), (replace(SMALL, warp_groups=1), 1, 129, None),
    ):
        n, k = 384 if activation else 320, 640
        weight, numbers = make(form, n, k)
        x, bias = torch.randn(num_rows, k).bfloat16(), torch.randn(n).bfloat16()
        wanted = F.linear(x.double(), numbers, bias.double())
        if activation:
            gate, up = wanted.bfloat16().double().chunk(2, 1)
            wanted = (F.silu(gate) if activation == "silu" else F.gelu(gate, approximate="tanh")) * up
        plan = short_rings(weight, shape, splits)
        made = coded_tiles.coded_tiles(x, weight, bias, torch.bfloat16, activation=activation, plan=plan, pdl=False)
        assert error(made, wanted) < (8e-3 if activation else 4e-3), (shape, splits, num_rows)


def test_results_do_not_depend_on_other_token_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coded_tiles, "coded_tiles_kernel", Emulated())
    weight, numbers = make("Q4_K", 256, 512)
    x = torch.randn(66, 512).bfloat16()
    plan = short_rings(weight, SMALL, 1)
    alone = coded_tiles.coded_tiles(x, weight, None, torch.float32, plan=plan, pdl=False)
    assert alone.dtype == torch.float32 and error(alone, F.linear(x.double(), numbers)) < 4e-3
    broken = torch.cat((x, torch.full((9, 512), float("nan")).bfloat16()))
    beside = coded_tiles.coded_tiles(broken, weight, None, torch.float32, plan=plan, pdl=False)
    torch.testing.assert_close(beside[:66], alone)
    assert beside[66:].isnan().all()
    assert coded_tiles.coded_tiles(x[:0], weight, None, torch.bfloat16).shape == (0, 256)


def test_refusals() -> None:
    weight, _ = make("int4", 320, 512)
    x = torch.zeros(70, 512, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="x"):
        coded_tiles.coded_tiles(x[:, :256], weight, None, torch.bfloat16)
    with pytest.raises(ValueError, match="not in tiles"):
        coded_tiles.coded_tiles(x, make("int4", 320, 512)[0].tiled(False), None, torch.bfloat16)
    with pytest.raises(ValueError, match="activation"):
        coded_tiles.coded_tiles(x, weight, None, torch.bfloat16, activation="silu")
    with pytest.raises(ValueError, match="bias"):
        coded_tiles.coded_tiles(x, weight, x[0, :319], torch.bfloat16)
    with pytest.raises(ValueError, match="plan"):
        gated, _ = make("int4", 384, 512)
        coded_tiles.coded_tiles(x, gated, None, torch.bfloat16, activation="silu", plan=make_plan(gated, SMALL, 1, 2))


def test_is_chosen_between_few_and_many_token_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    weight, _ = make("Q4_K", 384, 512)
    x = torch.zeros(128, 512, dtype=torch.bfloat16)
    assert not coded_tiles.takes(x, weight), "no card"
    for module in (coded_rows, coded_tiles):
        monkeypatch.setattr(module, "is_hopper", lambda device: True)
    assert coded_tiles.takes(x, weight) and coded_tiles.takes(x, weight, None, 0, "silu")
    assert coded_tiles.takes_wide(x, weight) and not coded_tiles.takes(x, weight, None, 0, "relu2")
    assert not coded_tiles.takes(x, make("Q4_K", 320, 512)[0], None, 0, "silu"), "a gate of 160 outputs"
    for other in (x[:64], x.repeat(5, 1), x.half()):
        assert not coded_tiles.takes(other, weight)
    assert not coded_tiles.takes(x, make("Q4_K", 384, 512)[0].tiled(False))
    first = {operation.name: operation.kernels[0].function for operation in (ops.scaled_linear, ops.scaled_gated)}
    assert all(str(function).startswith("outrider.kernels.gpu.hopper.coded.tiles:") for function in first.values())
    found: list[str] = []
    with collecting(lambda function, args, options: found.append(function.__name__)):
        scaled_linear(x[:16], weight)
    assert found.count("coded_tiles_kernel") == len(list(coded_tiles.later_choices(384, 512, False, 132)))


def test_a_plan_keeps_all_multiprocessors_busy() -> None:
    for n in range(1024, 30000, 1024):
        for k in (1024, 4096, 14336):
            for num_rows in (65, 128, 200, 256, 512):
                for is_gated in (False, True):
                    shape, splits = coded_tiles.choose(num_rows, n, k, is_gated, 132)
                    programs = -(-num_rows // shape.rows) * -(-n // shape.outputs) * splits
                    assert splits == 1 or programs <= 132, "all programs of a split run at once"
                    assert not is_gated or (splits == 1 and shape.blocks == 2)


def compile_kernel(form: str, shape: TileShape, splits: int, gate: int, is_wide: bool) -> dict[str, Any]:
    weight, _ = make(form, 1024, 1024)
    (code, group), plan = FORMS[form], make_plan(weight, shape, splits, 4 if is_wide else 2)
    registers, multiply_registers = shape.registers
    constants = {"CODE": CODES.index(code), "ROWS": shape.rows, "WARP_GROUPS": shape.warp_groups,
                 "BLOCKS": shape.blocks, "GROUP": group, "SHIFTS": coded_tiles.shift_kind(weight), "HAS_BIAS": True,
                 "GATE": gate, "STAGES": plan.num_stages, "X_STAGES": plan.num_x_stages, "IS_SPLIT": splits > 1,
                 "BYTES": coded_tiles.step_bytes(weight, shape), "REGS": multiply_registers,
                 "FETCH_REGS": coded_tiles.FETCH_REGISTERS, "PDL": True}

    def tiles(kind: str, rows: int, columns: int, bits: int, swizzle: int = 128) -> str:
        return f"tensordesc<{kind}[{rows},{columns}],{gl.NVMMASharedLayout(swizzle, bits, rank=2)}>"

    kinds = {"x_tiles": tiles("bf16", shape.rows, 64, 16), "bias": "*bf16", "out": "*fp32" if is_wide else "*bf16",
             "w_tiles": tiles("i8" if code == "int8" else "u8", 32, 128, 8), "parts": "*fp32", "counters": "*i32",
             "s_tiles": tiles("fp16" if "float16" in form else "bf16", 128 // group, 64, 16, 0),
             "z_tiles": tiles("fp16" if "zeros" in form else "bf16", 128 // group, 64, 16, 0)}
    function = coded_tiles_kernel.function
    signature = {name: "constexpr" if name in constants else kinds.get(name, "i32") for name in function.arg_names}
    kernel = triton.compile(GluonASTSource(function, signature, constants), target=GPUTarget("cuda", 90, 32),
                            options={"num_warps": 4, "maxnreg": registers})
    return {"shared": kernel.metadata.shared, "registers": 32 * kernel.metadata.num_warps * registers,
            "multiplies": "wgmma.mma_async" in kernel.asm["ptx"], "copies": "cp.async.bulk.tensor" in kernel.asm["ptx"],
            "strays": stray_descriptors(kernel), "overwritten": overwritten_barriers(kernel.asm["ptx"])}


@pytest.mark.long
def test_compiles_for_the_card() -> None:
    for kernel in found_without_interpreter(__file__):
        assert kernel["multiplies"] and kernel["copies"]
        assert kernel["shared"] <= SHARED_BYTES and kernel["registers"] <= REGISTERS
        assert kernel["strays"] == [], "matrix instructions read other memory than the program's"
        assert kernel["overwritten"] == [], "the card puts barriers back when it resumes a program that it had stopped"


if __name__ == "__main__":
    print(json.dumps([compile_kernel(*case) for case in (
        ("Q4_K", TALL, 1, 1, False), ("Q2_K", WIDE, 2, 0, False), ("int8 of 64", SMALL, 1, 0, True),
        ("int4 with zeros", LOW, 2, 0, False))]))
