"""Triton attention, decode and prefill, against the plain reference, with everything unused poisoned."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import pytest
import torch

triton = pytest.importorskip("triton", reason="needs the triton package")

import triton.language as tl

from outrider.kernels import reference
from outrider.kernels.gpu.attention import splits as attention_splits
from outrider.kernels.gpu.attention.decode import decode_attention
from outrider.kernels.gpu.attention.prefill import (
    CountedTiles,
    PrefillChoice,
    PrefillConfig,
    choose_prefill,
    device_query_tiles,
    prefill_attention,
    query_tiles,
)
from outrider.kernels.gpu.attention.splits import (
    MOST_SPLITS,
    DecodeConfig,
    list_splits,
    pays_split_list,
    plan_launch,
    split_geometry,
)
from outrider.kernels.gpu.attention.windows import window_kind
from outrider.mixers.paged.backend import AttentionLayer, KeyValueCache
from outrider.mixers.paged.triton_backend import TritonBackend

NAN = float("nan")
SMALL = DecodeConfig(block_n=16, max_rows=16)
SMALL_TILES = PrefillConfig(block_m=16, block_n=16, num_warps=4)


@dataclass(frozen=True)
class Batch:
    q: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    page_table: torch.Tensor
    query_starts: torch.Tensor
    lengths: torch.Tensor
    live: torch.Tensor

    @property
    def args(self) -> tuple[torch.Tensor, ...]:
        return (self.q, self.k_cache, self.v_cache, self.page_table, self.query_starts, self.lengths, self.live)


def make_batch(
    device: torch.device, dtype: torch.dtype, requests: list[tuple[int, int, int]], *, heads: int = 4,
    kv_heads: int = 2, dim: int = 16, page_size: int = 16, window: int | None = None, poison: float = NAN,
    is_chunked: bool = False,
) -> Batch:
    """Requests are (length, scheduled, live). Whatever no live query may see holds `poison`, the table's tail too."""
    generator = torch.Generator().manual_seed(7)
    columns = max(1, max(-(-length // page_size) for length, _, _ in requests)) + 2
    num_pages = 1 + columns * len(requests)
    order = torch.randperm(num_pages - 1, generator=generator) + 1
    values = torch.randn(2, num_pages, page_size, kv_heads, dim, generator=generator)
    # Pages carry other layers too, so the page stride is not that of one layer.
    pool = torch.full((num_pages, 3, page_size, kv_heads, dim), poison)
    table = torch.full((len(requests), columns + 3), 1 << 30 if poison != poison else -7, dtype=torch.int32)
    for r, (length, _, live) in enumerate(requests):
        first = 0 if window is None else max(0, length - live - window + 1)
        if is_chunked and window is not None:
            first = (length - live) // window * window
        for position in range(first, length if live else 0):
            page = int(order[r * columns + position // page_size])
            table[r, position // page_size] = page
            pool[page, :2, position % page_size] = values[:, page, position % page_size]
    starts = torch.tensor([0] + [n for _, n, _ in requests]).cumsum(0).to(torch.int32)
    q = torch.randn(int(starts[-1]), heads + 1, dim, generator=generator)
    for r, (_, scheduled, live) in enumerate(requests):
        q[int(starts[r]) + live : int(starts[r]) + scheduled] = poison
    pool = pool.to(device, dtype)
    return Batch(
        q.to(device, dtype)[:, :heads], pool[:, 0], pool[:, 1], table.to(device)[:, : columns + 1], starts.to(device),
        torch.tensor([n for n, _, _ in requests], dtype=torch.int32, device=device),
        torch.tensor([n for _, _, n in requests], dtype=torch.int32, device=device),
    )


def decode(batch: Batch, **options: Any) -> torch.Tensor:
    scheduled = batch.query_starts.diff().max()
    bound = (batch.page_table.shape[1] - 1) * batch.k_cache.shape[1]
    defaults = {"scale": 0.3, "max_query": int(scheduled), "max_length": bound, "config": SMALL}
    return decode_attention(*batch.args, **(defaults | options))


def prefill(batch: Batch, config: PrefillChoice | None = SMALL_TILES, **options: Any) -> torch.Tensor:
    """Without a config: with the kernel that the backend takes."""
    config = config or choose_prefill(batch.q.shape[1], batch.k_cache)
    tiles = query_tiles(batch.query_starts.diff().tolist(), batch.q.shape[1], batch.k_cache.shape[2],
                        batch.q.shape[2], batch.q.device, config=config)
    return prefill_attention(*batch.args, tiles, **({"scale": 0.3} | options))


def expected(batch: Batch, window: int | None = None, softcap: float | None = None) -> torch.Tensor:
    wide = replace(batch, q=batch.q.double(), k_cache=batch.k_cache.double(), v_cache=batch.v_cache.double())
    return reference.paged_attention(*wide.args, 0.3, window or 0, softcap or 0.0)


def assert_close(actual: torch.Tensor, wanted: torch.Tensor) -> None:
    tolerance = 2e-2 if actual.dtype == torch.bfloat16 else 2e-5
    torch.testing.assert_close(actual.double(), wanted.double(), rtol=tolerance, atol=tolerance)


DECODING = [(37, 1, 1), (0, 0, 0), (66, 3, 2), (40, 2, 0)]
SHAPES = [
    {"heads": 4, "kv_heads": 2, "dim": 16, "page_size": 16},
    {"heads": 3, "kv_heads": 1, "dim": 20, "page_size": 64},
    {"heads": 2, "kv_heads": 2, "dim": 64, "page_size": 16},
]


@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: f"{s['heads']}x{s['kv_heads']}x{s['dim']}p{s['page_size']}")
@pytest.mark.parametrize("split", [{"num_splits": 1}, {"split_size": 32}], ids=["whole", "split"])
def test_decode_equals_the_reference(
    device: torch.device, dtype: torch.dtype, shape: dict[str, int], split: dict[str, int],
) -> None:
    batch = make_batch(device, dtype, DECODING, **shape)
    assert_close(decode(batch, **split), expected(batch))


@pytest.mark.parametrize(("window", "softcap"), [(1, None), (20, 3.0), (37, None), (None, 2.0)])
@pytest.mark.parametrize("split", [{"num_splits": 1}, {"split_size": 16}], ids=["whole", "split"])
def test_decode_with_window_and_softcap(
    device: torch.device, dtype: torch.dtype, window: int | None, softcap: float | None, split: dict[str, int],
) -> None:
    batch = make_batch(device, dtype, [(70, 3, 2), (9, 1, 1)], heads=2, kv_heads=1, window=window)
    actual = decode(batch, window=window, softcap=softcap, **split)
    assert_close(actual, expected(batch, window, softcap))


def test_decode_tiles_many_queries_and_default_config(device: torch.device, dtype: torch.dtype) -> None:
    batch = make_batch(device, dtype, [(40, 9, 9), (64, 16, 13)], heads=6, kv_heads=1)
    assert_close(decode(batch, num_splits=1), expected(batch))
    assert_close(decode(batch, config=None), expected(batch))


def test_requests_with_one_split_beside_some_with_several(device: torch.device, dtype: torch.dtype) -> None:
    batch = make_batch(device, dtype, [(37, 2, 1), (600, 2, 2), (0, 0, 0), (300, 1, 0)], heads=2, kv_heads=1)
    assert_close(decode(batch, num_splits=4), expected(batch))


def test_splits_of_many_keys_are_read_in_more_stages(device: torch.device, dtype: torch.dtype) -> None:
    """One split beyond 512 keys beside shorter ones: the other loop has the same results, bit for bit."""
    batch = make_batch(device, dtype, [(600, 1, 1), (37, 1, 1), (560, 2, 2)], heads=2, kv_heads=1)
    plain, deep = (replace(SMALL, long_stages=stages) for stages in (0, 4))
    actual = decode(batch, num_splits=1, config=deep)
    assert_close(actual, expected(batch))
    assert torch.equal(actual, decode(batch, num_splits=1, config=plain))


def listed(batch: Batch, **options: Any) -> torch.Tensor:
    """Decoding by a list of the splits that there are, short ones."""
    num_heads, head_dim = batch.q.shape[1:]
    given = {"max_query": int(batch.query_starts.diff().max()), "config": SMALL,
             "max_length": (batch.page_table.shape[1] - 1) * batch.k_cache.shape[1]} | options
    by = {name: given[name] for name in ("max_query", "max_length", "window", "is_chunked", "key_starts", "config")
          if name in given}
    with mock.patch.object(attention_splits, "least_listed_split", return_value=32):
        splits = list_splits(batch.lengths, batch.live, num_heads, batch.k_cache.shape[2], head_dim,
                             batch.k_cache.element_size(), **by)
    return decode(batch, splits=splits, **given | {"config": None})


LISTED = [(37, 1, 1), (0, 0, 0), (130, 3, 2), (40, 2, 0), (66, 1, 1), (130, 1, 1)]


@pytest.mark.parametrize("window", [None, 50, 31])
def test_decode_by_a_list(device: torch.device, dtype: torch.dtype, window: int | None) -> None:
    """The last request's three live tokens give it, in the shortest window, a split more than one token would."""
    batch = make_batch(device, dtype, [*LISTED, (144, 3, 3)], window=window)
    assert_close(listed(batch, window=window), expected(batch, window))
    starts = torch.tensor([20, 0, 64, 0, 66, 3, 0], dtype=torch.int32, device=device)
    options = {"window": window, "key_starts": starts}
    num_splits = 8 if window is None else 2  # as the list has: no more than a window's keys need
    assert torch.equal(listed(batch, **options), decode(batch, num_splits=num_splits, config=ALIKE, **options))


ALIKE = replace(SMALL, min_split=32)  # cuts as a list with short splits does


def test_a_list_has_each_split_once_and_the_longest_requests_first(device: torch.device, dtype: torch.dtype) -> None:
    batch = make_batch(device, dtype, LISTED)
    with mock.patch.object(attention_splits, "least_listed_split", return_value=32):
        splits = list_splits(batch.lengths, batch.live, 4, 2, 16, 4, max_query=3, max_length=160, config=SMALL)
    wanted = [(2, s) for s in range(5)] + [(5, s) for s in range(5)] + [(4, 0), (4, 1), (4, 2), (3, 0), (3, 1), (0, 0),
                                                                        (0, 1), (1, 0)]
    items = splits.items[: int(splits.count)].tolist()
    assert [divmod(item, MOST_SPLITS.value) for item in items] == wanted
    assert torch.equal(listed(batch), decode(batch, num_splits=5, config=ALIKE)), "who serves a split changes no bit"


def test_padding_and_batch_mates_change_no_bit_of_a_list(device: torch.device, dtype: torch.dtype) -> None:
    batch = make_batch(device, dtype, LISTED)
    plain = listed(batch)
    tail = batch.query_starts[-1:].expand(70)
    padded = replace(
        batch, q=torch.cat((batch.q, batch.q * NAN)), query_starts=torch.cat((batch.query_starts, tail)),
        lengths=torch.nn.functional.pad(batch.lengths, (0, 70)), live=torch.nn.functional.pad(batch.live, (0, 70)),
        page_table=torch.cat((batch.page_table, torch.full_like(batch.page_table, -5)[:1].expand(70, -1))),
    )
    result = listed(padded)
    assert torch.equal(result[: len(plain)], plain) and bool((result[len(plain) :] == 0).all())
    alone = replace(batch, q=batch.q[:1], page_table=batch.page_table[:1], query_starts=batch.query_starts[:2],
                    lengths=batch.lengths[:1], live=batch.live[:1])
    assert torch.equal(listed(alone), plain[:1])


def test_how_a_list_is_cut() -> None:
    """As measured: few requests have many short splits; many requests have few long ones, which skew needs."""
    def cut(requests: int, window: int | None = None, kv_heads: int = 8, dim: int = 128) -> tuple[int, int]:
        made = plan_launch(requests, 16, kv_heads, dim, 2, 132, max_query=1, max_length=4096, window=window,
                          is_listed=True)
        return made.num_splits, made.split_size

    assert [cut(n) for n in (9, 16, 32, 48, 64, 256)] == [
        (32, 128), (32, 128), (16, 256), (8, 512), (2, 2048), (2, 2048)]
    assert cut(48, window=2000) == (4, 512) and cut(64, kv_heads=2, dim=512) == (8, 512)
    assert pays_split_list(9, None) and pays_split_list(64, 4096)
    assert not pays_split_list(64, 512) and not pays_split_list(8, None)


def test_kernels_are_compiled_for_requests_and_not_for_lengths() -> None:
    """A step with short contexts runs what was compiled for the longest there may be."""
    for requests in (1, 4, 8, 9, 16, 33, 64, 256):
        for is_listed in {False, requests > 8}:
            cuts = [plan_launch(requests, 16, 8, 128, 2, 132, max_query=1, max_length=most, window=None,
                               is_listed=is_listed) for most in (16, 300, 4096, 131072)]
            assert len({(cut.is_split, cut.config, cut.block_m) for cut in cuts}) == 1


@triton.jit
def _geometry_kernel(lengths, out, window, split_size, coarse_size, num_splits, WINDOW_KIND: tl.constexpr):
    at = tl.arange(0, 128)
    length = tl.load(lengths + at)
    first_key = length * 0  # of the lengths' shape, as the compiler needs: the base takes its shape from it
    base, size, active = split_geometry(length, 1, window, first_key, split_size, coarse_size, num_splits, 16,
                                        WINDOW_KIND)
    tl.store(out + at, base)
    tl.store(out + 128 + at, size)
    tl.store(out + 256 + at, active)


@pytest.mark.parametrize("window", [None, 320, 500])
def test_splits_are_even_and_cover_all_keys(device: torch.device, window: int | None) -> None:
    lengths = torch.arange(128, dtype=torch.int32, device=device) * 7 + 3
    out = torch.zeros(3, 128, dtype=torch.int32, device=device)
    _geometry_kernel[(1,)](lengths, out, window or 0, 64, 256, 5, WINDOW_KIND=window_kind(window, False))
    for length, base, size, active in zip(lengths.tolist(), *out.tolist(), strict=True):
        lowest = 0 if window is None else max(0, length - window)
        assert base <= lowest < base + 16 and base % 16 == size % 16 == 0
        assert 1 <= active <= 5 and base + active * size >= length > base + (active - 1) * size
        assert active == min(5, -(-(length - lowest) // 64)) or base < lowest
        last = length - base - (active - 1) * size
        assert size - last < 16 * active, "no split is shorter by more than rounding makes it"


def test_splits_with_many_rows_are_long(device: torch.device) -> None:
    """Each leaves the sums of all its rows. A long request among short ones still has many splits."""
    def least(queries: int, heads: int, dim: int) -> int:
        return plan_launch(16, heads, 2, dim, 2, 132, max_query=queries, max_length=131072, window=None,
                           is_listed=True).split_size

    assert [least(queries, 32, 128) for queries in (1, 2, 4)] == [512, 1024, 1024]
    assert [least(queries, 8, 128) for queries in (1, 3, 4)] == [128, 128, 512]
    assert least(3, 16, 512) == least(1, 16, 512) == 512
    lengths = torch.zeros(128, dtype=torch.int32, device=device)
    lengths[:4] = torch.tensor([100, 2000, 8000, 60000])
    out = torch.zeros(3, 128, dtype=torch.int32, device=device)
    _geometry_kernel[(1,)](lengths, out, 0, 1024, 256, 64, WINDOW_KIND=window_kind(None, False))
    assert out[2, :4].tolist() == [1, 2, 8, 59] and out[1, 2:4].tolist() == [1008, 1024]


def test_a_list_is_for_one_batch_only(device: torch.device, dtype: torch.dtype) -> None:
    batch = make_batch(device, dtype, LISTED)
    splits = list_splits(batch.lengths, batch.live, 4, 2, 16, batch.k_cache.element_size(), max_query=3, max_length=160)
    given = {"max_query": 3, "max_length": 160, "splits": splits, "config": None}
    decode(batch, **given)
    for change in ({"max_query": 2}, {"max_length": 150}, {"window": 8}, {"key_starts": batch.live}):
        with pytest.raises(ValueError, match="splits were listed for another batch"):
            decode(batch, **given | change)
    with pytest.raises(ValueError, match="splits were listed for another batch"):
        decode(replace(batch, lengths=batch.lengths.clone()), **given)
    for change in ({"num_splits": 2}, {"split_size": 32}, {"config": SMALL}):
        with pytest.raises(ValueError, match="splits plan the launch already"):
            decode(batch, **given | change)
    with pytest.raises(ValueError, match="list_splits: live"):
        list_splits(batch.lengths, batch.live[1:], 4, 2, 16, 4, max_query=3, max_length=160)


def test_the_device_finds_the_tiles(device: torch.device, dtype: torch.dtype) -> None:
    """A captured step with prompts: short requests to one kernel, the others to the other, nothing from the host."""
    requests = [(2, 2, 2), (50, 20, 20), (30, 1, 1), (0, 0, 0), (40, 33, 30), (44, 2, 1), (20, 3, 3)]
    batch = make_batch(device, dtype, requests, heads=4, kv_heads=1)
    lens = batch.query_starts.diff()
    short_live = torch.where(lens <= 2, batch.live, 0).int()
    out = torch.full_like(batch.q, NAN)
    *tensors, live = batch.args
    decode_attention(*tensors, short_live, scale=0.3, max_query=2, max_length=64, config=SMALL, out=out)
    tiles = device_query_tiles(batch.query_starts, batch.q.shape[0], 2, 4, 1, batch.q.shape[2])
    assert isinstance(tiles.order, CountedTiles) and tiles.queries == 32
    assert tiles.order.starts.tolist() == [0, 0, 1, 1, 1, 3, 3, 4]
    prefill_attention(*tensors, live, tiles, scale=0.3, out=out, fill_padding=False)
    assert_close(out, expected(batch))


def test_any_number_of_splits_agrees(device: torch.device, dtype: torch.dtype) -> None:
    batch = make_batch(device, dtype, [(270, 2, 2)], heads=2, kv_heads=1)
    wanted = expected(batch)
    for options in ({"num_splits": 1}, {"num_splits": 2}, {"num_splits": 7}, {"split_size": 32}, {}):
        assert_close(decode(batch, **{"config": None} | options), wanted)
    # A bound of the host that is too small cannot lose keys: the last split takes what is left.
    assert_close(decode(batch, split_size=64, max_length=100, config=None), wanted)


@pytest.mark.parametrize("window", [None, 90])
def test_short_splits_grow_where_there_are_many(device: torch.device, dtype: torch.dtype, window: int | None) -> None:
    """Splits of one tile, of several, and one; values fetched with their keys."""
    batch = make_batch(device, dtype, [(10, 1, 1), (75, 2, 2), (300, 2, 1), (460, 2, 2)], heads=2, kv_heads=1,
                       window=window)
    config = replace(SMALL, min_split=16, early_values=True)
    wanted = expected(batch, window)
    assert_close(decode(batch, config=config, window=window), wanted)
    assert_close(decode(batch, config=config, window=window, num_splits=3), wanted)


@pytest.mark.parametrize("run", [decode, prefill])
def test_padding_changes_no_bit(device: torch.device, dtype: torch.dtype, run: Callable[..., torch.Tensor]) -> None:
    requests = [(37, 1, 1), (50, 3, 2)]
    batch = make_batch(device, dtype, requests, heads=2, kv_heads=1)
    padded = make_batch(device, dtype, requests, heads=2, kv_heads=1)
    padding = torch.full((3, *batch.q.shape[1:]), NAN, device=device, dtype=dtype)
    tail = padded.query_starts[-1:]
    padded = replace(
        padded, q=torch.cat((padded.q, padding)), query_starts=torch.cat((padded.query_starts, tail, tail)),
        lengths=torch.nn.functional.pad(padded.lengths, (0, 2)), live=torch.nn.functional.pad(padded.live, (0, 2)),
        page_table=torch.cat((padded.page_table, torch.full_like(padded.page_table, -5)[:2])),
    )
    for options in ({"num_splits": 1}, {"split_size": 32}) if run is decode else ({},):
        plain, result = run(batch, **options), run(padded, **options)
        assert torch.equal(result[:4], plain)
        assert torch.equal(result[4:], torch.zeros_like(result[4:])), "padding rows are written, with zeros"


@pytest.mark.parametrize("run", [decode, prefill])
def test_garbage_and_batch_mates_change_no_bit(
    device: torch.device, dtype: torch.dtype, run: Callable[..., torch.Tensor],
) -> None:
    requests = [(50, 3, 2), (37, 1, 1)]
    options = {"split_size": 32} if run is decode else {}
    batch = make_batch(device, dtype, requests, heads=2, kv_heads=1)
    poisoned = run(batch, **options)
    other = make_batch(device, dtype, requests, heads=2, kv_heads=1, poison=1e4)
    assert torch.equal(poisoned, run(other, **options))
    alone = replace(batch, q=batch.q[:3], page_table=batch.page_table[:1], query_starts=batch.query_starts[:2],
                    lengths=batch.lengths[:1], live=batch.live[:1])
    assert torch.equal(poisoned[:3], run(alone, **options))
    assert torch.equal(poisoned[2], torch.zeros_like(poisoned[2])), "dead tokens get zeros"


def test_a_checked_draft_equals_plain_decoding_bit_for_bit(device: torch.device, dtype: torch.dtype) -> None:
    # The last query of two live ones against the same token alone; fixed splits make the arithmetic equal.
    both = make_batch(device, dtype, [(90, 2, 2)], heads=2, kv_heads=1)
    last = replace(both, q=both.q[1:], query_starts=both.query_starts.clamp(max=1), live=both.live - 1)
    assert torch.equal(decode(both, split_size=32)[1:], decode(last, split_size=32))


@pytest.mark.parametrize(("window", "softcap"), [(None, None), (20, None), (7, 2.0), (1, None)])
def test_prefill_equals_the_reference(
    device: torch.device, dtype: torch.dtype, window: int | None, softcap: float | None,
) -> None:
    requests = [(60, 11, 11), (14, 14, 11), (0, 0, 0), (33, 6, 0), (19, 1, 1)]
    batch = make_batch(device, dtype, requests, heads=2, kv_heads=1, window=window)
    assert_close(prefill(batch, window=window, softcap=softcap), expected(batch, window, softcap))


@pytest.mark.parametrize("shape", SHAPES[1:], ids=["group3", "group1"])
def test_prefill_shapes(device: torch.device, dtype: torch.dtype, shape: dict[str, int]) -> None:
    batch = make_batch(device, dtype, [(70, 21, 21), (5, 5, 5)], **shape)
    assert_close(prefill(batch), expected(batch))
    assert_close(prefill(batch, config=PrefillConfig(64, 32, 4)), expected(batch))


def test_two_calls_share_an_output(device: torch.device, dtype: torch.dtype) -> None:
    batch = make_batch(device, dtype, [(40, 20, 20), (50, 2, 2)])
    out = torch.full((22, 4, 16), NAN, device=device, dtype=dtype)
    head = Batch(batch.q, batch.k_cache, batch.v_cache, batch.page_table[:1], batch.query_starts[:2],
                 batch.lengths[:1], batch.live[:1])
    tail = replace(head, page_table=batch.page_table[1:], query_starts=batch.query_starts[1:],
                   lengths=batch.lengths[1:], live=batch.live[1:])
    prefill(head, out=out, fill_padding=False)
    decode(tail, out=out, fill_padding=False)
    assert_close(out, expected(batch))


def test_a_probe_attends_over_the_null_page(device: torch.device, dtype: torch.dtype) -> None:
    """Its queries are zeros, so every token gets the mean of the values that it sees: those of one page, repeated."""
    page, context, tokens = 16, 40, 9
    k, v = (torch.full((3, page, 2, 16), NAN, device=device, dtype=dtype) for _ in range(2))
    k[0], v[0] = 0, torch.randn(page, 2, 16, device=device)
    for window in (None, 20):
        layer = AttentionLayer(0, 4, 2, 16, scale=0.25, window=window)
        made = TritonBackend().probe_prompt(layer, KeyValueCache(k, v), tokens, context, k.dtype)().view(tokens, 4, 16)
        seen = v[0].float().repeat(4, 1, 1).repeat_interleave(2, dim=1)
        for token in range(tokens):
            stop = context + token + 1
            wanted = seen[max(0, stop - (window or stop)) : stop].mean(dim=0)
            torch.testing.assert_close(made[token].float(), wanted, atol=2e-2, rtol=2e-2)


def test_wrappers_name_what_is_wrong(device: torch.device, dtype: torch.dtype) -> None:
    batch = make_batch(device, dtype, [(37, 1, 1), (20, 1, 1)])
    wrong = [
        ("lengths", {"lengths": batch.lengths[:1]}),
        ("live", {"live": batch.live[:1]}),
        ("query_starts", {"query_starts": batch.query_starts[:2]}),
        ("page_table", {"page_table": batch.page_table.long()}),
        ("page_table", {"page_table": batch.page_table.t().contiguous().t()}),
        ("v_cache", {"v_cache": batch.v_cache[:, :8]}),
        ("k_cache", {"k_cache": batch.k_cache[:, :12], "v_cache": batch.v_cache[:, :12]}),
        ("q", {"q": batch.q[:, :3]}),
        ("q", {"q": batch.q.transpose(1, 2)}),
    ]
    for argument, change in wrong:
        for run in (decode_attention, prefill_attention):
            tiles = query_tiles([1, 1], 4, 2, 16, device)
            extra = {"max_query": 1, "max_length": 37} if run is decode_attention else {"tiles": tiles}
            with pytest.raises(ValueError, match=f"attention: {argument} "):
                run(*replace(batch, **change).args, scale=1.0, **extra)
    with pytest.raises(ValueError, match="max_length"):
        decode(batch, max_length=10_000)
    with pytest.raises(ValueError, match="split_size"):
        decode(batch, split_size=24)
