"""Decode attention over pages that several requests share: requests are grouped into packs, and one program reads the
shared pages once for all requests of a pack.

A tile has rows for more queries than one request has, so several requests fit into it. A pack's program reads the pages
of the pack's first request. Each row sees keys only as far as its own page table equals that request's; `sharing.py`
has found out on the device how far that is, so no request ever sees a page that is not its own. The split of a pack is
an additional split of each of its requests. Its results are stored beside those of the request's own splits, and the
program that ends last merges them.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton import knobs

from outrider.kernels.fp8_cache import HeadScales
from outrider.kernels.gpu.attention.core import (
    AttentionShape,
    PagedHead,
    add_sinks,
    attend_keys,
    no_sums,
    zero_padding,
)
from outrider.kernels.gpu.attention.merge import merge_parts, store_part
from outrider.kernels.gpu.attention.sharing import pack_split_size
from outrider.kernels.gpu.attention.splits import MOST_SPLITS, Packs, SplitList, own_num_splits, split_geometry
from outrider.kernels.gpu.common import next_power_of_two, pdl_options, release_dependents, wait_for_inputs
from outrider.kernels.gpu.launch.triton_kernel import kernel
from outrider.kernels.gpu.pages.fp8 import fit_queries, scaled_values

_INTS = ["page_table", "query_starts", "lengths", "live", "items", "count", "order", "pack_firsts", "first_keys",
         "num_pack_splits", "k_scales", "v_scales", "sinks"]
_VARYING = ["num_tokens", "num_requests", "max_query", "pack_size", "split_size", "coarse_size", "num_splits",
            "num_slots"]
# Registers of a thread, for heads of 128: with more, fewer programs would fit onto a multiprocessor than without packs.
MAX_REGISTERS = 128


@kernel(do_not_specialize=_VARYING, do_not_specialize_on_alignment=_INTS)
def _packed_kernel(
    q, k_cache, v_cache, page_table, query_starts, lengths, live, items, count, order, pack_firsts, first_keys,
    num_pack_splits, out, part_out, part_lse, counters, k_scales, v_scales, sinks, scale, softcap, num_tokens,
    num_requests, max_query, pack_size, split_size, coarse_size, num_splits, num_slots, q_token_stride,
    q_head_stride, k_page_stride,
    k_token_stride, k_head_stride, v_page_stride, v_token_stride, v_head_stride, table_stride, out_token_stride,
    out_head_stride,
    HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr, PAGE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, HAS_SOFTCAP: tl.constexpr, HAS_SINKS: tl.constexpr,
    FILL_PADDING: tl.constexpr, GROUP_PAD: tl.constexpr, EARLY_VALUES: tl.constexpr, PDL: tl.constexpr,
):
    """Each program computes one split of a pack or of a request, for one key/value head."""
    release_dependents(PDL)
    wait_for_inputs(PDL)
    kv_head = tl.program_id(0)
    item = tl.load(items + tl.program_id(1))
    if tl.program_id(1) >= tl.load(count):
        return
    if FILL_PADDING:
        num_scheduled = tl.load(query_starts + num_requests)  # early: at the end it would be waited for
    is_pack = item < 0
    item = tl.where(is_pack, -1 - item, item)
    first, split = item // MOST_SPLITS, item % MOST_SPLITS  # first: place of a pack, or the request

    # Rows of a request are its queries times the heads. A pack's requests follow one another.
    row = tl.arange(0, BLOCK_M)
    member, query = row // (max_query * GROUP), row % (max_query * GROUP) // GROUP
    may_exist = is_pack & (member < pack_size) & (first + member < num_requests)
    exists = may_exist & (tl.load(pack_firsts + first + member, mask=may_exist, other=-1) == first)
    request = tl.load(order + first + member, mask=exists, other=first)
    exists = exists | ((is_pack == 0) & (member == 0))
    leader = tl.load(order + first, mask=is_pack, other=first)  # the request whose pages are read

    begin, lowest, highest, pack_splits, num_active = _keys_of_item(
        is_pack, split, leader, lengths, live, first_keys, num_pack_splits, split_size, coarse_size, num_splits, BLOCK_N
    )
    first_token, num_live = tl.load(query_starts + request), tl.load(live + request)
    length, packed = tl.load(lengths + request), tl.load(first_keys + request)
    is_query = exists & (query < num_live)
    last_key = tl.where(is_pack, packed - 1, length - num_live + query)  # that the row sees
    dim, head = tl.arange(0, D_PAD), kv_head * GROUP + row % GROUP
    token = (first_token + query).to(tl.int64)
    queries = tl.load(q + token[:, None] * q_token_stride + head[:, None] * q_head_stride + dim[None, :],
                      mask=is_query[:, None] & (dim < D)[None, :], other=0.0)
    queries, scale = fit_queries(queries, scale, k_scales, kv_head, k_cache)
    pages = PagedHead(
        k_cache + kv_head * k_head_stride, v_cache + kv_head * v_head_stride,
        page_table + leader.to(tl.int64) * table_stride, k_page_stride, k_token_stride, v_page_stride, v_token_stride,
    )
    acc, peak, total = no_sums(BLOCK_M, D_PAD)
    acc, peak, total = attend_keys(
        queries, acc, peak, total, tl.where(is_query, last_key, -1), begin, highest, lowest, highest, pages, scale,
        softcap, 0, D, D_PAD, PAGE, BLOCK_N, True, False, HAS_SOFTCAP, EARLY_VALUES,
    )

    is_last = exists
    if is_pack | (num_active > 1):
        part = (((request * max_query + query) * HEADS + head) * num_slots).to(tl.int64)
        store_part(part_out, part_lse, part + tl.where(is_pack, split, pack_splits + split), acc, peak, total, is_query,
                   D_PAD)
        _, _, own_splits = split_geometry(length, num_live, 0, packed, split_size, coarse_size,
                                          own_num_splits(num_splits, packed), BLOCK_N, False)
        all_splits = pack_splits + own_splits
        is_last = _arrive_rows(counters + request * tl.num_programs(0) + kv_head, all_splits, member,
                               exists & (row % (max_query * GROUP) == 0))
        most_splits = tl.max(tl.where(is_last, all_splits, 0), axis=0)
        if most_splits > 0:
            acc, peak, total = merge_parts(part_out, part_lse, part, is_query & is_last, all_splits, most_splits,
                                           BLOCK_M, D_PAD)
    total = add_sinks(sinks, head, is_query, peak, total, HAS_SINKS)
    acc = scaled_values(acc, v_scales, kv_head, v_cache)
    result = tl.where(is_query[:, None], acc / tl.where(total > 0, total, 1.0)[:, None], 0.0)
    is_scheduled = is_last & exists & (query < tl.load(query_starts + request + 1) - first_token)
    tl.store(out + token[:, None] * out_token_stride + head[:, None] * out_head_stride + dim[None, :],
             result.to(out.dtype.element_ty), mask=is_scheduled[:, None] & (dim < D)[None, :])
    if FILL_PADDING:  # by the first split of each request
        padding = tl.where(is_pack, num_tokens, num_scheduled + first + split * num_tokens)
        zero_padding(out, padding, num_requests, num_tokens, kv_head * GROUP, out_token_stride, out_head_stride,
                     D, D_PAD, GROUP, GROUP_PAD)


@triton.jit
def _keys_of_item(
    is_pack, split, request, lengths, live, first_keys, num_pack_splits, split_size, coarse_size, num_splits,
    BLOCK_N: tl.constexpr,
):
    """Return (begin, lowest, highest, splits of the request's pack, all splits of the request) for one entry of the
    list of splits. Its key tiles begin at `begin`; positions in [lowest, highest) may be loaded."""
    length, num_live = tl.load(lengths + request), tl.load(live + request)
    packed, pack_splits = tl.load(first_keys + request), tl.load(num_pack_splits + request)
    base, size, num_own = split_geometry(length, num_live, 0, packed, split_size, coarse_size,
                                         own_num_splits(num_splits, packed), BLOCK_N, False)
    begin = tl.maximum(base + split * size, packed // BLOCK_N * BLOCK_N)
    highest = tl.where(split + 1 < num_own, tl.minimum(length, base + (split + 1) * size), length)
    highest = tl.where(num_live > 0, highest, 0)
    pack_size = pack_split_size(packed, pack_splits, BLOCK_N)
    begin = tl.where(is_pack, split * pack_size, begin)
    highest = tl.where(is_pack, tl.minimum((split + 1) * pack_size, packed), highest)
    return begin, tl.where(is_pack, 0, packed), highest, pack_splits, pack_splits + num_own


@triton.jit
def _arrive_rows(counter, num_active, member, is_first):
    """Count this program at each row's counter. Returns whether all other splits of the row's request have stored their
    results, which can then be read. `is_first` marks one row of each request; only that row is counted. The last
    program resets the counters to 0."""
    tl.debug_barrier()  # every thread's part is stored before one of them says so
    arrived = tl.atomic_add(counter, 1, mask=is_first, sem="acq_rel", scope="gpu")
    ends = is_first & (arrived == num_active - 1)
    tl.store(counter, 0, mask=ends)
    is_last = tl.max(tl.where((member[:, None] == member[None, :]) & ends[None, :], 1, 0), axis=1) > 0
    tl.debug_barrier()  # all threads read parts after the counters
    return is_last


def launch_packed(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, page_table: torch.Tensor,
    query_starts: torch.Tensor, lengths: torch.Tensor, live: torch.Tensor, splits: SplitList, packs: Packs,
    out: torch.Tensor, part_out: torch.Tensor, part_lse: torch.Tensor, counters: torch.Tensor, shape: AttentionShape, *,
    scale: float, softcap: float | None, scales: HeadScales | None, sinks: torch.Tensor | None, max_query: int,
    fill_padding: bool, pdl: bool,
) -> None:
    """Launch attention for a list of splits that contains packs. `decode_attention` calls it, after checking the
    arguments."""
    plan = splits.plan
    is_limited = shape.padded_dim <= 128 and plan.config.num_warps == 4 and plan.block_m == 16
    limit = {"maxnreg": MAX_REGISTERS} if is_limited and not knobs.runtime.interpret else {}
    _packed_kernel[(shape.num_kv_heads, len(splits.items))](
        q, k_cache, v_cache, page_table, query_starts, lengths, live, splits.items, splits.count, packs.order,
        packs.pack_firsts, packs.first_keys, packs.num_pack_splits, out, part_out, part_lse, counters,
        *(scales or (lengths, lengths)), lengths if sinks is None else sinks, scale, softcap or 1.0, shape.num_tokens,
        shape.num_requests, max_query, packs.plan.size, plan.split_size, plan.coarse_size, plan.num_splits,
        splits.num_slots, *q.stride()[:2],
        *k_cache.stride()[:3], *v_cache.stride()[:3], page_table.stride(0), *out.stride()[:2],
        HEADS=shape.num_heads, GROUP=shape.heads_per_kv, GROUP_PAD=next_power_of_two(shape.heads_per_kv),
        D=shape.head_dim, D_PAD=shape.padded_dim, PAGE=shape.page_size, BLOCK_M=plan.block_m,
        BLOCK_N=plan.config.block_n, HAS_SOFTCAP=softcap is not None, HAS_SINKS=sinks is not None,
        FILL_PADDING=fill_padding, EARLY_VALUES=plan.config.early_values, PDL=pdl, num_warps=plan.config.num_warps,
        num_stages=plan.config.num_stages, **limit, **pdl_options(pdl),
    )
