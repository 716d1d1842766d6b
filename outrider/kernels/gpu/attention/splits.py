"""The plan of a decode attention launch: its tiles, its splits over the keys, and the list of the splits that a batch
has.

Only the device knows lengths, so a grid has a program for every split that may exist. With many requests, a list names
the splits that do exist, those of the longest requests first: a long request among short ones is split and starts
early, and programs without a split come last and cost next to nothing.

A list may also name splits of packs: requests that share pages (`sharing.py`) have splits in common for those pages,
which come first in the list, and splits of their own for the rest. Otherwise a request's splits depend on its own
length and on sizes that the host knows, never on its batch mates.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from outrider.kernels.gpu.attention.sharing import SharedPages, count_pack_splits, find_packs, find_runs
from outrider.kernels.gpu.attention.windows import first_seen, window_kind
from outrider.kernels.gpu.common import cdiv, next_power_of_two, num_sms, padded_requests, require, require_tensor
from outrider.kernels.gpu.launch.triton_kernel import kernel

COARSE_SPLIT = 256  # keys of a split where there are many
MANY_ROWS = 16  # queries times the query heads of one key/value head
# Least keys of a listed split for each row of its tile, and the most that this asks for: a split's sums of all rows are
# written and read again.
KEYS_OF_A_ROW, LONGEST_LEAST = 32, 1024
MOST_SPLITS = tl.constexpr(64)  # of a request
LONG_SPLIT = tl.constexpr(512)  # keys; a longer split is worth a longer beginning, in which more tiles are asked for
_MANY = tl.constexpr(16)
_LISTED_WARPS = 1 << 14  # of a grid by a list, where four splits of each request do not need more
_LISTED_REQUESTS, _LISTED_WINDOW = 9, 1024  # from which on a list pays
_INTS = ["lengths", "live", "key_starts", "order", "shared", "first_keys", "num_pack_splits", "pack_firsts"]
# Splits of packs: programs of them for each multiprocessor, together; most of one pack by the number of requests, since
# each request has room for the sums of all; least keys.
_PACK_PROGRAMS, _PACK_SPLITS, _MOST_PACK_SPLITS, _LEAST_PACK_SPLIT = 2, 1024, 16, 256


@dataclass(frozen=True)
class DecodeConfig:
    """Rows and keys per tile, and options of the compiler."""

    block_n: int
    max_rows: int  # rows of the largest tile, where one query's heads fit
    num_warps: int = 4
    num_stages: int = 5
    min_split: int = COARSE_SPLIT  # keys
    early_values: bool = False  # values are fetched together with their keys
    long_stages: int = 0  # stages for splits of many keys; 0: no other than for few


def decode_config(
    padded_dim: int, num_requests: int | None = None, itemsize: int = 2, num_rows: int = 1
) -> DecodeConfig:
    """Return the tile for these sizes, as measured on an H200 for 16 bits. With few requests only latency counts, so
    splits are short and everything is fetched at once. num_rows: queries times query heads per key/value head."""
    if itemsize > 2 and padded_dim >= 256:  # what fits into a multiprocessor's shared memory
        return DecodeConfig(block_n=32 if padded_dim <= 256 else 16, max_rows=16, num_warps=8, num_stages=2)
    if num_requests is None:  # one choice for all
        num_requests, num_rows = 1 << 30, 1
    if padded_dim <= 128 and itemsize == 1 and num_requests > 8:  # half the bytes: tiles of twice as many keys
        return DecodeConfig(block_n=64, max_rows=64, num_stages=4)
    if padded_dim <= 128:
        if num_requests <= 8:
            return DecodeConfig(block_n=64, max_rows=64, num_warps=8, num_stages=3, min_split=64, early_values=True,
                                long_stages=5)
        # A key tile waits for its page ids, so the compiler spends three of the stages before the first buffer pays.
        return DecodeConfig(block_n=32, max_rows=64)
    if padded_dim <= 256:
        if num_requests <= 8:
            return DecodeConfig(block_n=64, max_rows=64, num_warps=8, num_stages=1, min_split=64, early_values=True)
        if num_requests <= 64:
            return DecodeConfig(block_n=32, max_rows=32)
        return DecodeConfig(block_n=32, max_rows=32, num_warps=2, num_stages=2)
    if num_requests <= 8:
        return DecodeConfig(block_n=64, max_rows=16, num_warps=8, num_stages=1, min_split=64, early_values=True)
    if num_rows > 16:
        return DecodeConfig(block_n=64, max_rows=32, num_warps=8, num_stages=2)
    return DecodeConfig(block_n=32, max_rows=16, num_stages=3)


@dataclass(frozen=True)
class LaunchPlan:
    """The division of one launch into programs. It depends only on values that the host knows."""

    config: DecodeConfig
    block_m: int  # rows of a tile: queries times the query heads of one key/value head
    q_tile: int  # queries of a tile
    num_tiles: int
    num_splits: int  # at most
    split_size: int  # at least, keys
    coarse_size: int
    is_split: bool  # whether there may be several; without a fixed size it depends only on the number of requests
    may_be_long: bool  # whether a split may have more than LONG_SPLIT keys


def plan_launch(
    num_requests: int, num_heads: int, num_kv_heads: int, head_dim: int, itemsize: int, sms: int, *, max_query: int,
    max_length: int, window: int | None, split_size: int | None = None, num_splits: int | None = None,
    config: DecodeConfig | None = None, is_listed: bool = False,
) -> LaunchPlan:
    padded_dim, group = max(16, next_power_of_two(head_dim)), num_heads // num_kv_heads
    # With a fixed split size results must not depend on the number of requests, so neither may the tiles.
    by_requests = num_requests if split_size is None else None
    config = config or decode_config(padded_dim, by_requests, itemsize, max_query * group)
    # As many queries as the tile's rows hold: a kernel then serves every number of queries of its tile.
    block_m = max(16, next_power_of_two(min(max_query, max(1, config.max_rows // group)) * group))
    q_tile = block_m // group
    num_tiles = cdiv(max_query, q_tile)
    if split_size is not None:  # the window may begin anywhere in its first split
        keys = max_length if window is None else min(max_length, window + max_query - 1 + split_size)
        num_splits = max(1, cdiv(keys, split_size))
        return LaunchPlan(config, block_m, q_tile, num_tiles, num_splits, split_size, 0, num_splits > 1,
                          split_size > LONG_SPLIT.value)
    programs = max(1, num_requests * num_kv_heads * num_tiles)
    least = config.min_split
    if is_listed:
        rows = block_m if max_query * group >= MANY_ROWS else 0
        least = least_listed_split(programs, sms, padded_dim, rows)
    keys = max_length if window is None else min(max_length, window + max_query - 1)
    is_split = num_splits is not None and num_splits > 1
    if num_splits is None:
        # Two programs for each multiprocessor; in a list idle ones do no harm.
        most = max(4, _LISTED_WARPS // (programs * config.num_warps)) if is_listed else 2 * sms // programs
        num_splits, is_split = max(1, min(cdiv(keys, least), most, MOST_SPLITS.value)), most > 1
    about = max(least, COARSE_SPLIT, cdiv(keys, num_splits))  # keys of a split
    return LaunchPlan(config, block_m, q_tile, num_tiles, num_splits, least, COARSE_SPLIT, is_split,
                      about > LONG_SPLIT.value)


def least_listed_split(programs: int, sms: int, padded_dim: int, rows: int = 0) -> int:
    """Return the least number of keys in a listed split, given how many programs there would be without splits. Splits
    fill the GPU and let a long request end earlier, but each program takes microseconds to start, which matters with
    many requests. rows: rows of a tile if they are many, else 0. The numbers were measured on an H200 with equal, mixed
    and skewed lengths; with many rows, for heads of 128 and of 512, where splits of 512 keys stay better for short
    contexts."""
    shares = ((1, 128), (2, 256), (3, 512))  # of the multiprocessors
    least = next((least for share, least in shares if programs <= share * sms), 2048)
    if padded_dim <= 128:
        return max(least, min(KEYS_OF_A_ROW * rows, LONGEST_LEAST))
    return min(least * (padded_dim // 128), 2048)


def pays_split_list(num_requests: int, window: int | None) -> bool:
    """Whether a list of splits saves time. It does not with few requests, where every split has a program anyway, nor
    with a short window, which makes all lengths equal."""
    return num_requests >= _LISTED_REQUESTS and (window is None or window > _LISTED_WINDOW)


@triton.jit
def split_geometry(length, live, window, first_key, split_size, coarse_size, num_splits, BLOCK_N: tl.constexpr,
                   WINDOW_KIND: tl.constexpr):
    """Return (first position of split 0, keys per split, splits with work). The last split has the rest. With many
    splits, all of which have to be merged, they grow from `split_size` to `coarse_size`, and are as even as tiles
    allow. With a coarse size of 0 they have `split_size` keys and begin at multiples of it."""
    lowest = first_key
    if WINDOW_KIND:
        lowest = tl.maximum(first_seen(length - live, window, WINDOW_KIND), first_key)
    keys = length - lowest
    needed = tl.maximum(tl.cdiv(keys, num_splits), tl.minimum(tl.cdiv(keys, _MANY), coarse_size))
    size = tl.maximum(split_size, tl.cdiv(needed, BLOCK_N) * BLOCK_N)
    base = lowest // size * size
    if coarse_size > 0:
        base = lowest // BLOCK_N * BLOCK_N
        count = tl.minimum(tl.cdiv(length - base, size), num_splits)  # one more, where the base lies before the keys
        even = tl.cdiv(length - base, tl.maximum(count, 1))
        size = tl.maximum(tl.cdiv(even, BLOCK_N), 1) * BLOCK_N
    return base, size, tl.minimum(tl.cdiv(length - base, size), num_splits)


@dataclass(frozen=True)
class PackPlan:
    """The number of requests in a pack, and the splits of packs."""

    size: int  # most requests of a pack
    num_splits: int  # of a pack, at most
    num_items: int  # splits of all packs, at most, beyond the places that their requests leave in the list


def plan_packs(num_requests: int, num_kv_heads: int, group: int, sms: int, max_query: int,
               plan: LaunchPlan) -> PackPlan | None:
    """Plan the packs of a launch. Packs use rows that are left over in the tile of a single request. Returns None if no
    two requests fit into a tile."""
    size = min(plan.block_m // (max_query * group), num_requests)
    if size < 2 or not plan.is_split:
        return None
    num_splits = max(2, min(_MOST_PACK_SPLITS, _PACK_SPLITS // num_requests))
    num_items = cdiv(_PACK_PROGRAMS * sms, num_kv_heads) + (num_requests // 2 if plan.num_splits == 1 else 0)
    return PackPlan(size, num_splits, num_items)


def can_pack(num_requests: int, num_heads: int, num_kv_heads: int, head_dim: int, itemsize: int, device: torch.device,
             *, max_query: int, max_length: int) -> bool:
    """Whether `list_splits` can use shared pages for these sizes."""
    sms = num_sms(device)
    plan = plan_launch(num_requests, num_heads, num_kv_heads, head_dim, itemsize, sms, max_query=max_query,
                       max_length=max_length, window=None, is_listed=True)
    return plan_packs(num_requests, num_kv_heads, num_heads // num_kv_heads, sms, max_query, plan) is not None


@dataclass(frozen=True)
class Packs:
    """The packs of one batch. Tensors are int32 [requests]."""

    plan: PackPlan
    order: torch.Tensor  # request at each place; a pack is a run of places
    pack_firsts: torch.Tensor  # first place of each place's pack; -1 for a place that is in none
    first_keys: torch.Tensor  # of each request: the keys before this one are read by its pack
    num_pack_splits: torch.Tensor  # of each request: splits of its pack; 0 without one


@dataclass(frozen=True)
class SplitList:
    """The list of the splits of one batch, for all layers with the same heads and window."""

    plan: LaunchPlan
    # Requests, heads, key/value heads, dim, bytes of an element; bounds, window, whether it is chunked.
    shape: tuple[int | None, ...]
    made_of: tuple[torch.Tensor | None, ...]  # lengths, live counts, key starts
    # [most there may be] int32: request * MOST_SPLITS + split; of packs -1 - (first place * MOST_SPLITS + split)
    items: torch.Tensor
    count: torch.Tensor  # [1] int32
    packs: Packs | None = None

    def is_for(self, shape: tuple[int | None, ...], tensors: tuple[torch.Tensor | None, ...]) -> bool:
        """Whether the list was made for this batch. With another batch's list, splits would be missing and counters
        would not return to 0."""
        return shape == self.shape and all(a is b for a, b in zip(tensors, self.made_of, strict=True))

    @property
    def num_slots(self) -> int:
        """The number of split results that are stored for each request."""
        return self.plan.num_splits + (self.packs.plan.num_splits if self.packs is not None else 0)


@kernel(do_not_specialize=["window", "split_size", "coarse_size", "num_splits", "num_requests", "pack_size",
                           "most_pack_splits", "most_pack_items"],
        do_not_specialize_on_alignment=_INTS)
def _list_splits_kernel(
    lengths, live, key_starts, order, shared, items, count, first_keys, num_pack_splits, pack_firsts, window,
    split_size, coarse_size, num_splits, num_requests, pack_size, most_pack_splits, most_pack_items,
    BLOCK_N: tl.constexpr, WINDOW_KIND: tl.constexpr, HAS_STARTS: tl.constexpr, HAS_PACKS: tl.constexpr,
    LEAST_PACK_SPLIT: tl.constexpr, PAD: tl.constexpr, ROWS: tl.constexpr,
):
    """Write the list of splits, place by place. Without packs the places are the requests themselves."""
    own = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    other = tl.arange(0, PAD)
    own_request, request = own, other
    own_packed, packed = own * 0, other * 0  # keys that the packs read
    num_before = 0
    if HAS_PACKS:
        own_request = tl.load(order + own, mask=own < num_requests, other=num_requests)
        request = tl.load(order + other, mask=other < num_requests, other=num_requests)
        own_first, own_pack_splits = own, own * 0
        if tl.max(tl.load(shared + other, mask=other < num_requests, other=0), axis=0) > 0:
            run = find_runs(shared, other, num_requests)
            own_run = tl.max(tl.where(other[None, :] == own[:, None], run[None, :], 0), axis=1)
            own_first, own_packed, own_tokens = find_packs(shared, own, own_run, num_requests, pack_size)
            first, packed, tokens = find_packs(shared, other, run, num_requests, pack_size)
            all_tokens = tl.sum(tl.where(first == other, tokens, 0), axis=0)
            split_keys = tl.maximum(tl.cdiv(all_tokens, most_pack_items), LEAST_PACK_SPLIT)
            own_pack_splits = count_pack_splits(own_tokens, split_keys, most_pack_splits, BLOCK_N)
            pack_splits = count_pack_splits(tokens, split_keys, most_pack_splits, BLOCK_N)
            splits = tl.where(first == other, pack_splits, 0)
            num_before = tl.sum(splits, axis=0)
            at = tl.sum(tl.where(other[None, :] < own[:, None], splits[None, :], 0), axis=1)
            for split in range(0, tl.max(own_pack_splits, axis=0)):
                tl.store(items + at + split, -1 - (own * MOST_SPLITS + split),
                         mask=(own_first == own) & (split < own_pack_splits))
        exists, is_packed = own < num_requests, own_packed > 0
        tl.store(first_keys + own_request, own_packed, mask=exists)
        tl.store(num_pack_splits + own_request, tl.where(is_packed, own_pack_splits, 0), mask=exists)
        tl.store(pack_firsts + own, tl.where(is_packed, own_first, -1), mask=exists)
    own_keys, own_splits = _splits_of(lengths, live, key_starts, own_request, own_packed, num_requests, window,
                                      split_size, coarse_size, num_splits, BLOCK_N, WINDOW_KIND,
                                      HAS_STARTS)
    keys, splits = _splits_of(lengths, live, key_starts, request, packed, num_requests, window, split_size, coarse_size,
                              num_splits, BLOCK_N, WINDOW_KIND, HAS_STARTS)
    is_before = (keys[None, :] > own_keys[:, None]) | (
        (keys[None, :] == own_keys[:, None]) & (other[None, :] < own[:, None])
    )
    at = num_before + tl.sum(tl.where(is_before, splits[None, :], 0), axis=1)
    for split in range(0, tl.max(own_splits, axis=0)):
        tl.store(items + at + split, own_request * MOST_SPLITS + split, mask=split < own_splits)
    if tl.program_id(0) == 0:
        tl.store(count, num_before + tl.sum(splits, axis=0))


@triton.jit
def own_num_splits(num_splits, packed):
    """Return the most splits that a request may have for itself. A request in a pack leaves one of its splits to the
    pack."""
    return tl.where(packed > 0, tl.maximum(num_splits - 1, 1), num_splits)


@triton.jit
def _splits_of(
    lengths, live, key_starts, request, packed, num_requests, window, split_size, coarse_size, num_splits,
    BLOCK_N: tl.constexpr, WINDOW_KIND: tl.constexpr, HAS_STARTS: tl.constexpr,
):
    """Return (keys that the request reads by itself, without a pack; number of splits) of requests. Every request has
    at least one split, which also writes the zeros of dead tokens; places past the last request have none."""
    exists = request < num_requests
    length = tl.load(lengths + request, mask=exists, other=-1)
    num_live = tl.load(live + request, mask=exists, other=0)
    first_key = packed
    if HAS_STARTS:
        first_key = tl.load(key_starts + request, mask=exists, other=0)
    _, _, active = split_geometry(length, num_live, window, first_key, split_size, coarse_size,
                                  own_num_splits(num_splits, packed), BLOCK_N, WINDOW_KIND)
    return length - packed, tl.where(exists, tl.maximum(active, 1), 0)


def list_splits(
    lengths: torch.Tensor, live: torch.Tensor, num_heads: int, num_kv_heads: int, head_dim: int, itemsize: int, *,
    max_query: int, max_length: int, window: int | None = None, is_chunked: bool = False,
    key_starts: torch.Tensor | None = None, shared: SharedPages | None = None, config: DecodeConfig | None = None,
) -> SplitList:
    """List the splits of a batch for `decode_attention`, which must get the same lengths, live counts, size limits,
    window and key_starts. `shared`: pages to read once for several requests; it is not allowed for layers with a
    window, nor with key_starts."""
    name, device, int32 = "list_splits", lengths.device, (torch.int32,)
    num_requests, sms = lengths.shape[0], num_sms(device)
    require_tensor(name, "lengths", lengths, (None,), device, int32)
    require_tensor(name, "live", live, (num_requests,), device, int32)
    if key_starts is not None:
        require_tensor(name, "key_starts", key_starts, (num_requests,), device, int32)
    require(shared is None or (window is None and key_starts is None), name, "shared",
            "is for layers that see all keys: leave out window and key_starts")
    heads = (num_requests, num_heads, num_kv_heads, head_dim, itemsize)
    plan = plan_launch(*heads, sms, max_query=max_query, max_length=max_length, window=window, config=config,
                     is_listed=True)
    packs, num_items = None, num_requests * plan.num_splits
    if shared is not None:
        packs = _make_packs(shared, num_requests, num_kv_heads, num_heads // num_kv_heads, sms, max_query, plan)
        num_items += packs.plan.num_items if packs is not None else 0
    items = torch.empty(num_items, dtype=torch.int32, device=device)
    count = torch.empty(1, dtype=torch.int32, device=device)
    pad = padded_requests(num_requests)
    made = (packs.first_keys, packs.num_pack_splits, packs.pack_firsts) if packs is not None else (lengths,) * 3
    order, links = (lengths, lengths) if shared is None or packs is None else shared
    pack_bounds = (0, 0, 0)
    if packs is not None:
        pack_bounds = packs.plan.size, packs.plan.num_splits, cdiv(_PACK_PROGRAMS * sms, num_kv_heads)
    _list_splits_kernel[(cdiv(num_requests, 16),)](
        lengths, live, lengths if key_starts is None else key_starts, order, links, items, count, *made, window or 0,
        plan.split_size, plan.coarse_size, plan.num_splits, num_requests, *pack_bounds, BLOCK_N=plan.config.block_n,
        WINDOW_KIND=window_kind(window, is_chunked), HAS_STARTS=key_starts is not None, HAS_PACKS=packs is not None,
        LEAST_PACK_SPLIT=_LEAST_PACK_SPLIT, PAD=pad, ROWS=16, num_warps=4,
    )
    listed_for = (*heads, max_query, max_length, window, is_chunked)
    return SplitList(plan, listed_for, (lengths, live, key_starts), items, count, packs)


def _make_packs(shared: SharedPages, num_requests: int, num_kv_heads: int, group: int, sms: int, max_query: int,
                plan: LaunchPlan) -> Packs | None:
    """Make the packs of a batch. Returns None if its requests cannot be packed."""
    pack_plan = plan_packs(num_requests, num_kv_heads, group, sms, max_query, plan)
    if pack_plan is None:
        return None
    made = torch.empty(3, num_requests, dtype=torch.int32, device=shared.order.device)
    return Packs(pack_plan, shared.order, *made.unbind(0))
