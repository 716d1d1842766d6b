"""How a launch of decode attention is planned: tiles, splits over the keys, and the list of splits a batch really has.

A request's splits depend on its own length and on host bounds, never on its batch mates. Lengths are known on the
device alone, so a grid has a program for every split there could be. Where requests are many, a list says which there
are, those of the longest requests first: a long one among short ones is split and starts early, and the programs that
have nothing to do come last and cost next to nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

import triton
import triton.language as tl
from outrider.kernels.triton.common import cdiv, next_power_of_two, num_sms, require_tensor
from outrider.kernels.triton.launch import kernel

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
_INTS = ["lengths", "live", "key_starts"]


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
    """Measured on an H200, for 16 bits. With few requests latency is all: short splits, everything fetched at once.
    num_rows: queries times the query heads of one key/value head."""
    if itemsize > 2 and padded_dim >= 256:  # what fits into a multiprocessor's shared memory
        return DecodeConfig(block_n=32 if padded_dim <= 256 else 16, max_rows=16, num_warps=8, num_stages=2)
    if num_requests is None:  # one choice for all
        num_requests, num_rows = 1 << 30, 1
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
    """How one launch is divided into programs, from what the host knows."""

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
    """Least keys of a split in a list, by the programs there were without splits. Splits fill the card and keep a long
    request from being waited for, but a program takes microseconds to start: with many requests only the second counts.
    rows: those of a tile if they are many, else 0. Measured on an H200 with equal, mixed and skewed lengths, many rows
    with heads of 128 and of 512, where splits of 512 keys stay the better choice for short contexts."""
    shares = ((1, 128), (2, 256), (3, 512))  # of the multiprocessors
    least = next((least for share, least in shares if programs <= share * sms), 2048)
    if padded_dim <= 128:
        return max(least, min(KEYS_OF_A_ROW * rows, LONGEST_LEAST))
    return min(least * (padded_dim // 128), 2048)


def pays_split_list(num_requests: int, window: int | None) -> bool:
    """Whether a list of splits pays off. With few requests every split has a program anyway, and a short window makes
    all lengths equal."""
    return num_requests >= _LISTED_REQUESTS and (window is None or window > _LISTED_WINDOW)


@triton.jit
def split_geometry(length, live, window, first_key, split_size, coarse_size, num_splits, BLOCK_N: tl.constexpr,
                   HAS_WINDOW: tl.constexpr):  # fmt: skip
    """(first position of split 0, keys per split, splits with work). The last split takes whatever is left. Splits grow
    from `split_size` to `coarse_size` when there are many of them, which all have to be merged, and are as even as
    tiles allow; with a coarse size of 0 they have `split_size` keys and begin at multiples of it."""
    lowest = first_key
    if HAS_WINDOW:
        lowest = tl.maximum(length - live - window + 1, first_key)
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
class SplitList:
    """The splits of one batch, for layers that have the same heads and window."""

    plan: LaunchPlan
    shape: tuple[int | None, ...]  # requests, heads, key/value heads, dim, bytes of an element; bounds, window
    made_of: tuple[torch.Tensor | None, ...]  # lengths, live counts, key starts
    items: torch.Tensor  # [most there may be] int32: request * MOST_SPLITS + split
    count: torch.Tensor  # [1] int32

    def is_for(self, shape: tuple[int | None, ...], tensors: tuple[torch.Tensor | None, ...]) -> bool:
        """Another batch's list would leave splits out, and counters that others rely on."""
        return shape == self.shape and all(a is b for a, b in zip(tensors, self.made_of, strict=True))


@kernel(do_not_specialize=["window", "split_size", "coarse_size", "num_splits", "num_requests"],
            do_not_specialize_on_alignment=_INTS)  # fmt: skip
def _list_splits_kernel(
    lengths, live, key_starts, items, count, window, split_size, coarse_size, num_splits, num_requests,
    BLOCK_N: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_STARTS: tl.constexpr, PAD: tl.constexpr, ROWS: tl.constexpr,
):
    request = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    other = tl.arange(0, PAD)
    own_length, own = _splits_of(lengths, live, key_starts, request, num_requests, window, split_size, coarse_size,
                                 num_splits, BLOCK_N, HAS_WINDOW, HAS_STARTS)  # fmt: skip
    length, splits = _splits_of(lengths, live, key_starts, other, num_requests, window, split_size, coarse_size,
                                num_splits, BLOCK_N, HAS_WINDOW, HAS_STARTS)  # fmt: skip
    is_before = (length[None, :] > own_length[:, None]) | (
        (length[None, :] == own_length[:, None]) & (other[None, :] < request[:, None])
    )
    first = tl.sum(tl.where(is_before, splits[None, :], 0), axis=1)
    for split in range(0, tl.max(own, axis=0)):
        tl.store(items + first + split, request * MOST_SPLITS + split, mask=split < own)
    if tl.program_id(0) == 0:
        tl.store(count, tl.sum(splits, axis=0))


@triton.jit
def _splits_of(
    lengths, live, key_starts, request, num_requests, window, split_size, coarse_size, num_splits,
    BLOCK_N: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_STARTS: tl.constexpr,
):
    """(length, splits) of requests: at least one, which also writes what dead tokens get; past the last none."""
    exists = request < num_requests
    length = tl.load(lengths + request, mask=exists, other=-1)
    num_live = tl.load(live + request, mask=exists, other=0)
    first_key = length * 0
    if HAS_STARTS:
        first_key = tl.load(key_starts + request, mask=exists, other=0)
    _, _, active = split_geometry(length, num_live, window, first_key, split_size, coarse_size, num_splits, BLOCK_N,
                                  HAS_WINDOW)  # fmt: skip
    return length, tl.where(exists, tl.maximum(active, 1), 0)


def list_splits(
    lengths: torch.Tensor, live: torch.Tensor, num_heads: int, num_kv_heads: int, head_dim: int, itemsize: int, *,
    max_query: int, max_length: int, window: int | None = None, key_starts: torch.Tensor | None = None,
    config: DecodeConfig | None = None,
) -> SplitList:
    """The list for `decode_attention`, which must get the same lengths, live counts, bounds, window and key_starts."""
    name, device, int32 = "list_splits", lengths.device, (torch.int32,)
    num_requests, sms = lengths.shape[0], num_sms(device)
    require_tensor(name, "lengths", lengths, (None,), device, int32)
    require_tensor(name, "live", live, (num_requests,), device, int32)
    if key_starts is not None:
        require_tensor(name, "key_starts", key_starts, (num_requests,), device, int32)
    heads = (num_requests, num_heads, num_kv_heads, head_dim, itemsize)
    plan = plan_launch(*heads, sms, max_query=max_query, max_length=max_length, window=window, config=config,
                     is_listed=True)
    items = torch.empty(num_requests * plan.num_splits, dtype=torch.int32, device=device)
    count = torch.empty(1, dtype=torch.int32, device=device)
    pad = max(256, next_power_of_two(num_requests))  # one kernel for most batches
    _list_splits_kernel[(cdiv(num_requests, 16),)](
        lengths, live, lengths if key_starts is None else key_starts, items, count, window or 0, plan.split_size,
        plan.coarse_size, plan.num_splits, num_requests, BLOCK_N=plan.config.block_n, HAS_WINDOW=window is not None,
        HAS_STARTS=key_starts is not None, PAD=pad, ROWS=16, num_warps=4,
    )
    return SplitList(plan, (*heads, max_query, max_length, window), (lengths, live, key_starts), items, count)
