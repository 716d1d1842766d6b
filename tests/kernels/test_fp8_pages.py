"""Pages of fp8 numbers: kernels that write them, bit for bit against the plain rounding, and kernels that read them,
against the plain reference over the numbers that the pages stand for. Everything unused is poisoned."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

triton = pytest.importorskip("triton", reason="needs the triton package")

from outrider.kernels import latent, latent_inputs, reference
from outrider.kernels.fp8_cache import FP8, HeadScales, from_fp8, to_fp8
from outrider.kernels.gpu.attention.exact_attention import ExactConfig, exact_attention
from outrider.kernels.gpu.attention.prefill import PrefillConfig
from outrider.kernels.gpu.latent import attention as latent_attention
from outrider.kernels.gpu.latent import inputs as inputs_kernel
from outrider.kernels.gpu.latent.attention import LatentConfig
from outrider.kernels.gpu.latent.exact_latent import exact_dense_latent_attention, exact_latent_attention
from outrider.kernels.gpu.pages.cache_write import cache_write
from outrider.kernels.gpu.pages.fp8 import PAIRS_BELOW
from outrider.kernels.gpu.pages.rope_cache import rope_cache_write
from outrider.kernels.latent_inputs import RopeRows
from tests.kernels import test_shared_attention as sharing
from tests.kernels.conftest import HAS_CARD
from tests.kernels.test_exact_attention import as_tiles
from tests.kernels.test_shared_attention import Sharer
from tests.kernels.test_triton_attention import (
    SMALL,
    Batch,
    assert_close,
    decode,
    listed,
    make_batch,
    prefill,
)
from tests.kernels.test_triton_latent import LENS, make_cache, make_choice, make_contexts, spread

NAN = float("nan")
EXACT = ExactConfig(16, 16, 4, 2)


@pytest.fixture(params=["float32", "bfloat16"])
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    """Pages are multiplied as float32 or float16 numbers, which the interpreter serves too."""
    return getattr(torch, request.param)


def scales_of(kv_heads: int, device: torch.device) -> HeadScales:
    """Scales that round when numbers are divided by them."""
    steps = torch.arange(kv_heads, device=device, dtype=torch.float32)
    return HeadScales(0.03 + 0.011 * steps, 1.7 - 0.3 * steps)


def in_fp8(batch: Batch) -> tuple[Batch, HeadScales, Batch]:
    """The batch over pages in fp8, their scales, and the batch over the same numbers in float64."""
    scales = scales_of(batch.k_cache.shape[2], batch.q.device)
    by_head = [scale[:, None] for scale in scales]
    # The page stride is that of a pool.
    parts = zip((batch.k_cache, batch.v_cache), by_head, strict=True)
    pool = torch.stack([to_fp8(part, scale) for part, scale in parts], 1)
    wide = [from_fp8(pool[:, i], by_head[i].double(), torch.float64) for i in (0, 1)]
    stored = replace(batch, k_cache=pool[:, 0], v_cache=pool[:, 1])
    return stored, scales, replace(batch, q=batch.q.double(), k_cache=wide[0], v_cache=wide[1])


def decode_early(batch: Batch, **options: Any) -> torch.Tensor:
    """Values are fetched together with their keys, and long splits in more stages."""
    return decode(batch, config=replace(SMALL, early_values=True, long_stages=2), **options)


def prefill_many_rows(batch: Batch, **options: Any) -> torch.Tensor:
    """Tiles whose values are not multiplied in pairs."""
    return prefill(batch, PrefillConfig(block_m=PAIRS_BELOW.value, block_n=16, num_warps=4), **options)


def exact(batch: Batch, **options: Any) -> torch.Tensor:
    return exact_attention(*batch.args, **({"scale": 0.3, "config": EXACT, "split_keys": 32, "max_length": 96,
                                            "max_query": int(batch.query_starts.diff().max())} | options))


@pytest.mark.parametrize(("window", "softcap"), [(None, None), (20, 3.0)])
@pytest.mark.parametrize("run", [decode, decode_early, listed, prefill, prefill_many_rows, exact])
def test_attention_equals_the_reference(run: Callable[..., torch.Tensor], window: int | None, softcap: float | None,
                                        device: torch.device, dtype: torch.dtype) -> None:
    batch = make_batch(device, dtype, [(37, 1, 1), (0, 0, 0), (66, 3, 2), (40, 2, 0)], window=window)
    stored, scales, wide = in_fp8(batch)
    wanted = reference.paged_attention(*wide.args, 0.3, window or 0, softcap or 0.0)
    assert_close(run(stored, window=window, softcap=softcap, scales=scales), wanted)


@pytest.mark.long
@pytest.mark.parametrize("dim", [15, 32, 64, 80, 96, 112, 128, 192, 256, 512])
@pytest.mark.parametrize("run", [decode, listed, prefill, prefill_many_rows, exact])
def test_attention_over_every_head_size(run: Callable[..., torch.Tensor], dim: int, device: torch.device,
                                        dtype: torch.dtype) -> None:
    stored, scales, wide = in_fp8(make_batch(device, dtype, [(37, 1, 1), (66, 3, 2)], dim=dim))
    assert_close(run(stored, scale=dim**-0.5, scales=scales), reference.paged_attention(*wide.args, dim**-0.5, 0, 0.0))


def test_shared_pages_are_read_once(device: torch.device, dtype: torch.dtype) -> None:
    requests = [Sharer(100), Sharer(40), Sharer(90, of=0, shared=64), Sharer(80, of=0, shared=64)]
    batch = sharing.make_shared(device, dtype, requests, heads=2, kv_heads=2)
    stored, scales, wide = in_fp8(batch)
    splits = sharing.list_for(stored, sharing.find(stored))
    assert sharing.members(splits) == [[0, 2, 3]]
    wanted = reference.paged_attention(*wide.args, 0.3, 0, 0.0)
    assert_close(sharing.attend(stored, splits, scales=scales), wanted)


def test_the_numbers_of_a_query_may_be_greater_than_those_of_float16(device: torch.device) -> None:
    """Queries of any size, from the smallest to the greatest numbers of bfloat16, give finite results."""
    batch = make_batch(device, torch.bfloat16, [(37, 4, 4)])
    factors = torch.tensor([1e-38, 1e-4, 1e6, 1e37], device=device)[:, None, None]
    batch = replace(batch, q=(batch.q.float() * factors).bfloat16())
    stored, scales, wide = in_fp8(batch)
    for run in (decode, prefill):
        out = run(stored, scales=scales)
        wanted = reference.paged_attention(*wide.args, 0.3, 0, 0.0)
        assert_close(out, wanted)


def test_a_bad_token_fails_those_who_see_it(device: torch.device, dtype: torch.dtype) -> None:
    batch = make_batch(device, dtype, [(40, 12, 12), (37, 1, 1)])
    page = int(batch.page_table[0, 2])
    batch.k_cache[page, 1, 0], batch.v_cache[page, 1, 0] = NAN, 0  # position 33, in one head
    stored, scales, _ = in_fp8(batch)
    for run in (decode, prefill):
        out = run(stored, scales=scales)
        assert out[5:12, :2].isnan().all() and out[:5].isfinite().all() and out[12:].isfinite().all()


def test_exact_attention_has_the_same_bits_in_every_batch(device: torch.device, dtype: torch.dtype) -> None:
    """Some of a request's last 20 tokens alone, against the prompt with a batch mate."""
    batch, scales, _ = in_fp8(make_batch(device, dtype, [(70, 20, 20), (30, 3, 3)], heads=2, kv_heads=1))
    whole = exact(batch, scales=scales, tiles=as_tiles(batch, [20, 3], counted=False, config=EXACT))
    starts, live = (torch.tensor(ints, dtype=torch.int32, device=device) for ints in ([0, 1], [1]))
    for token in (0, 13, 19):
        lengths = torch.tensor([51 + token], dtype=torch.int32, device=device)
        alone = replace(batch, q=batch.q[token : token + 1], page_table=batch.page_table[:1], query_starts=starts,
                        lengths=lengths, live=live)
        assert torch.equal(exact(alone, scales=scales)[0], whole[token]), token


