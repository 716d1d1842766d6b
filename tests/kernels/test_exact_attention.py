"""Exact attention on the card, or under Triton's interpreter: against the reference, and bit against bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="needs the triton package")

from outrider.kernels import reference
from outrider.kernels.gpu.attention.exact_attention import (
    ExactConfig,
    exact_attention,
    exact_config,
    exact_tiles_config,
)
from outrider.kernels.gpu.attention.prefill import PrefillConfig, QueryTiles, device_query_tiles, query_tiles
from tests.kernels.test_triton_attention import Batch, make_batch

SMALL = ExactConfig(16, 16, 4, 2)
SPLIT = 32


def as_tiles(batch: Batch, lens: list[int], *, counted: bool, config: ExactConfig) -> QueryTiles:
    heads = (batch.q.shape[1], batch.k_cache.shape[2], batch.k_cache.shape[3])
    tiles = PrefillConfig(config.block_m, config.block_n, config.num_warps, config.num_stages)
    if counted:
        return device_query_tiles(batch.query_starts, batch.q.shape[0], 0, *heads, config=tiles)
    return query_tiles(lens, *heads, batch.q.device, config=tiles)


@pytest.mark.parametrize(("window", "softcap", "shape"), [
    (None, None, {"heads": 2, "kv_heads": 1}), (23, 4.0, {"heads": 2, "kv_heads": 1}),
    (1, 0.5, {"heads": 6, "kv_heads": 2, "dim": 24, "page_size": 32}),
])
def test_all_ways_agree_with_the_reference_and_to_the_bit(device: torch.device, dtype: torch.dtype, window: int | None,
                                                          softcap: float | None, shape: dict[str, int]) -> None:
    requests = [(70, 3, 2), (0, 0, 0), (9, 9, 9), (40, 2, 0)]
    batch = make_batch(device, dtype, requests, window=window, **shape)
    lens = [scheduled for _, scheduled, _ in requests]
    options: dict[str, Any] = {"scale": 0.3, "window": window, "softcap": softcap, "config": SMALL, "split_keys": SPLIT}
    found = [exact_attention(*batch.args, **options, max_query=9, max_length=70, num_programs=n) for n in (1, 2, 64)]
    found += [exact_attention(*batch.args, **options, tiles=as_tiles(batch, lens, counted=counted, config=SMALL))
              for counted in (False, True)]
    table = torch.where(batch.page_table >= batch.k_cache.shape[0], 0, batch.page_table)
    wanted = reference.paged_attention(*batch.args[:3], table, *batch.args[4:], 0.3, window or 0, softcap or 0.0)
    torch.testing.assert_close(found[0], wanted, atol=2e-2 if dtype == torch.bfloat16 else 1e-5, rtol=1e-2)
    for other in found[1:]:
        assert torch.equal(other, found[0])


def test_a_query_has_the_same_bits_in_every_batch(device: torch.device, dtype: torch.dtype) -> None:
    """Some of a request's last 20 tokens alone, against the prompt with a batch mate."""
    batch = make_batch(device, dtype, [(70, 20, 20), (30, 3, 3)], heads=2, kv_heads=1)
    options: dict[str, Any] = {"scale": 0.3, "config": SMALL, "split_keys": SPLIT}
    whole = exact_attention(*batch.args, **options, tiles=as_tiles(batch, [20, 3], counted=False, config=SMALL))
    starts, live = (torch.tensor(ints, dtype=torch.int32, device=device) for ints in ([0, 1], [1]))
    for token in (0, 7, 13, 14, 19):
        lengths = torch.tensor([51 + token], dtype=torch.int32, device=device)
        alone = exact_attention(batch.q[token : token + 1], batch.k_cache, batch.v_cache, batch.page_table[:1], starts,
                                lengths, live, max_query=1, max_length=70, **options)
        assert torch.equal(alone[0], whole[token]), token


def test_the_tile_depends_on_the_heads_alone(device: torch.device) -> None:
    """Nothing else may choose a layout: sums over a row would go in another order."""
    for dim in (64, 128, 256, 512):
        cache = torch.empty(1, 16, 1, dim, dtype=torch.bfloat16, device=device)
        config, tiles = exact_config(dim, 2), exact_tiles_config(8, cache)
        assert (tiles.block_m, tiles.block_n, tiles.num_warps) == (config.block_m, config.block_n, config.num_warps)
