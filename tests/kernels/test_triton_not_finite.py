"""What is not finite in one token's keys and values: the kernels that write them contain it, so that attention fails
for whoever may see the token and for nobody else."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton", reason="needs the triton package")

from outrider.kernels.gpu import cache_write, rope_cache_write
from tests.kernels.test_triton_attention import Batch, decode, make_batch, prefill

NAN, INF = float("nan"), float("inf")
TOKENS, HEADS, KV_HEADS, DIM, PAGE = 5, 4, 3, 20, 16
BAD = 2  # the token that is not finite, in one element of one head
Write = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None]


def write_plain(qkv: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor) -> None:
    _, k, v = qkv.view(TOKENS, -1, DIM).split((HEADS, KV_HEADS, KV_HEADS), dim=1)
    cache_write(k, v, slots_of(qkv), k_cache, v_cache)


def write_rotated(qkv: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, **options: bool) -> None:
    table = torch.randn(32, 12, generator=torch.Generator().manual_seed(1)).to(qkv.device)
    gain = torch.ones(DIM, device=qkv.device, dtype=qkv.dtype) if options else None
    rope_cache_write(qkv, slots_of(qkv), table, slots_of(qkv), k_cache, v_cache, gain, gain, **options)


def write_normed(qkv: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor) -> None:
    write_rotated(qkv, k_cache, v_cache, v_norm=True)


def write_values_from_keys(qkv: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor) -> None:
    write_rotated(qkv[:, : (HEADS + KV_HEADS) * DIM], k_cache, v_cache, v_from_k=True, v_norm=True)


def slots_of(qkv: torch.Tensor) -> torch.Tensor:
    return torch.tensor([3, 17, 20, 30, 5], device=qkv.device)


@pytest.mark.parametrize(("column", "bad"), [(0, NAN), (DIM - 1, -INF)])
@pytest.mark.parametrize(("write", "part"), [
    (write_plain, "key"), (write_plain, "value"), (write_rotated, "key"), (write_rotated, "value"),
    (write_normed, "key"), (write_normed, "value"), (write_values_from_keys, "key"),
])
def test_a_token_gets_keys_of_nan_and_values_that_are_finite(
    write: Write, part: str, column: int, bad: float, device: torch.device, dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(0)
    qkv = torch.randn(TOKENS, (HEADS + 2 * KV_HEADS) * DIM, generator=generator).to(device, dtype)
    caches = [torch.zeros(2, 2, PAGE, KV_HEADS, DIM, device=device, dtype=dtype) for _ in range(2)]
    write(qkv, *caches[0])
    bad_head = 1
    qkv[BAD, (HEADS + bad_head + KV_HEADS * (part == "value")) * DIM + column] = bad
    write(qkv, *caches[1])
    (clean_k, clean_v), (k, v) = (cache.view(2, 2 * PAGE, KV_HEADS, DIM) for cache in caches)
    slot = int(slots_of(qkv)[BAD])
    assert k[slot, bad_head].isnan().all(), "whoever sees the token fails"
    assert v.isfinite().all(), "nobody else does"
    for own in (clean_k, clean_v, k, v):
        own[slot, bad_head] = 0
    assert torch.equal(k, clean_k) and torch.equal(v, clean_v)


def with_contained_token(batch: Batch, request: int, position: int) -> Batch:
    """The token has keys of NaN and values of 0, in one head."""
    k, v = batch.k_cache.clone(), batch.v_cache.clone()
    page = int(batch.page_table[request, position // PAGE])
    k[page, position % PAGE, 0], v[page, position % PAGE, 0] = NAN, 0
    return replace(batch, k_cache=k, v_cache=v)


@pytest.mark.parametrize("window", [None, 7])
@pytest.mark.parametrize("attend", [decode, prefill], ids=["decode", "prefill"])
def test_attention_fails_for_those_who_see_the_token_and_for_nobody_else(
    attend: Callable[..., torch.Tensor], window: int | None, device: torch.device, dtype: torch.dtype
) -> None:
    """The token lies in the middle of its request's queries, and so in tiles of keys of those before it."""
    requests = [(40, 12, 12), (37, 1, 1)]
    batch = make_batch(device, dtype, requests, window=window)
    wanted = attend(batch, window=window)
    out = attend(with_contained_token(batch, 0, 33), window=window)
    sees = torch.tensor([28 + query >= 33 and (window is None or 28 + query < 33 + window) for query in range(12)]
                        + [False], device=device)
    assert torch.equal(out[~sees], wanted[~sees])
    assert out[sees][:, :2].isnan().all(), "the query heads of the key's head"
    assert torch.equal(out[:, 2:], wanted[:, 2:])