KV_HEADS, DIM, PAGE = 3, 20, 16


def write_plain(qkv: torch.Tensor, caches: torch.Tensor, **options: Any) -> None:
    k, v = qkv.view(len(qkv), -1, DIM)[:, 4:].split((KV_HEADS, KV_HEADS), dim=1)
    cache_write(k, v, slots_of(qkv), caches[:, 0], caches[:, 1], **options)


def write_rotated(qkv: torch.Tensor, caches: torch.Tensor, **options: Any) -> None:
    table = torch.randn(40, 12, generator=torch.Generator().manual_seed(1)).to(qkv.device)
    gain = torch.full((DIM,), 1.5, device=qkv.device, dtype=qkv.dtype)
    rope_cache_write(qkv, slots_of(qkv).abs(), table, slots_of(qkv), caches[:, 0], caches[:, 1], gain, gain, **options)


def write_normed(qkv: torch.Tensor, caches: torch.Tensor, **options: Any) -> None:
    write_rotated(qkv, caches, v_norm=True, **options)


def are_same_codes(stored: torch.Tensor, wanted: torch.Tensor) -> bool:
    """Whether all bits are equal but for the signs of NaN, which processors choose."""
    codes = [torch.where(own.float().isnan(), 0x7F, own.view(torch.uint8)) for own in (stored, wanted)]
    return torch.equal(*codes)


def slots_of(qkv: torch.Tensor) -> torch.Tensor:
    return torch.tensor([3, 17, -1, 30, 5], device=qkv.device)


