"""Kernels over pages in fp8 compile for an H200 that is not there: the interpreter runs no instructions of the card.
This file runs as a program, in which Triton does not interpret."""

from __future__ import annotations

import json

import pytest
import torch

pytest.importorskip("triton", reason="needs the triton package")

from tests.kernels.compiled import compiling, found_without_interpreter  # noqa: E402


@pytest.mark.long
@pytest.mark.skipif(torch.cuda.is_available(), reason="the other tests compile them")
def test_the_compiler_takes_every_kernel() -> None:
    assert set(found_without_interpreter(__file__)) == {
        "_rope_cache_kernel", "_cache_kernel", "_find_shared_kernel", "_list_splits_kernel", "_packed_kernel",
        "_decode_kernel", "_count_tiles_kernel", "_prefill_kernel", "_exact_kernel", "_write_latents_kernel",
        "_latent_attention_kernel",
    }  # fmt: skip


def compile_kernels() -> list[str]:
    from outrider.kernels.fp8_cache import FP8, HeadScales
    from outrider.kernels.latent import TokenContexts
    from outrider.kernels.latent_inputs import RopeRows
    from outrider.kernels.triton.attention import decode_attention
    from outrider.kernels.triton.attention_sharing import find_shared
    from outrider.kernels.triton.attention_splits import list_splits
    from outrider.kernels.triton.cache_write import cache_write
    from outrider.kernels.triton.exact_attention import exact_attention
    from outrider.kernels.triton.latent_attention import dense_latent_attention
    from outrider.kernels.triton.latent_inputs import write_latents
    from outrider.kernels.triton.prefill import device_query_tiles, prefill_attention
    from outrider.kernels.triton.rope_cache import rope_cache_write

    count, half = 16, torch.bfloat16
    bounds, options = {"max_query": 1, "max_length": 1024}, {"scale": 1.0, "pdl": True}
    pool = torch.zeros(4, 2, 16, 2, 128).to(FP8)
    table, lengths = (torch.zeros(*shape, dtype=torch.int32) for shape in ((count, 64), (count,)))
    live, starts = torch.ones_like(lengths), torch.arange(count + 1, dtype=torch.int32)
    scales, slots = HeadScales(torch.ones(2), torch.ones(2)), torch.arange(count)
    args = (torch.zeros(count, 8, 128, dtype=half), pool[:, 0], pool[:, 1], table, starts, lengths, live)
    with compiling() as found:
        rope_cache_write(torch.zeros(count, 12 * 128, dtype=half), slots, torch.zeros(64, 64), slots, *args[1:3],
                         scales=scales, pdl=True)
        cache_write(torch.zeros(count, 2, 128, dtype=half), torch.zeros(count, 2, 128, dtype=half), slots, *args[1:3],
                    scales=scales, pdl=True)
        shared = find_shared(table, lengths, live, 16, max_length=1024)
        for packs in (shared, None):
            splits = list_splits(lengths, live, 8, 2, 128, 1, shared=packs, **bounds)
            decode_attention(*args, splits=splits, scales=scales, **bounds, **options)
        tiles = device_query_tiles(starts, count, 0, 8, 2, 128)
        prefill_attention(*args, tiles, scales=scales, **options)
        exact_attention(*args, scales=scales, **bounds, **options)
        cache, rope = torch.zeros(4, 16, 576).to(FP8), RopeRows(slots, torch.zeros(64, 64))
        write_latents(torch.zeros(count, 576, dtype=half), None, torch.zeros(512, dtype=half), 1e-6, rope, slots, cache,
                      None, pdl=True)
        dense_latent_attention(torch.zeros(count, 16, 576, dtype=half), cache, TokenContexts(table, *[slots] * 3), 1024,
                               1.0, 512, num_splits=1, pdl=True)
    return found


if __name__ == "__main__":
    print(json.dumps(compile_kernels()))
