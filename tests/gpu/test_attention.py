"""Attention on the card with the head sizes that models have: decoding and prompts, windows, caps, first keys.

Batches come from tests/kernels, with everything that nobody may see poisoned; there the sizes are small.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="needs the triton package")

from outrider.kernels import reference
from outrider.kernels.gpu import exact_attention, exact_tiles_config, query_tiles
from tests.gpu.conftest import HAS_CARD
from tests.kernels.test_fp8_pages import in_fp8
from tests.kernels.test_triton_attention import Batch, assert_close, decode, make_batch, prefill

# (heads, kv heads, head dim, page): llama, qwen3, gemma 3 and 4 (both kinds of layer), nemotron-h.
GEOMETRIES = {"64": (4, 1, 64, 16), "128": (8, 2, 128, 16), "256": (4, 2, 256, 32), "512": (4, 1, 512, 16)}
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": {"window": 40},
    "window and cap": {"window": 33, "softcap": 5.0},
    "chunks": {"window": 40, "is_chunked": True},  # of llama 4, whose heads have 128 dimensions
}
DECODING = [(200, 1, 1), (0, 0, 0), (37, 4, 3), (150, 2, 0), (90, 4, 4)]
PROMPTS = [(70, 70, 70), (100, 33, 20), (0, 0, 0), (45, 20, 20)]
CASES = [pytest.param(name, marks=pytest.mark.together(f"attention {name}")) for name in GEOMETRIES]


def batch_of(name: str, requests: list[tuple[int, int, int]], device: torch.device, dtype: torch.dtype,
             window: int | None = None, is_chunked: bool = False) -> Batch:
    heads, kv_heads, dim, page = GEOMETRIES[name]
    if device.type == "cuda" and dtype == torch.float32 and dim > 128:
        pytest.skip("float32 tiles of this size take more shared memory than there is, or a minute to compile")
    if is_chunked and dim != 128:
        pytest.skip("no model has chunks with heads of this size, and every kind of window is compiled by itself")
    return make_batch(device, dtype, requests, heads=heads, kv_heads=kv_heads, dim=dim, page_size=page, window=window,
                      is_chunked=is_chunked)


def wanted(batch: Batch, scale: float, window: int | None = None, softcap: float | None = None,
           key_starts: torch.Tensor | None = None, is_chunked: bool = False) -> torch.Tensor:
    wide = replace(batch, q=batch.q.double(), k_cache=batch.k_cache.double(), v_cache=batch.v_cache.double())
    return reference.paged_attention(*wide.args, scale, window or 0, softcap or 0.0, key_starts=key_starts,
                                     is_chunked=is_chunked)


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("name", CASES)
def test_decode(device: torch.device, dtype: torch.dtype, name: str, options: str) -> None:
    chosen = OPTIONS[options]
    scale = GEOMETRIES[name][2] ** -0.5
    batch = batch_of(name, DECODING, device, dtype, chosen.get("window"), chosen.get("is_chunked", False))
    expected = wanted(batch, scale, **chosen)
    # As the backend calls it, and with one split.
    for split in ({}, {"num_splits": 1}) if options == "plain" else ({},):
        assert_close(decode(batch, scale=scale, config=None, **split, **chosen), expected)


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("name", CASES)
def test_prefill(device: torch.device, dtype: torch.dtype, name: str, options: str) -> None:
    chosen = OPTIONS[options]
    scale = GEOMETRIES[name][2] ** -0.5
    batch = batch_of(name, PROMPTS, device, dtype, chosen.get("window"), chosen.get("is_chunked", False))
    actual = prefill(batch, None, scale=scale, **chosen)
    assert_close(actual, wanted(batch, scale, **chosen))


@pytest.mark.parametrize("name", CASES)
def test_first_keys(device: torch.device, dtype: torch.dtype, name: str) -> None:
    scale = GEOMETRIES[name][2] ** -0.5
    for requests, run in (([(200, 1, 1), (37, 4, 3), (90, 2, 2)], decode), ([(70, 70, 9), (100, 33, 20)], prefill)):
        batch = batch_of(name, requests, device, dtype)
        starts = torch.tensor([60, 1, 17][: len(requests)], dtype=torch.int32, device=device)
        options = {"config": None} if run is decode else {}
        actual = run(batch, *(() if run is decode else (None,)), scale=scale, key_starts=starts, **options)
        assert_close(actual, wanted(batch, scale, key_starts=starts))


@pytest.mark.parametrize("name", CASES)
def test_batch_mates_and_padding_change_no_bit(device: torch.device, dtype: torch.dtype, name: str) -> None:
    """With a fixed split size, as exact runs have it: a request alone, with others, and padded."""
    scale, requests = GEOMETRIES[name][2] ** -0.5, [(90, 3, 2), (37, 1, 1)]
    options: dict[str, Any] = {"scale": scale, "split_size": 32, "config": None}
    batch = batch_of(name, requests, device, dtype)
    together = decode(batch, **options)
    alone = replace(batch, q=batch.q[:3], page_table=batch.page_table[:1], query_starts=batch.query_starts[:2],
                    lengths=batch.lengths[:1], live=batch.live[:1])
    assert torch.equal(decode(alone, **options), together[:3])
    end, pad = batch.query_starts[-1:], torch.nn.functional.pad
    padded = replace(batch, q=torch.cat((batch.q, torch.full_like(batch.q, float("nan")))),
                     page_table=torch.cat((batch.page_table, torch.full_like(batch.page_table, -3))),
                     query_starts=torch.cat((batch.query_starts, end, end)), lengths=pad(batch.lengths, (0, 2)),
                     live=pad(batch.live, (0, 2)))
    result = decode(padded, **options)
    assert torch.equal(result[:4], together) and not result[4:].any()


@pytest.mark.parametrize("name", CASES)
def test_pages_in_fp8(device: torch.device, name: str) -> None:
    """Decoding and prompts, by the kernels that the ordinary and the exact backend take."""
    heads, kv_heads, dim, _ = GEOMETRIES[name]
    for requests in (DECODING, PROMPTS):
        stored, scales, wide = in_fp8(batch_of(name, requests, device, torch.bfloat16))
        lens, options = stored.query_starts.diff().tolist(), {"scale": dim**-0.5, "scales": scales}
        tiles = query_tiles(lens, heads, kv_heads, dim, device, config=exact_tiles_config(heads, stored.k_cache))
        results = [prefill(stored, None, **options), exact_attention(*stored.args, tiles=tiles, **options)]
        if requests is DECODING:
            results += [decode(stored, config=None, **options),
                        exact_attention(*stored.args, max_query=4, max_length=200, **options)]
            assert torch.equal(results[1], results[3])
        expected = reference.paged_attention(*wide.args, dim**-0.5, 0, 0.0)
        for result in results:
            assert_close(result, expected)


@pytest.mark.gpu
def test_a_card_is_used(device: torch.device) -> None:
    assert HAS_CARD and device.type == "cuda"
