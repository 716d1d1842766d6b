"""Experts of 4-bit codes for a few pairs, each multiplied by itself, against their reference: codes, activations, odd
sizes, repeated experts. As a program this file compiles the kernel for an H200 and prints what it consists of."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="needs the triton package")

from outrider.kernels import moe
from outrider.kernels.activations import CLAMPED, limited_silu
from outrider.kernels.code_kinds import CODES
from outrider.kernels.gpu.experts import coded_rows as module
from outrider.kernels.gpu.experts import scaled as experts
from outrider.kernels.gpu.experts.coded_rows import CodedRowsTile
from outrider.kernels.gpu.launch.triton_kernel import collecting
from outrider.kernels.moe import ExpertBiases
from outrider.kernels.scaled import Scaled
from tests.kernels.compiled import found_without_interpreter
from tests.kernels.test_triton_scaled_experts import FORMS, Case, assert_close, draw, make

FORMS_OF_4_BITS = [name for name, (code, *_) in FORMS.items() if code in ("int4", "fp4") and name != "int4 of rows"]
ACTIVATIONS = ["silu", "gelu_pytorch_tanh", "relu2", CLAMPED, limited_silu(1.5)]
KERNEL = "_coded_expert_rows_kernel"


def launched_by(case: Case, **options: Any) -> set[str]:
    names: set[str] = set()
    with collecting(lambda function, *_: names.add(function.fn.__name__)):
        experts.scaled_experts(case.x, case.ids, case.weights, case.gate_up, case.down, case.activation, case.added,
                               case.rounds, **options)
    return names


def wide(weight: Scaled, expert: int) -> torch.Tensor:
    return weight[expert].numbers().double()


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activations_of_one_to_eight_pairs(device: torch.device, dtype: torch.dtype, activation: str) -> None:
    """In MXFP4, with biases where there may be some; token rows that choose an expert twice among them."""
    case = Case.drawn(device, dtype, "mxfp4", 4, activation)
    case.ids[3] = 2
    biases = None
    if activation == CLAMPED:
        biases = ExpertBiases(*(draw(4, size, seed=size).to(device, dtype) * 2 for size in (320, 96)))
    for tokens in (slice(0, 1), slice(1, 4), slice(0, 4)):
        part = case.of(tokens)
        given = (part.x, part.ids, part.weights, part.gate_up, part.down, activation, None, False, biases)
        assert_close(experts.scaled_experts(*given), moe.scaled_experts(*given))
    assert launched_by(case) == {KERNEL, "_combine_kernel"}


@pytest.mark.long
@pytest.mark.parametrize("num_tokens", [1, 2, 3, 4])
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("name", FORMS_OF_4_BITS)
def test_every_code_of_4_bits(device: torch.device, dtype: torch.dtype, name: str, activation: str,
                              num_tokens: int) -> None:
    case = Case.drawn(device, dtype, name, num_tokens, activation)
    assert launched_by(case) == {KERNEL, "_combine_kernel"}
    assert_close(case.run(), case.wanted())


@pytest.mark.parametrize("tile", [CodedRowsTile(4, 2, 2, 1), CodedRowsTile(8, 4, 1, 2), CodedRowsTile(16, 32, 3, 4)])
def test_rows_of_several_blocks_and_outputs_that_fill_no_program(device: torch.device, dtype: torch.dtype,
                                                                 tile: CodedRowsTile) -> None:
    """288 inputs are 9 chunks: 5, 3 or 1 blocks, of which the last is not full."""
    weight, ids = make(device, "mxfp4", 38, 288, 3, seed=5), torch.tensor([[2, 0, 2]], device=device)
    x, bias = draw(1, 288).to(device, dtype), draw(3, 38, seed=6).to(device, dtype)
    products = torch.stack([wide(weight, expert) @ x[0].double() + bias[expert] for expert in ids[0].tolist()])
    plain = module.multiply(x, weight, ids, 3, 38, None, bias, False, tile=tile)
    assert_close(plain, products)
    gated = module.multiply(x, weight, ids, 3, 19, "silu", bias, False, tile=tile)
    assert_close(gated, torch.nn.functional.silu(products[:, :19]) * products[:, 19:])
    rows = draw(3, 288, seed=7).to(device, dtype)
    assert_close(module.multiply(rows, weight, ids, 1, 38, None, None, False, is_second=True, tile=tile),
                 torch.stack([wide(weight, expert) @ row.double() for expert, row in zip(ids[0].tolist(), rows,
                                                                                         strict=True)]))


def test_a_pair_has_the_same_bits_among_others_and_what_is_not_finite_stays_in_its_row(device: torch.device,
                                                                                       dtype: torch.dtype) -> None:
    case = Case.drawn(device, dtype, "mxfp4", 4)
    whole = case.run()
    assert torch.equal(case.of(slice(2, 3)).run(), whole[2:3])
    poisoned = replace(case, x=case.x.clone())
    poisoned.x[0, 5], poisoned.x[1, 7] = torch.nan, torch.inf
    out = poisoned.run()
    assert torch.equal(out[2:], whole[2:]) and not out[:2].isfinite().any()


def test_other_products_are_left_to_tiles(device: torch.device, dtype: torch.dtype) -> None:
    """More pairs, codes of 8 bits, token rows that are rounded; groups that no chunk fits; all pairs of exact mode,
    whose bits must not depend on their number."""
    assert KERNEL in launched_by(Case.drawn(device, dtype, "int4 of 32", 4))
    for name, num_tokens in (("int4 of 32", 5), ("int8", 1), ("fp8 unrounded", 1), ("fp8 rows", 1),
                             ("int4 of rows", 1)):
        assert KERNEL not in launched_by(Case.drawn(device, dtype, name, num_tokens)), name
    case, names = Case.drawn(device, dtype, "mxfp4", 1), set()
    with collecting(lambda function, *_: names.add(function.fn.__name__)):
        experts.exact_scaled_experts(case.x, case.ids, case.weights, case.gate_up, case.down, case.activation)
    assert names == {"_scaled_expert_kernel", "_combine_kernel"}
    assert not module.takes(4, case.gate_up, case.down, rounds=True)


def test_the_wrapper_names_what_is_wrong(device: torch.device, dtype: torch.dtype) -> None:
    case = Case.drawn(device, dtype, "mxfp4", 1)
    of_8_bits = Case.drawn(device, dtype, "int8", 1).down
    for argument, weight, x, n, bias in (
            ("x", case.gate_up, case.x[:, :9], 160, None), ("weight", of_8_bits, case.x[:, :40], 72, None),
            ("weight", case.gate_up, case.x, 161, None), ("bias", case.gate_up, case.x, 160, case.x)):
        with pytest.raises(ValueError, match=f"coded_expert_rows: {argument} "):
            module.multiply(x, weight, case.ids, 2, n, "silu", bias, False)


@pytest.mark.long
@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a compiler that no card is behind")
def test_compiles_for_the_card() -> None:
    """At the sizes of gpt-oss-20b each thread asks for all of its codes, 16 bytes at a time, and exchanges nothing
    before its sums are complete; codes of the second product are asked for before the first one has finished."""
    for kernel in found_without_interpreter(__file__):
        assert kernel["loads"] == 3 * 8 and kernel["narrow_loads"] == 0
        assert kernel["barriers"] == 0 and kernel["spilled"] == 0
        assert kernel["code"] == "int4" or kernel["registers"] <= 65536 / (12 * 32), "12 programs on a multiprocessor"
        assert kernel["early_loads"] == (kernel["loads"] if kernel["is_second"] else 0)


def compile_product(code: str, activation: str | None) -> dict[str, Any]:
    from tests.kernels.test_triton_scaled import compile_for_card

    is_second = activation is None
    tile = module.tile_for(not is_second, False)
    number, limit = module.activation_number(activation)
    constants = {"K": 2880, "GROUP": 32, "CODE": CODES.index(code), "PAIRS_PER_ROW": 1 if is_second else 4,
                 "ACTIVATION": number, "LIMIT": limit, "OUTPUTS": tile.outputs, "LANES": tile.lanes,
                 "DEPTH": tile.depth, "UNIT": 16, "HAS_ZEROS": False, "HAS_OFFSETS": False, "HAS_FACTORS": False,
                 "HAS_BIAS": not is_second, "ASM": True, "PDL": True, "EARLY": is_second, "scales_n": 1, "shifts_n": 1}
    kinds = {"x": "*bf16", "codes": "*u8", "scales": "*bf16", "shifts": "*bf16", "factors": "*fp32", "bias": "*bf16",
             "out": "*bf16", "ids": "*i64"}
    made = compile_for_card(module._coded_expert_rows_kernel, constants, kinds, num_warps=tile.num_warps)
    ptx, sass = made.asm["ptx"], made.asm["sass"]
    of_codes = [load.start() for load in re.finditer(r"ld\.global\.L1::evict_first\S*\.v4\.b32", ptx)]
    wait = ptx.index("griddepcontrol.wait")
    return {"loads": len(of_codes), "narrow_loads": ptx.count("ld.global.L1::evict_first") - len(of_codes),
            "early_loads": sum(at < wait for at in of_codes), "barriers": ptx.count("bar.sync"),
            "registers": 1 + max(int(register) for register in re.findall(r"\bR(\d+)\b", sass)),
            "spilled": len(re.findall(r"\b(?:LDL|STL)\b", sass)), "is_second": is_second, "code": code}


if __name__ == "__main__":
    print(json.dumps([compile_product(code, activation) for code in ("fp4", "int4") for activation in (CLAMPED, None)]))
