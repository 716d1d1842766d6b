"""Attention within chunks, by every kernel: a query sees the keys of its own chunk and no others, also where the
queries of one tile lie in two chunks. Keys of earlier chunks are poisoned, as their pages may be another request's by
then."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="needs the triton package")

from outrider.kernels import cpu as native
from outrider.kernels import ops, reference
from outrider.kernels.gpu.attention.exact_attention import exact_attention
from outrider.kernels.gpu.attention.splits import list_splits
from tests.kernels.compiled import compiling, found_without_interpreter
from tests.kernels.test_exact_attention import SMALL, as_tiles
from tests.kernels.test_triton_attention import Batch, assert_close, decode, listed, make_batch, prefill

# (length, scheduled, live): at an edge, just before and behind one, dead ones, and queries on both sides of an edge.
FEW = [(37, 1, 1), (0, 0, 0), (49, 3, 2), (40, 2, 0), (48, 1, 1), (50, 5, 5), (145, 1, 1)]
MANY = [(70, 40, 40), (9, 9, 9), (100, 30, 20)]


def naive(batch: Batch, chunk: int) -> torch.Tensor:
    """One token at a time over a list of the keys that it sees."""
    out = torch.zeros_like(batch.q, dtype=torch.float64)
    group, page = batch.q.shape[1] // batch.k_cache.shape[2], batch.k_cache.shape[1]
    for r, (length, live) in enumerate(zip(batch.lengths.tolist(), batch.live.tolist(), strict=True)):
        for i in range(live):
            token, position = int(batch.query_starts[r]) + i, length - live + i
            keys = range(position // chunk * chunk, position + 1)
            cells = [(int(batch.page_table[r, key // page]), key % page) for key in keys]
            k, v = (torch.stack([cache[cell] for cell in cells]).double().repeat_interleave(group, dim=1)
                    for cache in (batch.k_cache, batch.v_cache))
            weights = torch.einsum("hd,khd->hk", batch.q[token].double(), k).mul(0.3).softmax(dim=-1)
            out[token] = torch.einsum("hk,khd->hd", weights, v)
    return out


@pytest.mark.parametrize("chunk", [24, *(pytest.param(chunk, marks=pytest.mark.long) for chunk in (1, 16, 49))])
def test_kernels_equal_a_naive_twin(device: torch.device, dtype: torch.dtype, chunk: int) -> None:
    options: dict[str, Any] = {"window": chunk, "is_chunked": True}
    few = make_batch(device, dtype, FEW, **options)
    wanted = naive(few, chunk)
    for split in ({"num_splits": 1}, {"num_splits": 3}, {"split_size": 16}):
        assert_close(decode(few, **split, **options), wanted)
    assert_close(listed(few, **options), wanted)
    many = make_batch(device, dtype, MANY, **options)
    assert_close(prefill(many, **options), naive(many, chunk))
    assert_close(prefill(many, config=None, **options), naive(many, chunk))


@pytest.mark.parametrize("chunk", [24, pytest.param(1, marks=pytest.mark.long)])
def test_exact_attention_has_one_set_of_bits(device: torch.device, dtype: torch.dtype, chunk: int) -> None:
    batch = make_batch(device, dtype, MANY, heads=2, kv_heads=1, window=chunk, is_chunked=True)
    options: dict[str, Any] = {"scale": 0.3, "window": chunk, "is_chunked": True, "config": SMALL, "split_keys": 32}
    found = [exact_attention(*batch.args, **options, max_query=40, max_length=100, num_programs=n) for n in (1, 3)]
    found += [exact_attention(*batch.args, **options, tiles=as_tiles(batch, [40, 9, 30], counted=counted, config=SMALL))
              for counted in (False, True)]
    assert_close(found[0], naive(batch, chunk))
    assert all(torch.equal(other, found[0]) for other in found[1:])


@pytest.mark.parametrize("chunk", [16, 24, 133])
def test_reference_and_native_code_equal_a_naive_twin(chunk: int) -> None:
    cpu = torch.device("cpu")
    for requests in (FEW, MANY, [(400, 3, 3), (290, 150, 150)]):
        batch = make_batch(cpu, torch.float32, requests, window=chunk, is_chunked=True)
        batch = replace(batch, q=batch.q.contiguous(), page_table=batch.page_table.clamp(max=len(batch.k_cache) - 1))
        wanted = naive(batch, chunk)
        assert_close(reference.paged_attention(*batch.args, 0.3, chunk, is_chunked=True), wanted)
        if native.available():
            assert ops.paged_attention.has_kernel(*batch.args, 0.3, chunk, 0.0, None, None, True)
            assert_close(ops.paged_attention(*batch.args, 0.3, chunk, 0.0, None, None, True), wanted)


def test_a_chunk_needs_its_size_and_its_own_list_of_splits(device: torch.device, dtype: torch.dtype) -> None:
    batch = make_batch(device, dtype, [(37, 1, 1)])
    with pytest.raises(ValueError, match="is_chunked is True, expected a window"):
        decode(batch, is_chunked=True)
    splits = list_splits(batch.lengths, batch.live, 4, 2, 16, 4, max_query=1, max_length=48, window=24)
    with pytest.raises(ValueError, match="were listed for another batch"):
        decode(batch, splits=splits, config=None, max_length=48, window=24, is_chunked=True)


@pytest.mark.long
@pytest.mark.skipif(torch.cuda.is_available(), reason="the other tests compile them")
def test_the_compiler_takes_chunks() -> None:
    found = set(found_without_interpreter(__file__))
    assert found == {"_decode_kernel", "_list_splits_kernel", "_count_tiles_kernel", "_prefill_kernel", "_exact_kernel"}


def compiled() -> list[str]:
    from outrider.kernels.gpu.attention.decode import decode_attention
    from outrider.kernels.gpu.attention.prefill import device_query_tiles, prefill_attention

    count, cache = 16, torch.zeros(8, 16, 8, 128, dtype=torch.bfloat16)
    ints = [torch.zeros(n, dtype=torch.int32) for n in (count + 1, count, count)]
    args = (torch.zeros(count, 40, 128, dtype=torch.bfloat16), cache, cache.clone(),
            torch.zeros(count, 1024, dtype=torch.int32), *ints)
    options: dict[str, Any] = {"scale": 1.0, "window": 8192, "is_chunked": True, "pdl": True}
    with compiling() as found:
        splits = list_splits(*ints[1:], 40, 8, 128, 2, max_query=4, max_length=16384, window=8192, is_chunked=True)
        for made in (None, splits):
            decode_attention(*args, max_query=4, max_length=16384, splits=made, **options)
        exact_attention(*args, max_query=4, max_length=16384, **options)
        prefill_attention(*args, device_query_tiles(ints[0], count, 4, 40, 8, 128), **options)
    return found


if __name__ == "__main__":
    print(json.dumps(compiled()))
