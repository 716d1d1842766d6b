"""The warps that fetch for Hopper prefill attention: one copies keys and one values, page by page, into rings of tiles
in shared memory.

The bulk copy engine moves 64 columns of one page at a time, and writes zeros for page -1, which stands for pages that
are not the request's. A ring is (tiles, barriers that say a tile has arrived, barriers that say it may be overwritten).
"""

from __future__ import annotations

import triton.experimental.gluon.language as gl
from triton.experimental import gluon
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from outrider.kernels.gpu.hopper.items import barrier, count_tiles, locate, nth_tile, publish, receive, take

COLUMNS = gl.constexpr(64)  # of one copy: 128 bytes, the widest row that the copy engine swizzles
STRIP = gl.constexpr(16)  # rows of values that are zeroed at a time


@gluon.jit
def copy_tile(
    pages, table, tiles, free, arrived, turn, start, column, cached_begin, cached_end,
    D: gl.constexpr, PAGE: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
):
    """Start the copies of one tile of keys or values as soon as its buffer in the ring is free. All page numbers are
    loaded first, because loading a number takes longer than starting a copy. arrived: the barrier that counts the
    copies."""
    COPY: gl.constexpr = min(PAGE, BLOCK_N)
    COPIES: gl.constexpr = BLOCK_N // COPY
    PARTS: gl.constexpr = D // COLUMNS
    pieces = tiles._reinterpret(tiles.dtype, [STAGES * PARTS * COPIES, 1, COPY, COLUMNS],
                                gl.NVMMASharedLayout(128, 16, rank=3))
    slot = turn % STAGES
    table += start // PAGE
    row = start % PAGE if PAGE > BLOCK_N else 0  # tiles begin at multiples of BLOCK_N, and so of smaller pages
    cached_begin -= start
    cached_end -= start
    numbers = ()
    for j in gl.static_range(COPIES):
        is_cached = (cached_end > j * COPY) & (cached_begin < j * COPY + COPY)
        numbers = numbers + (gl.load(table + j, mask=is_cached, other=-1),)  # type: ignore[assignment]
    mbarrier.wait(free.index(slot), ((turn // STAGES) & 1) ^ 1)
    mbarrier.expect(arrived, BLOCK_N * D * 2)
    first = slot * (PARTS * COPIES)
    for j in gl.static_range(COPIES):
        for c in gl.static_range(PARTS):
            tma.async_copy_global_to_shared(pages, [numbers[j], row, column + c * COLUMNS], arrived,
                                            pieces.index(first + (c * COPIES + j)))


@gluon.jit
def fetch_keys(
    pages, page_table, table_stride, tiles, counter, ring, queue,
    D: gl.constexpr, PAGE: gl.constexpr, Q_TILE: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
    SEARCH: gl.constexpr, WINDOW_KIND: gl.constexpr, HAS_STARTS: gl.constexpr, KV_HEADS: gl.constexpr,
):
    """Copy keys to shared memory; run by one warp. This warp also takes the program's next query tiles from the global
    counter, and announces them to the program's other warps."""
    key_tiles, ready, free = ring
    count = count_tiles(tiles, SEARCH)
    turn = 0
    number = 0
    item = gl.program_id(0)
    publish(item, number, queue)
    while item < count * KV_HEADS:
        kv_head, request, queries, keys, cached = locate(item, count, tiles, Q_TILE, BLOCK_N, SEARCH, WINDOW_KIND,
                                                         HAS_STARTS)
        begin, num_key_tiles = keys[0], keys[1]
        table = page_table + request.to(gl.int64) * table_stride
        for i in range(num_key_tiles):
            copy_tile(pages, table, key_tiles, free, ready.index((turn + i) % STAGES), turn + i,
                      begin + nth_tile(i, num_key_tiles) * BLOCK_N, kv_head * D, cached[0], cached[1], D, PAGE, BLOCK_N,
                      STAGES)
        turn += num_key_tiles
        number += 1
        item = take(counter, count * KV_HEADS)
        publish(item, number, queue)


@gluon.jit
def _zero_strips(
    tiles, slot, start, cached_begin, cached_end, D: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
):
    """Write zeros over the values of a tile that do not belong to the request, because a weight of zero times NaN is
    NaN."""
    STRIPS: gl.constexpr = BLOCK_N // STRIP
    PARTS: gl.constexpr = D // COLUMNS
    strips = tiles._reinterpret(tiles.dtype, [STAGES * PARTS * STRIPS, STRIP, COLUMNS],
                                gl.NVMMASharedLayout(128, 16, rank=2))
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [1, 1], [1, 0])
    row = gl.arange(0, STRIP, layout=gl.SliceLayout(1, layout))
    for strip in range(PARTS * STRIPS):
        first = start + strip % STRIPS * STRIP
        if (first < cached_begin) | (first + STRIP > cached_end):
            at = strips.index(slot * PARTS * STRIPS + strip)
            position = (first + row)[:, None]
            at.store(gl.where((position >= cached_begin) & (position < cached_end), at.load(layout), 0.0))
    fence_async_shared()
    barrier()


@gluon.jit
def fetch_values(
    pages, page_table, table_stride, tiles, ring, queue,
    D: gl.constexpr, PAGE: gl.constexpr, Q_TILE: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
    SEARCH: gl.constexpr, WINDOW_KIND: gl.constexpr, HAS_STARTS: gl.constexpr, KV_HEADS: gl.constexpr,
):
    """Copy values to shared memory; run by one warp. There is one barrier more than buffers in the ring, for tiles in
    which some values must be zeroed before use."""
    value_tiles, ready, free = ring
    count = count_tiles(tiles, SEARCH)
    turn = 0
    number = 0
    num_zeroed = 0
    item = receive(number, queue)
    while item < count * KV_HEADS:
        kv_head, request, queries, keys, cached = locate(item, count, tiles, Q_TILE, BLOCK_N, SEARCH, WINDOW_KIND,
                                                         HAS_STARTS)
        begin, num_key_tiles = keys[0], keys[1]
        table = page_table + request.to(gl.int64) * table_stride
        for i in range(num_key_tiles):
            start = begin + nth_tile(i, num_key_tiles) * BLOCK_N
            slot = (turn + i) % STAGES
            needs_zeros = (start < cached[0]) | (start + BLOCK_N > cached[1])
            copy_tile(pages, table, value_tiles, free, ready.index(gl.where(needs_zeros, STAGES, slot)), turn + i,
                      start, kv_head * D, cached[0], cached[1], D, PAGE, BLOCK_N, STAGES)
            if needs_zeros:
                mbarrier.wait(ready.index(STAGES), num_zeroed & 1)
                _zero_strips(value_tiles, slot, start, cached[0], cached[1], D, BLOCK_N, STAGES)
                mbarrier.arrive(ready.index(slot), count=1)
                num_zeroed += 1
        turn += num_key_tiles
        number += 1
        item = receive(number, queue)
