"""Hopper's kernel of products with few token rows as far as no card is needed: it compiles, fits, and is chosen where
it runs. It has no interpreter: `tests/gpu/test_few_rows.py` compares its results with the reference on a card."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
import torch

triton = pytest.importorskip("triton", reason="needs the triton package")

import triton.experimental.gluon.language as gl
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon._runtime import GluonASTSource

from outrider.kernels.gpu.hopper import few_rows
from outrider.kernels.gpu.hopper.few_rows import (
    LARGE_RING_BYTES,
    RING_BYTES,
    FewRowsPlan,
    make_plan,
    plan_few_rows,
)
from outrider.kernels.gpu.launch.triton_kernel import collecting
from tests.kernels.compiled import found_without_interpreter, overwritten_barriers

SHARED_BYTES = 233472  # of a multiprocessor of a Hopper card, of which each program takes 1024 more than it asks for
REGISTERS = 65536  # of a multiprocessor


def compile_kernel(plan: FewRowsPlan, gate: int) -> Any:
    function, layout = few_rows._few_rows_kernel.function, gl.NVMMASharedLayout(128, 16, rank=2)
    constants = {"GATE": gate, "ROWS": plan.rows, "OUTPUTS": plan.outputs, "STAGES": plan.num_stages,
                 "SPLITS": plan.splits, "FETCH_REGS": few_rows.FETCH_REGISTERS, "LATE": gate == 0, "PDL": True}
    kinds = {"x_tiles": f"tensordesc<bf16[{plan.rows},64],{layout}>", "out": "*bf16", "parts": "*fp32",
             "w_tiles": f"tensordesc<bf16[{plan.outputs},64],{layout}>", "counters": "*i32"}
    signature = {name: "constexpr" if name in constants else kinds.get(name, "i32") for name in function.arg_names}
    return triton.compile(GluonASTSource(function, signature, constants), target=GPUTarget("cuda", 90, 32),
                          options={"num_warps": 4, "maxnreg": plan.registers})


def releases_late(ptx: str) -> bool:
    """Whether a wait for the token rows lies before every place where the next kernel is let go."""
    steps = re.findall(r"griddepcontrol\.(wait|launch_dependents)", ptx)
    assert set(steps) == {"wait", "launch_dependents"}
    return all(before == "wait" for before, own in zip(["none", *steps], steps, strict=False) if own != "wait")


def test_compiles_for_the_card() -> None:
    for kernel in found_without_interpreter(__file__):
        programs = 1 if kernel["is_large"] else 2  # on a multiprocessor
        assert kernel["multiplies"] and kernel["copies"]
        assert kernel["releases_late"] == (not kernel["is_gated"])
        assert programs * (kernel["shared"] + 1024) <= SHARED_BYTES
        assert programs * 32 * kernel["warps"] * kernel["registers"] <= REGISTERS
        assert kernel["overwritten"] == [], "the card puts barriers back when it resumes a program that it had stopped"


def shared_out(num_rows: int, n: int, k: int, *, is_gated: bool = False) -> tuple[int, int] | None:
    """(splits, KB of the ring) of a plan."""
    plan = plan_few_rows(num_rows, n, k, is_gated, 132)
    if plan is None:
        return None
    is_large = plan == make_plan(plan.rows, plan.outputs, plan.splits, is_gated, LARGE_RING_BYTES)
    return plan.splits, 208 if is_large else 104


def test_plans_are_those_that_were_measured() -> None:
    assert [shared_out(rows, 6144, 4096) for rows in (2, 16, 17, 64)] == [(1, 208)] * 4
    assert [shared_out(rows, 4096, 14336) for rows in (2, 16, 17, 64)] == [(2, 208)] * 4
    assert [shared_out(rows, 4096, 4096) for rows in (16, 32, 64)] == [(4, 104), (2, 208), (2, 208)]
    assert [shared_out(rows, 14336, 4096, is_gated=True) for rows in (16, 32, 64)] == [(1, 104)] * 3
    assert [shared_out(rows, 10240, 2560, is_gated=True) for rows in (16, 32, 64)] == [(1, 208), (1, 104), (1, 104)]
    assert [shared_out(rows, 2560, 10240) for rows in (16, 32, 64)] == [(3, 208), (3, 208), None]
    assert [shared_out(rows, 1024, 2048) for rows in (16, 32, 33)] == [(4, 104), (2, 104), None], "a small weight"
    assert shared_out(16, 3072, 1024, is_gated=True) is None
    assert shared_out(16, 512, 32768) is None, "few programs"
    for n in range(64, 30000, 1000):
        for k in (1024, 2048, 4096, 16384):
            plan = plan_few_rows(16, n, k, False, 132)
            assert plan is None or (plan.splits <= k // 64 and (plan.splits == 1 or -(-n // 64) * plan.splits <= 264))


def launches(call: Any, *args: Any) -> list[int]:
    """Token rows of the tiles of the kernels that a product launches."""
    found: list[int] = []
    with collecting(lambda function, args, options: found.append(options["ROWS"])):
        call(*args)
    return found


def test_takes_few_token_rows_that_the_copy_engine_can_read(monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight = (torch.zeros(rows, 4096, dtype=torch.bfloat16) for rows in (16, 4096))
    assert not few_rows.is_fastest(x, weight)  # no card
    monkeypatch.setattr(few_rows, "is_hopper", lambda device: True)
    assert few_rows.is_fastest(x, weight)
    assert launches(few_rows.few_rows_linear, x, weight) == [16, 16, 32, 64], "later steps have other token rows"
    small = torch.zeros(1024, 2048, dtype=torch.bfloat16)
    assert launches(few_rows.few_rows_linear, x[:, :2048].contiguous(), small) == [16, 16, 32], "a small weight"
    wider = torch.zeros(16, 4104, dtype=torch.bfloat16)
    assert few_rows.is_fastest(wider[:, :4096], weight), "token rows at a distance"
    odd = torch.zeros(16, 4097, dtype=torch.bfloat16)
    for other in (odd[:, :4096], odd.view(-1)[1:-15].view(16, 4096), x[:1], x.repeat(5, 1)):
        assert not few_rows.is_fastest(other, weight)
    assert not few_rows.is_fastest(x, weight, torch.zeros(4096))
    assert not few_rows.is_fastest(x, weight[:64]), "a very small weight"
    assert not few_rows.is_fastest(x.half(), weight.half())
    assert not few_rows.is_fastest(x[:, :4040], weight[:, :4040]), "no whole tiles"
    with pytest.raises(ValueError, match="has no plan with 16 token rows"):
        few_rows.few_rows_gated(x[:, :1024], weight[:, :1024], "silu")


if __name__ == "__main__":
    plans = [make_plan(rows, outputs, splits, bool(gate), ring_bytes) for rows in (16, 32, 64)
             for outputs, splits, gate, ring_bytes in ((64, 4, 0, RING_BYTES), (64, 2, 0, LARGE_RING_BYTES),
                                                       (64, 1, 1, RING_BYTES), (128, 1, 0, RING_BYTES))]
    gates = [0, 0, 2, 0] * 3
    made = [compile_kernel(*case) for case in zip(plans, gates, strict=True)]
    print(json.dumps([{"shared": kernel.metadata.shared, "warps": kernel.metadata.num_warps,
                       "registers": plan.registers, "is_large": kernel.metadata.shared > RING_BYTES + 4096,
                       "multiplies": "wgmma.mma_async" in kernel.asm["ptx"],
                       "copies": "cp.async.bulk.tensor" in kernel.asm["ptx"], "is_gated": gate > 0,
                       "releases_late": releases_late(kernel.asm["ptx"]),
                       "overwritten": overwritten_barriers(kernel.asm["ptx"])}
                      for plan, gate, kernel in zip(plans, gates, made, strict=True)]))
