"""Attention with sinks (one more key for every query, whose value is 0) in every kernel, against the plain reference;
and as the kernels are compiled for a card."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="needs the triton package")

from outrider.kernels import cpu as native
from outrider.kernels import ops, reference
from outrider.kernels.gpu.attention.decode import decode_attention
from outrider.kernels.gpu.attention.exact_attention import exact_attention
from outrider.kernels.gpu.attention.prefill import prefill_attention, prefill_config, query_tiles
from tests.kernels.compiled import compiling, found_without_interpreter
from tests.kernels.test_exact_attention import SMALL as EXACT
from tests.kernels.test_exact_attention import SPLIT, as_tiles
from tests.kernels.test_shared_attention import Sharer, attend, find, list_for, make_shared, members
from tests.kernels.test_triton_attention import Batch, assert_close, decode, listed, make_batch, prefill

REQUESTS = [(70, 3, 2), (0, 0, 0), (5, 5, 5), (40, 2, 0)]
OPTIONS = [(None, None), (23, 3.0)]


def sinks_of(heads: int, device: torch.device) -> torch.Tensor:
    """About as large as scores, far below, and far above all of them."""
    return torch.tensor([0.4, -300.0, 2.0, 300.0, -1.0, 0.0][:heads], device=device)


def expected(batch: Batch, sinks: torch.Tensor, window: int | None = None, softcap: float | None = None) -> Any:
    q, k, v, table, *counts = batch.args
    table = torch.where((table < 0) | (table >= k.shape[0]), 0, table)
    return reference.paged_attention(q.double(), k.double(), v.double(), table, *counts, 0.3, window or 0,
                                     softcap or 0.0, sinks=sinks)


def test_the_reference_is_attention_over_one_more_key(device: torch.device) -> None:
    batch = make_batch(device, torch.float32, [(5, 5, 5)], heads=2, kv_heads=1)
    sinks = torch.tensor([0.7, -0.3], device=device)
    k, v = (cache[batch.page_table[0, 0], :5, 0].double() for cache in (batch.k_cache, batch.v_cache))
    for head in range(2):
        for row in range(5):
            scores = k[: row + 1] @ batch.q[row, head].double() * 0.3
            weights = torch.cat((scores, sinks[head, None].double())).softmax(0)[:-1]
            found = reference.paged_attention(*batch.args, 0.3, sinks=sinks)[row, head]
            torch.testing.assert_close(found.double(), weights @ v[: row + 1], atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize(("window", "softcap"), OPTIONS)
def test_kernels_of_decoding_and_prompts(device: torch.device, dtype: torch.dtype, window: int | None,
                                         softcap: float | None) -> None:
    batch, sinks = make_batch(device, dtype, REQUESTS, window=window), sinks_of(4, device)
    wanted, options = expected(batch, sinks, window, softcap), {"window": window, "softcap": softcap, "sinks": sinks}
    for found in (decode(batch, num_splits=1, **options), decode(batch, split_size=32, **options),
                  listed(batch, **options), prefill(batch, **options)):
        assert_close(found, wanted)
    assert wanted[:, 3].abs().max() < 1e-30 < wanted[0, 2].abs().min(), "a sink far above all scores takes all weight"


def test_a_pack_of_requests(device: torch.device, dtype: torch.dtype) -> None:
    batch = make_shared(device, dtype, [Sharer(100), Sharer(90, 0, 64), Sharer(70, 0, 64)])
    splits, sinks = list_for(batch, find(batch)), sinks_of(4, device)
    assert members(splits), "requests share pages"
    assert_close(attend(batch, splits, sinks=sinks), expected(batch, sinks))


@pytest.mark.parametrize(("window", "softcap"), OPTIONS)
def test_exact_attention_to_the_bit(device: torch.device, dtype: torch.dtype, window: int | None,
                                    softcap: float | None) -> None:
    batch, sinks = make_batch(device, dtype, REQUESTS, window=window), sinks_of(4, device)
    options: dict[str, Any] = {"scale": 0.3, "window": window, "softcap": softcap, "config": EXACT,
                               "split_keys": SPLIT, "sinks": sinks}
    found = [exact_attention(*batch.args, **options, max_query=9, max_length=70, num_programs=n) for n in (1, 64)]
    lens = [scheduled for _, scheduled, _ in REQUESTS]
    found.append(exact_attention(*batch.args, **options, tiles=as_tiles(batch, lens, counted=True, config=EXACT)))
    assert_close(found[0], expected(batch, sinks, window, softcap))
    assert all(torch.equal(other, found[0]) for other in found)


@pytest.mark.skipif(not native.available(), reason="needs a C compiler")
@pytest.mark.parametrize(("window", "softcap"), OPTIONS)
def test_the_native_kernel(window: int | None, softcap: float | None) -> None:
    cpu = torch.device("cpu")
    for requests in (REQUESTS, [(900, 1, 1)]):  # the second: threads share the keys of one request
        batch, sinks = make_batch(cpu, torch.float32, requests, window=window), sinks_of(4, cpu)
        q, k, v, table, *counts = batch.args
        table = torch.where((table < 0) | (table >= k.shape[0]), 0, table)
        given = (q.contiguous(), k, v, table, *counts, 0.3, window or 0, softcap or 0.0, None, sinks)
        assert ops.paged_attention.has_kernel(*given)
        assert_close(ops.paged_attention(*given), expected(batch, sinks, window, softcap))


def test_sinks_are_checked(device: torch.device, dtype: torch.dtype) -> None:
    batch = make_batch(device, dtype, REQUESTS)
    for call in (decode, prefill):
        with pytest.raises(ValueError, match="sinks"):
            call(batch, sinks=torch.zeros(3, device=device))


@pytest.mark.long
def test_kernels_compile_for_the_card() -> None:
    kernels = found_without_interpreter(__file__)
    assert {"_decode_kernel", "_prefill_kernel", "_exact_kernel"} <= set(kernels)


def compile_all() -> list[str]:
    """At gpt-oss's sizes: 64 heads on 8, of 64."""
    dtype = torch.bfloat16
    cache, q = torch.zeros(9, 16, 8, 64, dtype=dtype), torch.zeros(20, 64, 64, dtype=dtype)
    table = torch.zeros(2, 4, dtype=torch.int32)
    starts, lengths, live = (torch.tensor(x, dtype=torch.int32) for x in ([0, 1, 20], [30, 19], [1, 19]))
    options: dict[str, Any] = {"scale": 0.3, "window": 128, "sinks": torch.zeros(64), "pdl": True}
    args = (q, cache, cache, table, starts, lengths, live)
    with compiling() as names:
        decode_attention(*args, **options, max_query=1, max_length=64, num_splits=4)
        tiles = query_tiles([0, 19], 64, 8, 64, q.device, config=prefill_config(64))
        prefill_attention(*args, tiles, **options)
        exact_attention(*args, **options, max_query=1, max_length=64, num_programs=4)
    return names


if __name__ == "__main__":
    print(json.dumps(compile_all()))
