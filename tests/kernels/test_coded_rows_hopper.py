"""Hopper's kernel of products with weights of codes as far as no card is needed: it compiles, fits, and is chosen where
it runs. It has no interpreter: `tests/gpu/test_coded_rows.py` compares its results with the reference on a card."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

triton = pytest.importorskip("triton", reason="needs the triton package")

import triton.experimental.gluon.language as gl
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon._runtime import GluonASTSource

from outrider.kernels import ops, scaled
from outrider.kernels.code_kinds import CODES
from outrider.kernels.gpu.hopper.coded import rows as coded_rows
from outrider.kernels.gpu.hopper.coded.rows_kernel import (
    OF_BLOCKS,
    OF_GROUPS,
    OF_OUTPUTS,
    OF_STEPS,
    coded_rows_kernel,
)
from outrider.kernels.gpu.launch.triton_kernel import collecting
from outrider.kernels.gpu.linear.scaled import scaled_linear
from outrider.kernels.scaled import Scaled
from tests.kernels.compiled import found_without_interpreter, overwritten_barriers

SHARED_BYTES = 233472  # of a multiprocessor of a Hopper card, of which each program takes 1024 more than it asks for
REGISTERS = 65536  # of a multiprocessor
KINDS = {"fp8": OF_OUTPUTS.value, "steps": OF_STEPS.value, "blocks": OF_BLOCKS.value, "int4": OF_STEPS.value,
         "Q4_K": OF_GROUPS.value, "Q2_K": OF_GROUPS.value, "Q6_K": OF_GROUPS.value, "Q8_0": OF_GROUPS.value}
GROUPS = {"int4": 128, "Q4_K": 32, "Q2_K": 16, "Q6_K": 16, "Q8_0": 32}  # columns of a scale


def make(form: str, n: int, k: int) -> Scaled:
    """A weight without content."""
    code = code_of(form)
    group = k if form == "fp8" else GROUPS.get(form, 128)
    codes = torch.zeros(n, k // scaled.codes_per_byte(code), dtype=scaled.code_dtype(code))
    scales = torch.ones(k // group, n, dtype=torch.float32 if code == "fp8" else torch.bfloat16).T
    weight = Scaled(code, group, codes, scales, offsets=scales if form in ("Q4_K", "Q2_K") else None)
    if form == "blocks":
        return weight.with_blocks()
    return weight if code == "fp8" else weight.tiled()


def code_of(form: str) -> str:
    return {"int4": "int4", "Q4_K": "int4", "Q2_K": "int4", "Q6_K": "int8", "Q8_0": "int8"}.get(form, "fp8")


def compile_kernel(form: str, plan: coded_rows.CodedPlan, gate: int) -> Any:
    function, code, group = coded_rows_kernel.function, code_of(form), GROUPS.get(form, 128)
    is_fp8, has_shifts = code == "fp8", form in ("int4", "Q4_K", "Q2_K")
    registers, multiply_registers = plan.registers
    constants = {"CODE": CODES.index(code), "ROWS": plan.rows, "WARP_GROUPS": plan.warp_groups,
                 "SCALES": KINDS[form], "GROUP": group, "HAS_SHIFTS": has_shifts, "HAS_BIAS": True, "GATE": gate,
                 "STAGES": plan.num_stages, "SPLITS": plan.splits, "BYTES": 1024, "REGS": multiply_registers,
                 "FETCH_REGS": coded_rows.FETCH_REGISTERS, "PDL": True}

    def tiles(kind: str, rows: int, columns: int, bits: int, swizzle: int = 128) -> str:
        return f"tensordesc<{kind}[{rows},{columns}],{gl.NVMMASharedLayout(swizzle, bits, rank=2)}>"

    scale = "fp32" if is_fp8 else "bf16"
    kinds = {"x_tiles": tiles("fp8e4nv", plan.rows, 128, 8) if is_fp8 else tiles("bf16", plan.rows, 64, 16),
             "w_tiles": tiles("fp8e4nv", 64, 128, 8) if is_fp8 else tiles("i8" if code == "int8" else "u8", 32, 128, 8),
             "s_tiles": tiles(scale, 128 // group, 64, 32 if is_fp8 else 16, 0),
             "z_tiles": tiles("fp16" if form == "int4" else "bf16", 128 // group, 64, 16, 0),
             "xs_tiles": tiles("fp32", 1, max(plan.rows, 32), 32, 0), "of_x": "*fp32",
             "of_weight": f"*{scale}", "bias": "*bf16", "out": "*bf16", "parts": "*fp32",
             "counters": "*i32"}
    signature = {name: "constexpr" if name in constants else kinds.get(name, "i32") for name in function.arg_names}
    return triton.compile(GluonASTSource(function, signature, constants), target=GPUTarget("cuda", 90, 32),
                          options={"num_warps": 4, "maxnreg": registers})


@pytest.mark.long
def test_compiles_for_the_card() -> None:
    for kernel in found_without_interpreter(__file__):
        programs = 1 if kernel["fills"] else 2  # on a multiprocessor
        assert kernel["multiplies"] and kernel["copies"]
        assert programs * (kernel["shared"] + 1024) <= SHARED_BYTES
        assert programs * 32 * kernel["warps"] * kernel["registers"] <= REGISTERS
        assert kernel["overwritten"] == [], "the card puts barriers back when it resumes a program that it had stopped"


def launches(call: Any, *args: Any) -> list[tuple[str, int]]:
    """Kernels that a product launches, with the token rows of their tiles."""
    found: list[tuple[str, int]] = []
    with collecting(lambda function, args, options: found.append((function.__name__, options.get("ROWS", 0)))):
        call(*args)
    return found


def test_takes_few_token_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.zeros(16, 512, dtype=torch.bfloat16)
    rows, blocks, tiled = (make(form, 256, 512) for form in ("fp8", "blocks", "int4"))
    assert not coded_rows.takes(x, rows, 512), "no card"
    assert not coded_rows.has_order(tiled, torch.bfloat16) and ops.arrange_codes(tiled, x.dtype).is_tiled is False
    tiled = make("int4", 256, 512)
    monkeypatch.setattr(coded_rows, "is_hopper", lambda device: True)
    assert coded_rows.takes(x, rows, 512) and coded_rows.takes(x, blocks, 128) and coded_rows.takes(x, tiled, 0)
    assert coded_rows.takes(x, tiled, 0, "silu") and not coded_rows.takes(x, tiled, 0, "relu2")
    assert not coded_rows.takes(x, make("fp8", 192, 512), 512, "silu"), "a gate of 96 outputs has no whole tiles"
    for other in (x.repeat(5, 1), x[:0], x.half()):
        assert not coded_rows.takes(other, rows, 512)
    assert not coded_rows.takes(x, rows, 0), "token rows that are not rounded"
    assert not coded_rows.takes(x, make("int4", 256, 512).tiled(False), 0)
    assert not coded_rows.takes(x[:, :500], make("fp8", 256, 500), 500), "no whole steps"
    assert coded_rows.has_order(tiled, torch.bfloat16) and not coded_rows.has_order(tiled, torch.float16)
    own = "coded_rows_kernel"
    few = [name_and_rows for name_and_rows in launches(scaled_linear, x, tiled) if name_and_rows[0] == own]
    assert few == [(own, 8), (own, 16), (own, 32), (own, 64)], "later steps have other token rows"
    few = [name_and_rows for name_and_rows in launches(scaled_linear, x, blocks, None, 128) if name_and_rows[0] == own]
    assert few == [(own, 16), (own, 32), (own, 64)]


def test_plans_are_those_that_were_measured() -> None:
    def plan(form: str, num_rows: int, n: int, k: int, is_gated: bool = False) -> tuple[int, int, int, bool]:
        return coded_rows.choose(num_rows, n, k, code_of(form), KINDS[form], is_gated, 132)

    assert [plan("fp8", rows, 4096, 4096) for rows in (1, 32, 64)] == [(rows, 1, 1, True) for rows in (16, 32, 64)]
    assert plan("fp8", 8, 4096, 14336) == (16, 1, 2, True)
    assert plan("blocks", 8, 6144, 4096) == (16, 1, 2, False) and plan("int4", 8, 6144, 4096) == (8, 1, 2, False)
    assert plan("int4", 16, 4096, 14336) == (16, 1, 4, False)
    assert plan("int4", 8, 28672, 4096) == (8, 2, 1, False) and plan("fp8", 64, 128256, 4096) == (64, 1, 1, False)
    assert plan("fp8", 64, 28672, 4096, True) == (64, 2, 1, True)
    for form in KINDS:
        for n in range(64, 30000, 1000):
            for k in (128, 1024, 4096, 16384):
                rows, warp_groups, splits, _ = plan(form, 16, n, k)
                assert splits <= k // 128 and (splits == 1 or -(-n // 64) * splits <= 264) and warp_groups in (1, 2)


if __name__ == "__main__":
    cases = [(form, coded_rows.make_plan(make(form, 1024, 1024), rows, warp_groups, splits, fills, bool(gate)), gate)
             for form, rows, warp_groups, splits, fills, gate in (
                 ("fp8", 16, 1, 2, True, 0), ("fp8", 64, 1, 1, False, 0), ("steps", 16, 2, 1, False, 0),
                 ("steps", 64, 2, 1, True, 1), ("blocks", 32, 2, 1, False, 2), ("blocks", 64, 1, 2, False, 0),
                 ("int4", 8, 2, 1, False, 1), ("int4", 16, 1, 4, False, 0), ("int4", 32, 2, 1, False, 1),
                 ("int4", 64, 2, 1, True, 1), ("int4", 64, 1, 2, False, 0), ("Q4_K", 8, 2, 1, False, 1),
                 ("Q4_K", 64, 1, 2, False, 0), ("Q2_K", 16, 1, 4, False, 0), ("Q6_K", 8, 1, 4, False, 0),
                 ("Q6_K", 64, 2, 1, True, 1), ("Q8_0", 32, 2, 1, False, 0))]
    made = [compile_kernel(*case) for case in cases]
    print(json.dumps([{"shared": kernel.metadata.shared, "warps": kernel.metadata.num_warps,
                       "registers": plan.registers[0], "fills": plan.fills,
                       "multiplies": "wgmma.mma_async" in kernel.asm["ptx"] or "mma.sync" in kernel.asm["ptx"],
                       "copies": "cp.async.bulk.tensor" in kernel.asm["ptx"],
                       "overwritten": overwritten_barriers(kernel.asm["ptx"])}
                      for (_, plan, _), kernel in zip(cases, made, strict=True)]))