@pytest.mark.parametrize("write", [write_plain, write_rotated, write_normed])
def test_keys_and_values_are_rounded_when_they_are_written(write: Callable[..., None], device: torch.device,
                                                           dtype: torch.dtype) -> None:
    """Great numbers become the greatest of fp8, and a token with a number that is not finite has keys of NaN."""
    qkv = torch.randn(5, (4 + 2 * KV_HEADS) * DIM, generator=torch.Generator().manual_seed(0)).to(device, dtype)
    qkv[1] *= 1e4
    qkv[3, 5 * DIM] = float("inf")
    plain = torch.zeros(2, 2, PAGE, KV_HEADS, DIM, device=device, dtype=dtype)
    stored = plain.to(FP8)
    scales = scales_of(KV_HEADS, device)
    write(qkv, plain)
    write(qkv, stored, scales=scales)
    for part, scale in enumerate(scales):
        wanted = to_fp8(plain[:, part], scale[:, None])
        assert are_same_codes(stored[:, part], wanted)
    if HAS_CARD or dtype == torch.float32:  # the interpreter's bfloat16 has no NaN
        assert stored[1, 0, 14, 1].float().isnan().all()
    assert not stored[:, 1].float().isnan().any()
    assert write is not write_plain or stored.float().nan_to_num(0).abs().max() == 448


def test_latents_are_rounded_when_they_are_written(device: torch.device, dtype: torch.dtype) -> None:
    compressed = spread(9, 7 + 12 + 4, device=device, dtype=dtype) * 100
    norms = [1 + 500 * spread(size, device=device, dtype=dtype, seed=size).abs() for size in (7, 12)]
    rope = RopeRows(torch.arange(3, 12, device=device), spread(20, 4, device=device, dtype=torch.float32))
    slots = torch.tensor([4, 9, -1, 22, 5, 30, -1, 12, 7], device=device)

    def written(write: Any, stored: torch.dtype, **options: Any) -> torch.Tensor:
        cache = torch.full((8, 4, 16), NAN, device=device).to(stored)
        write(compressed, *norms, 1e-6, rope, slots, cache, None, **options)
        return cache

    for write, options in ((inputs_kernel.write_latents, {"pdl": False}), (latent_inputs.write_latents, {})):
        rounded, numbers = (written(write, stored, **options) for stored in (FP8, dtype))
        assert are_same_codes(rounded, to_fp8(numbers))
        assert rounded.float().nan_to_num(0).abs().max() == 448 and rounded[0].float().isnan().all()


@pytest.mark.parametrize(("size", "q_tile", "splits"), [(8, 1, 1), (28, 4, 2)])
def test_latent_attention_equals_the_reference(size: int, q_tile: int, splits: int, device: torch.device,
                                               dtype: torch.dtype) -> None:
    """The smaller latents are too small for products with halves."""
    contexts, positions = make_choice(device, torch.int32)
    entries = make_cache(contexts, size + 4, dtype).contiguous().to(FP8)
    q = spread(len(contexts.first), 5, size + 4, device=device, dtype=dtype)
    config = LatentConfig(16, q_tile, 16, 4, 1)
    wide = entries.double()
    every = latent.dense_latent_attention(q.double(), wide, contexts, 32, 0.3, size)
    chosen = latent.latent_attention(q.double(), wide, contexts, positions.long(), 0.3, size)
    given = {"config": config, "num_splits": splits, "pdl": False}
    assert_close(latent_attention.dense_latent_attention(q, entries, contexts, 32, 0.3, size, **given), every)
    assert_close(latent_attention.latent_attention(q, entries, contexts, positions, 0.3, size, **given), chosen)
    assert_close(exact_dense_latent_attention(q, entries, contexts, 32, 0.3, size, split=16, pdl=False), every)
    assert_close(exact_latent_attention(q, entries, contexts, positions, 0.3, size, split=16, pdl=False), chosen)
    assert_close(latent.dense_latent_attention(q, entries, contexts, 32, 0.3, size), every)


def test_exact_latent_attention_has_the_same_bits_alone(device: torch.device, dtype: torch.dtype) -> None:
    contexts = make_contexts(device, LENS, columns=8)
    entries = make_cache(contexts, 16, dtype).contiguous().to(FP8)
    q = spread(len(contexts.first), 3, 16, device=device, dtype=dtype)
    whole = exact_dense_latent_attention(q, entries, contexts, 32, 0.3, 12, split=16, pdl=False)
    for row in (0, 3, 8):
        rows = slice(row, row + 1)
        alone = exact_dense_latent_attention(q[rows], entries, contexts.cut(rows), 32, 0.3, 12, split=16, pdl=False)
        assert torch.equal(alone, whole[rows])


def test_pages_in_fp8_need_their_scales(device: torch.device, dtype: torch.dtype) -> None:
    stored, scales, _ = in_fp8(make_batch(device, dtype, [(37, 1, 1)]))
    with pytest.raises(ValueError, match="k_cache has dtype torch.float8_e4m3fn, expected"):
        decode(stored)
    with pytest.raises(ValueError, match=r"scales.v has shape \[1\]"):
        decode(stored, scales=HeadScales(scales.k, scales.v[:1]))
