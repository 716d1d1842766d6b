"""Kernels over pages in fp8 compile for an H200 that is not there: the interpreter runs no instructions of the card.
This file runs as a program, in which Triton does not interpret."""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="needs the triton package")

from tests.kernels.compiled import compiling, found_without_interpreter

COUNT = 16  # requests
BOUNDS = {"max_query": 1, "max_length": 1024}
OPTIONS: dict[str, Any] = {"scale": 1.0, "pdl": True}

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the other tests compile them")


def test_prompts_over_heads_of_64_read_only_their_own_memory() -> None:
    """The assembler took the address of the values' halves from a register that nothing had written."""
    assert found_without_interpreter(__file__, "prompts", "64") == ["_prefill_kernel"]


@pytest.mark.long
@pytest.mark.parametrize("dim", [16, 32, 64, 80, 96, 112, 128, 192, 256, 512])
def test_the_compiler_takes_every_head_size(dim: int) -> None:
    assert set(found_without_interpreter(__file__, "heads", str(dim))) == {
        "_rope_cache_kernel", "_cache_kernel", "_find_shared_kernel", "_list_splits_kernel", "_packed_kernel",
        "_decode_kernel", "_count_tiles_kernel", "_prefill_kernel", "_exact_kernel",
    }


@pytest.mark.long
@pytest.mark.parametrize(("heads", "latent", "rope"), [(16, 512, 64), (128, 512, 64), (20, 256, 32), (2, 8, 4)])
def test_the_compiler_takes_latents(heads: int, latent: int, rope: int) -> None:
    assert set(found_without_interpreter(__file__, "latents", *map(str, (heads, latent, rope)))) == {
        "_write_latents_kernel", "_latent_attention_kernel", "_merge_kernel", "_merge_in_order_kernel",
    }


def prompts(dim: int) -> list[str]:
    from outrider.kernels.gpu.attention.prefill import prefill_attention, query_tiles

    args, scales = make_batch(dim)
    with compiling() as found:
        tiles = query_tiles([1] * COUNT, 8, 2, dim, args[0].device)
        prefill_attention(*args, tiles, scales=scales, **OPTIONS)
    return found


def heads(dim: int) -> list[str]:
    from outrider.kernels.gpu.attention.decode import decode_attention
    from outrider.kernels.gpu.attention.exact_attention import exact_attention, exact_tiles_config
    from outrider.kernels.gpu.attention.prefill import device_query_tiles, prefill_attention
    from outrider.kernels.gpu.attention.sharing import find_shared
    from outrider.kernels.gpu.attention.splits import list_splits
    from outrider.kernels.gpu.pages.cache_write import cache_write
    from outrider.kernels.gpu.pages.rope_cache import rope_cache_write

    args, scales = make_batch(dim)
    _, *caches, table, starts, lengths, live = args
    slots, rows = torch.arange(COUNT), torch.zeros(COUNT, 2, dim, dtype=torch.bfloat16)
    with compiling() as found:
        rope_cache_write(torch.zeros(COUNT, 12 * dim, dtype=torch.bfloat16), slots, torch.zeros(64, dim // 2 // 2 * 2),
                         slots, *caches, scales=scales, pdl=True)
        cache_write(rows, rows, slots, *caches, scales=scales, pdl=True)
        shared = find_shared(table, lengths, live, 16, max_length=1024)
        for packs in (shared, None):
            splits = list_splits(lengths, live, 8, 2, dim, 1, shared=packs, **BOUNDS)
            decode_attention(*args, splits=splits, scales=scales, **BOUNDS, **OPTIONS)
        for window in (None, 100):  # few requests with the greatest tiles
            decode_attention(*make_batch(dim, requests=4)[0], scales=scales, window=window, max_query=16,
                             max_length=1024, **OPTIONS)
            exact_attention(*args, scales=scales, window=window, **BOUNDS, **OPTIONS)
        prefill_attention(*args, device_query_tiles(starts, COUNT, 0, 8, 2, dim), scales=scales, **OPTIONS)
        tiles = device_query_tiles(starts, COUNT, 0, 8, 2, dim, config=exact_tiles_config(8, caches[0]))
        exact_attention(*args, scales=scales, tiles=tiles, **OPTIONS)
    return found


def latents(num_heads: int, size: int, rope: int) -> list[str]:
    from outrider.kernels.fp8_cache import FP8
    from outrider.kernels.gpu.latent.attention import dense_latent_attention, latent_attention
    from outrider.kernels.gpu.latent.exact_latent import exact_dense_latent_attention, exact_latent_attention
    from outrider.kernels.gpu.latent.inputs import write_latents
    from outrider.kernels.latent import TokenContexts
    from outrider.kernels.latent_inputs import RopeRows

    half, cache = torch.bfloat16, torch.zeros(4, 16, size + rope).to(FP8)
    with compiling() as found:
        for count in (4, 64, 300):  # token rows
            slots, chosen = torch.arange(count), torch.zeros(count, 256, dtype=torch.int32)
            queries = torch.zeros(count, num_heads, size + rope, dtype=half)
            contexts = TokenContexts(torch.zeros(count, 64, dtype=torch.int32), *[slots] * 3)
            sinks = torch.zeros(num_heads) if count == 64 else None
            for splits in (1, 2):
                dense_latent_attention(queries, cache, contexts, 1024, 1.0, size, sinks, num_splits=splits, pdl=True)
                latent_attention(queries, cache, contexts, chosen, 1.0, size, sinks, num_splits=splits, pdl=True)
        exact_dense_latent_attention(queries, cache, contexts, 1024, 1.0, size, pdl=True)
        exact_latent_attention(queries, cache, contexts, chosen, 1.0, size, torch.zeros(num_heads), pdl=True)
        write_latents(torch.zeros(count, size + rope, dtype=half), None, torch.zeros(size, dtype=half), 1e-6,
                      RopeRows(slots, torch.zeros(512, rope)), slots, cache, None, pdl=True)
    return found


def make_batch(dim: int, requests: int = COUNT) -> tuple[tuple[torch.Tensor, ...], Any]:
    """(queries, keys, values, page table, query starts, lengths, live counts), scales."""
    from outrider.kernels.fp8_cache import FP8, HeadScales

    pool = torch.zeros(4, 2, 16, 2, dim).to(FP8)
    table, lengths = (torch.zeros(*shape, dtype=torch.int32) for shape in ((requests, 64), (requests,)))
    queries = torch.zeros(requests, 8, dim, dtype=torch.bfloat16)
    starts = torch.arange(requests + 1, dtype=torch.int32)
    return (queries, pool[:, 0], pool[:, 1], table, starts, lengths, torch.ones_like(lengths)), HeadScales(
        torch.ones(2), torch.ones(2)
    )


if __name__ == "__main__":
    kinds: dict[str, Any] = {"prompts": prompts, "heads": heads, "latents": latents}
    print(json.dumps(kinds[sys.argv[1]](*map(int, sys.argv[2:]))))
