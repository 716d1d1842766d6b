"""Products with weights of codes and scales in Triton, against their reference: every code, odd sizes, many rows. As a
program this file compiles kernels for an H200 and prints what they consist of."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="needs the triton package")

from outrider.kernels import scaled
from outrider.kernels.code_kinds import CODES
from outrider.kernels.gpu.elements.activation import gelu_tanh_mul, silu_mul
from outrider.kernels.gpu.elements.norm import add_rms_norm, rms_norm
from outrider.kernels.gpu.launch.triton_kernel import collecting
from outrider.kernels.gpu.linear import scaled as module
from outrider.kernels.gpu.linear.rounding import round_rows, rounded_rows
from outrider.kernels.gpu.linear.scaled import (
    ScaledTile,
    chain_columns,
    exact_scaled_linear,
    exact_scaled_wide,
    scaled_linear,
    scaled_tile,
    scaled_wide,
)
from outrider.kernels.gpu.linear.scaled import _scaled_kernel as scaled_kernel
from outrider.kernels.gpu.linear.scaled_codes import _expand_kernel as expand_kernel
from outrider.kernels.gpu.linear.scaled_codes import expand, scaled_rows
from outrider.kernels.scaled import Scaled
from tests.kernels.compiled import found_without_interpreter

TILES = ScaledTile(16, 16, 4, 1), ScaledTile(32, 32, 4, 1)
UNKNOWN = "M", "N"  # numbers of rows and outputs, of which a compiled kernel knows nothing here
CARD_TILES = ScaledTile(16, 64, 4, 3), ScaledTile(64, 64, 4, 3)


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def make(device: torch.device, code: str, n: int, k: int, group: int, has_zeros: bool = False,
         has_offsets: bool = False) -> Scaled:
    generator = torch.Generator().manual_seed(5)
    groups = n, -(-k // group)
    codes = torch.randint(0, 256, (n, k // scaled.codes_per_byte(code)), generator=generator, dtype=torch.uint8)
    codes = draw(n, k, seed=1).to(torch.float8_e4m3fn) if code == "fp8" else codes.view(scaled.code_dtype(code))
    scales = (0.5 + torch.rand(groups, generator=generator)) / 64
    if code == "fp4":
        scales = (scales * 64).to(torch.float8_e4m3fn)
    zeros = torch.randint(-8, 9, groups, generator=generator).half().to(device) if has_zeros else None
    factors = torch.rand(n, 1, generator=generator).to(device) if code == "fp4" else None
    # The scales of an engine lie group by group.
    scales = scales.T.contiguous().to(device).T
    if not has_offsets:
        return Scaled(code, group, codes.to(device), scales, zeros, factors)
    return Scaled(code, group, codes.to(device), scales.bfloat16(), offsets=draw(*groups, seed=6).to(device) / 64)


def assert_close(actual: torch.Tensor, wanted: torch.Tensor, limit: float | None = None) -> None:
    limit = limit or (1e-2 if actual.dtype == torch.bfloat16 else 1e-4)
    assert float((actual.double() - wanted.double()).norm() / wanted.double().norm()) < limit


@pytest.mark.parametrize(("code", "k", "group", "shifts"), [
    ("fp8", 200, 200, ""), ("fp8", 320, 128, ""), ("fp8", 96, 32, ""),
    ("int8", 200, 200, "zeros"), ("int8", 256, 64, ""),
    ("int8", 96, 16, "offsets"), ("int4", 128, 16, "offsets"), ("int4", 96, 32, "offsets"),
    ("int4", 384, 128, ""), ("int4", 384, 128, "zeros"), ("int4", 96, 32, "zeros"), ("int4", 320, 64, ""),
    ("int4", 256, 256, ""), ("int4", 96, 96, ""), ("int4", 192, 192, "zeros"),
    ("fp4", 96, 16, ""), ("fp4", 256, 32, ""),
])
def test_every_code(device: torch.device, dtype: torch.dtype, code: str, k: int, group: int, shifts: str) -> None:
    n = 50
    weight = make(device, code, n, k, group, shifts == "zeros", shifts == "offsets")
    bias = draw(n, seed=3).to(device, dtype)
    rounding = torch.finfo(dtype).eps / 2
    limit = 1e-4 + rounding  # products may be made of scaled numbers that are rounded to the dtype of x
    for num_rows in (1, 37, 70):  # the last ones by the library
        x = draw(num_rows, k, seed=num_rows).to(device, dtype)
        wanted, wide = scaled.scaled_wide(x, weight), scaled_wide(x, weight)
        assert wide.dtype == torch.float32
        assert_close(wide, wanted, limit)
        assert_close(scaled_linear(x, weight), wanted, limit + rounding)
        assert_close(scaled_linear(x, weight, bias), wanted + bias, limit + rounding)


def test_a_step_of_one_token_row_also_compiles_the_kernels_of_many(device: torch.device, dtype: torch.dtype) -> None:
    launched: set[str] = set()
    with collecting(lambda function, args, options: launched.add(function.fn.__name__)):
        scaled_linear(draw(1, 256).to(device, dtype), make(device, "fp8", 64, 256, 128), None, 128)
    products = launched - {"_round_kernel", "_expand_kernel"}
    assert len(launched) == 3 and products < {"_scaled_kernel", "coded_rows_kernel"}  # the latter on Hopper


@pytest.mark.parametrize("group", [200, 128])
def test_rounded_token_rows(device: torch.device, dtype: torch.dtype, group: int) -> None:
    x = (draw(5, 200) * torch.tensor([[1.0], [100], [0], [1e-6], [3]])).to(device, dtype)
    codes, scales = round_rows(x, group)
    wanted, wanted_scales = scaled.round_to_fp8(x, group)
    torch.testing.assert_close(scales, wanted_scales, rtol=1e-6, atol=0)
    assert_close(Scaled("fp8", group, codes, scales).numbers(), Scaled("fp8", group, wanted, wanted_scales).numbers())
    weight, bias = make(device, "fp8", 50, 200, group), draw(50, seed=3).to(device, dtype)
    for rows in (x, x.repeat(14, 1)):
        out = scaled_linear(rows, weight, bias, group)
        assert_close(out, scaled.scaled_linear(rows, weight, bias, group))
    assert_close(out[:5], scaled_linear(x, weight, bias, group))


@pytest.mark.parametrize(("width", "group"), [(200, 200), (256, 128), (384, 64)])
@pytest.mark.parametrize("activate", [silu_mul, gelu_tanh_mul])
def test_gated_rows_are_rounded_at_once(device: torch.device, dtype: torch.dtype, width: int, group: int,
                                        activate: Callable[..., torch.Tensor]) -> None:
    """The codes are those that a kernel of its own makes of the same rows, also where a number is not finite."""
    x = draw(5, 2 * width).to(device, dtype)
    x[3, width + 7] = torch.nan
    plain, out = activate(x), activate(x, group)
    torch.testing.assert_close(out, plain, rtol=0, atol=0, equal_nan=True)
    left, made = rounded_rows(out, group, group < width), round_rows(plain, group)
    assert left is out.rounded[1], "it was not rounded again"  # type: ignore[attr-defined]
    assert torch.equal(left.codes[:5].view(torch.uint8), made.codes.view(torch.uint8))
    torch.testing.assert_close(left.scales[:5], made.scales, rtol=0, atol=0, equal_nan=True)


def test_numbers_of_many_outputs_are_made_in_pieces(device: torch.device, dtype: torch.dtype,
                                                    monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []

    def watched(weight: Scaled, own: torch.dtype) -> torch.Tensor:
        sizes.append(weight.shape[0])
        return expand(weight, own)

    monkeypatch.setattr(module, "expand", watched)
    monkeypatch.setattr(module, "MAX_NUMBERS", 256 * 96)
    weight, x = make(device, "int4", 300, 96, 32), draw(65, 96).to(device, dtype)
    assert_close(scaled_linear(x, weight), scaled.scaled_linear(x, weight))
    assert sizes == [256, 44]
    scaled_linear(x[:64], weight)
    exact_scaled_linear(x, weight)
    assert len(sizes) == 2, "few rows, and those of exact mode, have no scratch memory"


def test_a_row_that_is_not_finite_touches_no_other(device: torch.device, dtype: torch.dtype) -> None:
    x, weight = draw(4, 256).to(device, dtype), make(device, "fp8", 50, 256, 256)
    wanted = scaled_linear(x, weight, None, 256)
    for bad in (torch.nan, torch.inf):
        broken = x.clone()
        broken[2, 7] = bad
        out = scaled_linear(broken, weight, None, 256)
        assert torch.equal(out[[0, 1, 3]], wanted[[0, 1, 3]]) and out[2].isnan().all()


@pytest.mark.parametrize(("code", "group", "rounding"), [("fp8", 1024, 1024), ("fp8", 128, 128), ("int4", 128, 0)])
def test_a_row_has_the_same_bits_among_any_others(device: torch.device, dtype: torch.dtype, code: str, group: int,
                                                  rounding: int) -> None:
    """In exact mode for every number of rows, with chains of programs of their own and in one program."""
    k, n = 1024, 20
    tiles = CARD_TILES if device.type == "cuda" else TILES
    weight, x = make(device, code, n, k, group), draw(70, k).to(device, dtype)
    whole = scaled_linear(x, weight, None, rounding, is_exact=True, chain=512, tile=tiles[1])
    assert_close(whole, scaled.scaled_linear(x, weight, None, rounding))
    for first, count in ((0, 1), (3, 16), (2, 20)):
        for tile in tiles:
            rows = scaled_linear(x[first : first + count], weight, None, rounding, is_exact=True, chain=512, tile=tile)
            assert torch.equal(rows, whole[first : first + count])
    for operation in (exact_scaled_linear, exact_scaled_wide):
        few, many = (operation(rows, weight, rounding=rounding) for rows in (x[:3], x))
        assert torch.equal(few, many[:3])


def test_chains_depend_on_the_weight_alone() -> None:
    assert chain_columns(28672, 4096, 132) == 4096
    assert chain_columns(4096, 14336, 132) == 3584 and chain_columns(4096, 4096, 132) == 1024
    assert chain_columns(512, 512, 132) == 512


@pytest.mark.long
def test_compiles_for_the_card() -> None:
    found = found_without_interpreter(__file__)
    for kernel in found["products"]:
        assert kernel["multiplies"], "tensor cores read fp8 codes as they are"
        assert kernel["copies"] > 0 and kernel["shared"] <= 228 << 10
        assert kernel["promotions"] >= kernel["sums"], "sums of 128 fp8 products are added up in float32"
    for kernel in found["expansions"]:
        assert kernel["loads"] > 0 and kernel["stores"] > 0, "16 bytes at a time"


def compile_for_card(kernel: Any, constants: dict[str, Any], kinds: dict[str, str], **options: int) -> Any:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    function = kernel.function
    names = function.arg_names
    signature = {name: "constexpr" if name in constants else kinds.get(name, "i32") for name in names}
    aligned: Any = {(at,): [["tt.divisibility", 16]] for at, name in enumerate(names)
                    if name not in (*constants, *UNKNOWN)}
    source = ASTSource(function, signature, {(names.index(name),): value for name, value in constants.items()}, aligned)
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)


def compile_product(code: str, group: int, rounding: int, tile: ScaledTile, k: int = 4096) -> dict[str, Any]:
    constants = {"K": k, "GROUP": group, "CODE": CODES.index(code), "X_GROUP": rounding, "CHAIN": k,
                 "BLOCK_M": tile.block_m, "BLOCK_N": tile.block_n, "COLUMNS": 128, "TILE_GROUP": 8, "SHARED": False,
                 "HAS_ZEROS": False, "HAS_OFFSETS": group < 128, "HAS_FACTORS": False, "HAS_BIAS": False,
                 "WIDEN": False, "ASM": code == "int4", "PDL": True, "stride_n": 1}
    kinds = {"x": "*fp8e4nv" if rounding else "*bf16", "x_scales": "*fp32", "scales": "*bf16", "shifts": "*bf16",
             "codes": {"fp8": "*fp8e4nv", "int8": "*i8"}.get(code, "*u8"), "factors": "*fp32", "bias": "*bf16",
             "out": "*bf16", "parts": "*fp32", "counters": "*i32"}
    made = compile_for_card(scaled_kernel, constants, kinds, num_warps=tile.num_warps, num_stages=tile.num_stages)
    ptx = made.asm["ptx"]
    wanted = "e4m3.e4m3" if rounding else "bf16.bf16"
    return {"multiplies": "wgmma.mma_async" in ptx and wanted in ptx, "copies": ptx.count("cp.async.cg"),
            "promotions": len(re.findall(r"(?:add|fma)(?:\.rn)?\.f32", ptx)), "shared": made.metadata.shared,
            "sums": tile.block_m * tile.block_n // (32 * tile.num_warps) if rounding else 0}


def compile_expansion(code: str, group: int, k: int = 4096) -> dict[str, Any]:
    constants = {"K": k, "GROUP": group, "CODE": CODES.index(code), "ROWS": 32, "COLUMNS": 128,
                 "HAS_ZEROS": False, "HAS_OFFSETS": code == "int4" and group < 128, "HAS_FACTORS": False,
                 "TILED": False, "INDEXED": False, "stride_n": 1}
    kinds = {"codes": {"fp8": "*fp8e4nv", "int8": "*i8"}.get(code, "*u8"), "scales": "*bf16", "shifts": "*bf16",
             "factors": "*fp32", "index": "*i64", "out": "*bf16"}
    ptx = compile_for_card(expand_kernel, constants, kinds).asm["ptx"]
    return {"loads": ptx.count("ld.global.v4.b32"), "stores": ptx.count("st.global.v4.b32")}


@pytest.mark.parametrize(("code", "group", "shifts"), [
    ("int4", 128, "zeros"), ("int4", 64, ""), ("int4", 32, "offsets"), ("int4", 16, "offsets"), ("int8", 32, ""),
    ("int8", 16, "offsets"),
])
def test_codes_in_tiles(device: torch.device, code: str, group: int, shifts: str) -> None:
    weight = make(device, code, 192, 384, group, shifts == "zeros", shifts == "offsets")
    weight = replace(weight, scales=weight.scales.bfloat16())
    numbers, codes = weight.numbers(), weight.codes.clone()
    some = torch.tensor([0, 5, 77, 191, 64, 63, 9], device=device)
    assert torch.equal(scaled_rows(weight, some, torch.float32), scaled.scaled_rows(weight, some, torch.float32))
    tiled = weight.tiled()
    assert tiled.is_tiled and not torch.equal(tiled.codes, codes) and tiled.codes.data_ptr() == weight.codes.data_ptr()
    assert torch.equal(scaled_rows(tiled, some, torch.float32), numbers[some])
    assert torch.equal(expand(tiled, torch.float32), numbers)
    assert torch.equal(expand(tiled[64:192], torch.float32), numbers[64:192]), "whole tiles remain such"
    plain = tiled.tiled(False)
    assert torch.equal(plain.codes, codes) and plain.tiled(False) is plain


def test_what_has_no_tiles(device: torch.device) -> None:
    made = make(device, "int4", 64, 256, 64)
    assert not made.has_tiles, "kernels scale codes in tiles of short groups by numbers in bfloat16"
    assert replace(made, scales=made.scales.bfloat16()).has_tiles
    for code, n, k, group in (("int4", 100, 128, 128), ("int4", 64, 192, 32), ("int8", 64, 256, 128)):
        made = make(device, code, n, k, group)
        assert not replace(made, scales=made.scales.bfloat16()).has_tiles


def test_blocks_are_scales_that_outputs_share(device: torch.device) -> None:
    weight = make(device, "fp8", 256, 384, 128)
    assert weight.with_blocks().blocks is None, "every output has scales of its own"
    shared = Scaled("fp8", 128, weight.codes, weight.scales[::128].repeat_interleave(128, 0))
    blocks = shared.with_blocks().blocks
    assert blocks is not None and torch.equal(blocks, weight.scales[::128])
    assert shared.with_blocks()[:128].blocks is None


@pytest.mark.parametrize("group", [200, 64])
def test_a_norm_rounds_its_rows_for_products(device: torch.device, group: int) -> None:
    x, residual, weight = (draw(*shape, seed=3).to(device) for shape in ((70, 200), (70, 200), (200,)))
    for num_rows in (3, 70):
        by_group = group < 200
        for made in (rms_norm(x[:num_rows], weight, 1e-5, group),
                     add_rms_norm(x[:num_rows], residual[:num_rows].clone(), weight, 1e-5, group)):
            wanted = round_rows(made.clone(), group, by_group=by_group)
            kept = rounded_rows(made, group, by_group)
            assert kept is made.rounded[1]  # type: ignore[attr-defined]
            assert kept.codes.shape[0] == kept.scales.shape[0] == (-(-num_rows // 4) * 4 if by_group else num_rows)
            assert torch.equal(kept.codes[:num_rows].float(), wanted.codes[:num_rows].float())
            assert torch.equal(kept.scales[:num_rows], wanted.scales[:num_rows])
            assert rounded_rows(made, 100, True) is not kept, "other groups"
            assert rounded_rows(made[:2], group, by_group) is not kept, "other rows"


if __name__ == "__main__":
    cases = (("fp8", 4096, 4096), ("fp8", 128, 128), ("int4", 128, 0), ("int4", 32, 0), ("int8", 16, 0))
    products = [compile_product(*case, scaled_tile(rows, False)) for case in cases for rows in (1, 64, 300)]
    expansions = [compile_expansion(code, group) for code, group, _ in (*cases, ("fp4", 32, 0))]
    print(json.dumps({"products": products, "expansions": expansions}))
