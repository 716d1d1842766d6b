"""Products of exact mode on the card, or under Triton's interpreter: against the reference, and bit against bit."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="needs the triton package")

from outrider.kernels import moe, reference
from outrider.kernels.gpu.experts.moe import exact_experts
from outrider.kernels.gpu.launch.triton_kernel import collecting
from outrider.kernels.gpu.linear.exact_linear import (
    ExactTile,
    chain_columns,
    exact_gated_linear,
    exact_linear,
    exact_linear_wide,
    exact_tile,
)

TILES = [ExactTile(16, 32, 32, 4, 2), ExactTile(16, 64, 16, 4, 2, weight_first=True), ExactTile(32, 16, 64, 4, 2)]


def random(device: torch.device, dtype: torch.dtype, *shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


def assert_close(found: torch.Tensor, wanted: torch.Tensor, dtype: torch.dtype) -> None:
    tolerance = 3e-2 if dtype == torch.bfloat16 else 2e-5
    torch.testing.assert_close(found.double(), wanted.double(), rtol=tolerance, atol=tolerance * 10)


@pytest.mark.parametrize("tile", TILES, ids=lambda tile: f"{tile.block_m}x{tile.block_n}x{tile.block_k}")
@pytest.mark.parametrize("rows", [1, 5, 40])
def test_every_tile_is_the_product(device: torch.device, dtype: torch.dtype, tile: ExactTile, rows: int) -> None:
    """With columns and outputs that no tile divides, token rows at a distance, and a bias."""
    x, weight, bias = (random(device, dtype, *shape, seed=i) for i, shape in enumerate([(rows, 90), (50, 72), (50,)]))
    found = exact_linear(x[:, 9:81], weight, bias, tile=tile)
    assert_close(found, reference.linear(x[:, 9:81].double(), weight.double(), bias.double()), dtype)


def test_rows_have_the_same_bits_in_every_number(device: torch.device, dtype: torch.dtype) -> None:
    x, weight = random(device, dtype, 70, 64), random(device, dtype, 48, 64, seed=1)
    whole, wide, gated = exact_linear(x, weight), exact_linear_wide(x, weight), exact_gated_linear(x, weight, "silu")
    assert wide.dtype == torch.float32
    for rows in (1, 3, 17, 66):
        assert torch.equal(exact_linear(x[:rows], weight), whole[:rows])
        assert torch.equal(exact_linear_wide(x[:rows], weight), wide[:rows])
        assert torch.equal(exact_gated_linear(x[:rows], weight, "silu"), gated[:rows])


@pytest.mark.parametrize("weight_first", [False, True])
def test_several_chains_have_the_same_bits_in_every_number_of_rows(device: torch.device, dtype: torch.dtype,
                                                                   weight_first: bool) -> None:
    """Few token rows have programs for each chain, many have one for all; the last chain is shorter. In float32 the
    card's products depend on the tile's shape."""
    x, weight, bias = (random(device, dtype, *shape, seed=i) for i, shape in enumerate([(70, 168), (50, 168), (50,)]))
    few, many = ExactTile(64, 16, 64, 4, 2, weight_first), ExactTile(32, 32, 32, 4, 2)
    whole = exact_linear(x, weight, bias, tile=many, chain=64)
    assert_close(whole, reference.linear(x.double(), weight.double(), bias.double()), dtype)
    for rows in (1, 5, 32, 64):
        for tile in (few, many) if dtype == torch.bfloat16 or device.type == "cpu" else (many,):
            assert torch.equal(exact_linear(x[:rows], weight, bias, tile=tile, chain=64), whole[:rows])
    assert not torch.equal(exact_linear(x, weight, bias, out_dtype=torch.float32, tile=many),
                           exact_linear(x, weight, bias, out_dtype=torch.float32, tile=many, chain=64))


def test_the_chains_of_a_weight_depend_on_its_shape() -> None:
    """None for wide weights and shallow ones; otherwise at most three, each of at least about 1024 columns."""
    assert [chain_columns(n, k) for n, k in ((4096, 14336), (2560, 2047))] == [14336, 2047]
    assert [chain_columns(n, k) for n, k in ((2560, 10240), (2688, 3712), (128, 2688))] == [3584, 1280, 1536]


def test_experts_have_the_same_bits_in_every_batch(device: torch.device, dtype: torch.dtype) -> None:
    """The smaller batches look for their pairs, the larger ones sort them."""
    x, gate_up, down = (random(device, dtype, *shape, seed=i)
                        for i, shape in enumerate([(70, 32), (5, 32, 32), (5, 32, 16)]))
    routed = moe.route(random(device, torch.float32, 70, 5, seed=9), moe.RouteRule(5, 2))
    whole = exact_experts(x, routed.ids, routed.weights, gate_up, down, "silu")
    assert_close(whole, moe.experts(x, routed.ids, routed.weights, gate_up, down, "silu"), dtype)
    for rows in (1, 20):
        some = exact_experts(x[:rows], routed.ids[:rows], routed.weights[:rows], gate_up, down, "silu")
        assert torch.equal(some, whole[:rows])


def test_start_up_compiles_the_tiles_of_every_number_of_rows(device: torch.device) -> None:
    x, weight = torch.empty(8, 256, dtype=torch.bfloat16, device=device), torch.empty(512, 256, dtype=torch.bfloat16)
    tiles = set()
    with collecting(lambda function, args, options: tiles.add((options["BLOCK_M"], options["BLOCK_N"]))):
        exact_linear(x, weight.to(device))
    for rows in (1, 30, 100, 700, 5000):
        tile = exact_tile(rows, 512, 256, 132, 2)
        assert (tile.block_m, tile.block_n) in tiles
    assert exact_tile(8192, 28672, 4096, 132, 2).block_m == 256 and exact_tile(1, 4096, 4096, 132, 2).block_m == 16
