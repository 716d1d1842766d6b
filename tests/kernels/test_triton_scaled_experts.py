"""Experts whose weights are codes with scales, in Triton, against their reference: every code, odd sizes, few and many
token rows, experts without any. As a program this file compiles kernels for an H200 and prints what they consist of."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="needs the triton package")

from outrider.kernels import moe, scaled
from outrider.kernels.code_kinds import CODES
from outrider.kernels.gpu.experts import scaled as module
from outrider.kernels.gpu.experts.scaled import scaled_experts
from outrider.kernels.gpu.launch.triton_kernel import collecting
from outrider.kernels.gpu.linear.scaled import ScaledTile
from outrider.kernels.gpu.linear.scaled_codes import expand
from outrider.kernels.scaled import Scaled
from tests.kernels.compiled import found_without_interpreter

TILES = ScaledTile(16, 64, 4, 1), ScaledTile(32, 32, 4, 1)
CARD_TILES = ScaledTile(16, 64, 4, 3), ScaledTile(64, 64, 4, 3), ScaledTile(128, 128, 8, 3)
# (code, hidden size, expert size, group or 0 for all inputs, whether token rows are rounded, whether there are zeros)
FORMS = {
    "fp8 rows": ("fp8", 200, 72, 0, True, False),
    "fp8 blocks": ("fp8", 152, 136, 128, True, False),
    "fp8 unrounded": ("fp8", 136, 40, 0, False, False),
    "int8": ("int8", 72, 40, 0, False, True),
    "int4 of 128": ("int4", 256, 128, 128, False, False),
    "int4 of 64": ("int4", 192, 64, 64, False, True),
    "int4 of 32": ("int4", 96, 32, 32, False, False),
    "Q4_K": ("int4", 96, 64, 32, False, False),
    "Q5_K": ("int8", 96, 64, 32, False, False),
    "int4 of rows": ("int4", 96, 40, 0, False, True),
    "mxfp4": ("fp4", 96, 160, 32, False, False),
    "nvfp4": ("fp4", 80, 48, 16, False, False),
}


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def make(device: torch.device, name: str, rows: int, k: int, num_experts: int, seed: int) -> Scaled:
    code, _, _, group, _, has_zeros = FORMS[name]
    generator = torch.Generator().manual_seed(seed)
    group, per_byte = group or k, scaled.codes_per_byte(code)
    codes = torch.randint(0, 256, (num_experts, rows, k // per_byte), generator=generator, dtype=torch.uint8)
    codes = draw(num_experts, rows, k, seed=seed).to(torch.float8_e4m3fn) if code == "fp8" else codes.view(
        scaled.code_dtype(code))
    groups = num_experts, -(-k // group), rows  # in memory, as in an engine
    scales = (0.5 + torch.rand(groups, generator=generator)) / 64
    scales = (scales * 64).to(torch.float8_e4m3fn) if name == "nvfp4" else scales
    zeros = torch.randint(-8, 9, groups, generator=generator).half().to(device).mT if has_zeros else None
    factors = torch.rand(num_experts, rows, 1, generator=generator).to(device) / 64 if name == "nvfp4" else None
    offsets = draw(*groups, seed=seed).to(device).mT / 64 if name in ("Q4_K", "Q5_K") else None
    return Scaled(code, group, codes.to(device), scales.to(device).mT, zeros, factors, offsets=offsets)


@dataclass
class Case:
    x: torch.Tensor
    ids: torch.Tensor
    weights: torch.Tensor
    gate_up: Scaled
    down: Scaled
    activation: str
    added: torch.Tensor | None
    rounds: bool

    @classmethod
    def drawn(cls, device: torch.device, dtype: torch.dtype, name: str, num_tokens: int, activation: str = "silu",
              num_experts: int = 4, top_k: int = 2) -> Case:
        _, hidden, width, _, rounds, _ = FORMS[name]
        ids = torch.rand(num_tokens, num_experts, generator=torch.Generator().manual_seed(1)).topk(top_k, -1).indices
        ids[ids == 1] = 0  # an expert without pairs, and some that come twice in a token row
        rows = width if activation == "relu2" else 2 * width
        return cls(draw(num_tokens, hidden).to(device, dtype), ids.to(device),
                   draw(num_tokens, top_k, seed=2).abs().to(device), make(device, name, rows, hidden, num_experts, 3),
                   make(device, name, hidden, width, num_experts, 4), activation, None, rounds)

    def run(self, tile: ScaledTile | None = None, as_numbers: bool | None = None) -> torch.Tensor:
        return scaled_experts(self.x, self.ids, self.weights, self.gate_up, self.down, self.activation, self.added,
                              self.rounds, as_numbers=as_numbers, tile=tile)

    def wanted(self) -> torch.Tensor:
        return moe.scaled_experts(self.x, self.ids, self.weights, self.gate_up, self.down, self.activation, self.added,
                                  self.rounds)

    def of(self, tokens: slice) -> Case:
        added = None if self.added is None else self.added[tokens]
        return replace(self, x=self.x[tokens], ids=self.ids[tokens], weights=self.weights[tokens], added=added)


def assert_close(actual: torch.Tensor, wanted: torch.Tensor, rounds: bool = False) -> None:
    # Where the activation's results are rounded to fp8, one that lies between two codes may become either of them.
    limit = 2e-2 if actual.dtype == torch.bfloat16 or rounds else 1e-5
    assert float((actual.double() - wanted.double()).norm() / wanted.double().norm()) < limit


def tiles_for(device: torch.device) -> tuple[ScaledTile, ...]:
    return CARD_TILES if device.type == "cuda" else TILES


@pytest.mark.parametrize("num_tokens", [1, 7])
@pytest.mark.parametrize("name", FORMS)
def test_every_code(device: torch.device, dtype: torch.dtype, name: str, num_tokens: int) -> None:
    case = Case.drawn(device, dtype, name, num_tokens)
    assert_close(case.run(), case.wanted(), case.rounds)


@pytest.mark.long
@pytest.mark.parametrize("num_tokens", [2, 64, 65, 300])
@pytest.mark.parametrize("activation", ["silu", "gelu_pytorch_tanh", "relu2"])
@pytest.mark.parametrize("name", FORMS)
def test_every_code_with_many_token_rows(device: torch.device, dtype: torch.dtype, name: str, activation: str,
                                         num_tokens: int) -> None:
    case = Case.drawn(device, dtype, name, num_tokens, activation)
    assert_close(case.run(), case.wanted(), case.rounds)


@pytest.mark.parametrize("activation", ["gelu_pytorch_tanh", "relu2"])
def test_other_activations(device: torch.device, dtype: torch.dtype, activation: str) -> None:
    for name in ("fp8 rows", "mxfp4"):
        case = Case.drawn(device, dtype, name, 3, activation)
        assert_close(case.run(), case.wanted(), case.rounds)


@pytest.mark.parametrize("name", ["fp8 rows", "int4 of 32"])
def test_pairs_are_sorted_where_there_are_many(device: torch.device, dtype: torch.dtype, name: str,
                                               monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case.drawn(device, dtype, name, 21, num_experts=3)
    few = case.run()
    monkeypatch.setattr(module, "FEW_PAIRS", 8)
    assert torch.equal(case.run(), few)


@pytest.mark.parametrize("name", ["fp8 rows", "fp8 blocks", "int4 of 64", "nvfp4"])
def test_codes_become_numbers_some_experts_at_a_time(device: torch.device, dtype: torch.dtype, name: str,
                                                     monkeypatch: pytest.MonkeyPatch) -> None:
    case, sizes = Case.drawn(device, dtype, name, 7, "relu2"), []

    def watched(weight: Scaled, own: torch.dtype) -> torch.Tensor:
        sizes.append(weight.shape[:-1])
        return expand(weight, own)

    monkeypatch.setattr(module, "expand", watched)
    monkeypatch.setattr(module, "MAX_NUMBERS", 3 * FORMS[name][1] * FORMS[name][2])
    assert_close(case.run(as_numbers=True), case.wanted(), case.rounds)
    hidden, width = FORMS[name][1:3]
    assert [size for size in sizes if len(size) == 2] == [(2, width)] * 2 + [(2, hidden)] * 2


def test_numbers_are_made_of_many_pairs_alone(device: torch.device, dtype: torch.dtype,
                                              monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "NUMBERS_PAIRS_PER_EXPERT", 2)
    kernels: dict[int, set[str]] = {}
    for num_tokens in (2, 3, 4):
        launched = kernels[num_tokens] = set()
        with collecting(lambda function, *_, launched=launched: launched.add(function.fn.__name__)):
            Case.drawn(device, dtype, "int8", num_tokens).run()
    assert kernels[2] == {"_scaled_expert_kernel", "_combine_kernel"}
    assert kernels[3] == kernels[4] == {"_sort_kernel", "_expand_kernel", "_expert_kernel", "_combine_kernel"}
    assert not module.is_faster_as_numbers("fp8", 1 << 20, 4), "tensor cores read them as they are"


@pytest.mark.parametrize("name", ["fp8 rows", "fp8 blocks", "int4 of 32", "nvfp4"])
def test_a_row_has_the_same_bits_among_any_others_in_every_tile(device: torch.device, dtype: torch.dtype,
                                                                name: str) -> None:
    case = Case.drawn(device, dtype, name, 20, num_experts=2)
    whole = case.run(tiles_for(device)[0])
    for tile in tiles_for(device)[1:]:
        assert torch.equal(case.of(slice(7, 9)).run(tile), whole[7:9])
    poisoned = replace(case, x=case.x.clone())
    poisoned.x[:5] = torch.nan
    out = poisoned.run(tiles_for(device)[1])
    assert torch.equal(out[5:], whole[5:]) and out[:5].isnan().all()


def test_what_is_added_comes_last(device: torch.device, dtype: torch.dtype) -> None:
    case = Case.drawn(device, dtype, "fp8 rows", 3)
    added = draw(*case.x.shape, seed=9).to(device, dtype)
    assert torch.equal(replace(case, added=added).run(), case.run() + added)
    nothing = replace(case, added=added).of(slice(0, 0)).run()
    assert nothing.shape == (0, case.x.shape[1])


def test_numbers_of_pairs_up_to_a_power_of_two_have_the_same_kernels(device: torch.device, dtype: torch.dtype) -> None:
    def kernels(num_tokens: int) -> set[tuple[str, str]]:
        case, launched = Case.drawn(device, dtype, "fp8 rows", num_tokens), set()
        options_of_all = ("BLOCK_M", "BLOCK_N", "FEW", "PAIRS", "ACTIVATION", "num_warps")
        with collecting(lambda function, args, options: launched.add(
                (function.fn.__name__, str([options.get(name) for name in options_of_all])))):
            case.run()
        return launched

    assert kernels(33) == kernels(64) and kernels(65) == kernels(128)
    assert {name for name, _ in kernels(1)} == {"_round_kernel", "_scaled_expert_kernel", "_combine_kernel"}


def test_small_tiles_give_every_multiprocessor_some_fp4_codes() -> None:
    """gpt-oss-20b with 1, 8 and 64 token rows; other codes have the tiles they were measured with."""
    tiles = [module.expert_tile(pairs, 32, False, 5760, 132).block_n for pairs in (4, 32, 256)]
    assert tiles == [64, 128, 128]
    assert module.expert_tile(4, 32, False) == module.expert_tile(32, 32, False)


def test_the_wrapper_names_what_is_wrong(device: torch.device, dtype: torch.dtype) -> None:
    case = Case.drawn(device, dtype, "fp8 rows", 2)
    for argument, changed in (("activation", replace(case, activation="tanh")), ("x", replace(case, x=case.x[:, :9])),
                              ("gate_up", replace(case, gate_up=case.down)), ("ids", replace(case, ids=case.ids.int())),
                              ("weights", replace(case, weights=case.weights.double()))):
        with pytest.raises(ValueError, match=f"scaled_experts: {argument} "):
            changed.run()


@pytest.mark.long
def test_compiles_for_the_card() -> None:
    for kernel in found_without_interpreter(__file__):
        assert kernel["multiplies"], "tensor cores read fp8 codes as they are, and other codes as bf16"
        assert kernel["copies"] > 0 and kernel["shared"] <= 228 << 10
        order = ["asks", "waits"] if kernel["is_second"] else ["waits", "releases"]
        assert [step for step in kernel["order"] if step in order] == order


def compile_product(code: str, group: int, rounds: bool, k: int, activation: int, tile: ScaledTile) -> dict[str, Any]:
    from tests.kernels.test_triton_scaled import compile_for_card

    constants = {"K": k, "GROUP": group or k, "CODE": CODES.index(code), "X_GROUP": rounds * (group or k),
                 "PAIRS_PER_ROW": 8, "ACTIVATION": activation, "FEW": tile.block_m == 16, "PAIRS": 64, "EXPERTS": 64,
                 "BLOCK_M": tile.block_m, "BLOCK_N": tile.block_n, "COLUMNS": 128, "HAS_ZEROS": False,
                 "HAS_OFFSETS": False, "HAS_FACTORS": False, "HAS_BIAS": False, "WIDEN": False,
                 "ASM": code in ("int4", "fp4"), "PDL": True,
                 "EARLY": activation == 0, "scales_n": 1, "shifts_n": 1}
    kinds = {"x": "*fp8e4nv" if rounds else "*bf16", "x_scales": "*fp32", "scales": "*bf16", "shifts": "*bf16",
             "codes": "*fp8e4nv" if code == "fp8" else "*u8", "factors": "*fp32", "bias": "*bf16", "out": "*bf16",
             "ids": "*i64", "order": "*i32", "ends": "*i32"}
    made = compile_for_card(module._scaled_expert_kernel, constants, kinds, num_warps=tile.num_warps,
                            num_stages=tile.num_stages)
    ptx, wanted = made.asm["ptx"], "e4m3.e4m3" if rounds else "bf16.bf16"
    steps = {"asks": "prefetch.global.L2", "waits": "griddepcontrol.wait", "releases": "griddepcontrol.launch"}
    places = sorted((ptx.rindex(text), step) for step, text in steps.items() if text in ptx)
    return {"multiplies": "wgmma.mma_async" in ptx and wanted in ptx,
            "copies": len(re.findall(r"cp\.async\.c[ag]", ptx)), "shared": made.metadata.shared,
            "is_second": activation == 0, "order": [step for _, step in places]}


if __name__ == "__main__":
    sizes = (2048, 1), (1856, 0)  # inputs, and the activation
    forms = ("fp8", 0, True), ("fp8", 128, True), ("int4", 64, False), ("fp4", 32, False)
    print(json.dumps([compile_product(*form, *size, module.expert_tile(pairs, 64, False))
                      for form in forms for size in sizes for pairs in (1, 1 << 16)]))
