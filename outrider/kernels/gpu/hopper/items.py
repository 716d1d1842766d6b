"""Items of work of Hopper prefill attention: an item is one query tile of a request together with one key/value head.
This file says which items a program takes, and which keys an item needs.

One warp takes items from a counter in device memory and announces them to all other warps of its program through two
cells of shared memory. Items are ordered by head, so that the keys of one head stay in the GPU's cache, and within a
head the tiles with the most keys come first.
"""

from __future__ import annotations

import triton.experimental.gluon.language as gl
from triton.experimental import gluon
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from outrider.kernels.gpu.attention.windows import CHUNKED

barrier = gl.thread_barrier if hasattr(gl, "thread_barrier") else gl.barrier  # the name in Triton 3.6, and since


@gluon.jit
def slot_of(turn, SLOTS: gl.constexpr):
    """Return which buffer of a ring is used at a turn: the turn modulo the number of buffers. Turns are not negative,
    and unsigned division takes fewer instructions."""
    return (turn.to(gl.uint32) % SLOTS).to(gl.int32)


@gluon.jit
def phase_of(turn, SLOTS: gl.constexpr):
    return (turn.to(gl.uint32) // SLOTS & 1).to(gl.int32)


@gluon.jit
def nth_tile(n, num_key_tiles):
    """Return which of an item's key tiles is the n-th to be computed. The last tiles come first: queries see different
    keys in them, so they need masks, and at the beginning there is no other work to overlap with."""
    return num_key_tiles - 1 - n


@gluon.jit
def publish(item, number, queue):
    """Announce the next item of work to the program's other warps. Two items may be announced at a time."""
    items, ready, free = queue
    slot = number % 2
    mbarrier.wait(free.index(slot), ((number // 2) & 1) ^ 1)
    items.index(slot).store(gl.full([1], item, gl.int32, layout=gl.BlockedLayout([1], [32], [gl.num_warps()], [0])))
    barrier()
    mbarrier.arrive(ready.index(slot), count=1)


@gluon.jit
def receive(number, queue):
    items, ready, free = queue
    slot = number % 2
    mbarrier.wait(ready.index(slot), (number // 2) & 1)
    item = gl.max(items.index(slot).load(gl.BlockedLayout([1], [32], [gl.num_warps()], [0])), axis=0)
    barrier()
    mbarrier.arrive(free.index(slot), count=1)
    return item


@gluon.jit
def take(counter, num_items):
    """Take the next item of work that no program has taken. A program's first item has the program's own number. Every
    program takes one item too many at its end, so the very last call gets number num_items - 1, and resets the counter
    to zero."""
    taken = gl.atomic_add(counter, 1, sem="relaxed")
    if taken == num_items - 1:
        gl.store(counter, 0)
    return taken + gl.num_programs(0)


@gluon.jit
def count_tiles(tiles, SEARCH: gl.constexpr):
    """Return how many query tiles there are: as the host listed them, or as the device counted them."""
    tile_requests, tile_indices, lengths, live, key_starts, num_requests, num_tiles, window = tiles
    if SEARCH > 0:
        num_tiles = gl.load(tile_requests + num_requests)
    return num_tiles


@gluon.jit
def _find_tile(index, count, tile_requests, tile_indices, num_requests, SEARCH: gl.constexpr):
    """Return (request, query tile of the request) by a tile's index. Counted tiles are taken from the last one back,
    because late tiles have the most keys."""
    if SEARCH > 0:
        at = count - 1 - index
        num_warps: gl.constexpr = gl.num_warps()
        layout: gl.constexpr = gl.BlockedLayout([SEARCH // (32 * num_warps)], [32], [num_warps], [0])
        request = gl.arange(0, SEARCH, layout=layout)
        first = gl.load(tile_requests + request, mask=request < num_requests, other=2147483647)
        owner = gl.sum((first <= at).to(gl.int32), axis=0) - 1
        return owner, at - gl.load(tile_requests + owner)
    else:
        return gl.load(tile_requests + index), gl.load(tile_indices + index)


@gluon.jit
def first_seen(position, window, WINDOW_KIND: gl.constexpr):
    """Return the first key that a query sees, as in `attention/windows.py`, for kernels in Gluon."""
    if WINDOW_KIND == CHUNKED:
        return position - position % window
    else:
        return position - window + 1


@gluon.jit
def locate(
    item, count, tiles, Q_TILE: gl.constexpr, BLOCK_N: gl.constexpr, SEARCH: gl.constexpr, WINDOW_KIND: gl.constexpr,
    HAS_STARTS: gl.constexpr,
):
    """(key/value head, request, queries of the item, keys of the item, keys that the cache holds):

    queries  first one, live ones of the request, position of query 0
    keys     first one, number of key tiles from there, [a, b) of these tiles that every query sees whole, and the
             lowest key that any query sees; the last tile counts as one that needs a mask
    cached   [begin, end) of the keys that may be read
    """
    tile_requests, tile_indices, lengths, live, key_starts, num_requests, num_tiles, window = tiles
    request, tile = _find_tile(item % count, count, tile_requests, tile_indices, num_requests, SEARCH)
    length = gl.load(lengths + request)
    num_live = gl.load(live + request)
    first_query = tile * Q_TILE
    context = length - num_live
    first_position = context + first_query
    end = gl.where(first_query < num_live, context + gl.minimum(num_live, first_query + Q_TILE), 0)
    cached_begin = 0
    lowest = 0
    begin = 0
    whole_begin = 0
    if HAS_STARTS:
        lowest = gl.load(key_starts + request)
        cached_begin = lowest
        whole_begin = (lowest + BLOCK_N - 1) // BLOCK_N * BLOCK_N
    if WINDOW_KIND:
        cached_begin = gl.maximum(first_seen(context, window, WINDOW_KIND), lowest)
        lowest = gl.maximum(first_seen(first_position, window, WINDOW_KIND), lowest)
        seen_by_all = gl.maximum(first_seen(end - 1, window, WINDOW_KIND), 0)
        whole_begin = gl.maximum((seen_by_all + BLOCK_N - 1) // BLOCK_N * BLOCK_N, whole_begin)
    if WINDOW_KIND or HAS_STARTS:
        begin = lowest // BLOCK_N * BLOCK_N
    whole_end = gl.maximum(gl.minimum(first_position + 1, end), 0) // BLOCK_N * BLOCK_N
    num_key_tiles = gl.maximum((end - begin + BLOCK_N - 1) // BLOCK_N, 0)
    first_whole = gl.minimum(gl.maximum((whole_begin - begin) // BLOCK_N, 0), num_key_tiles)
    end_whole = gl.minimum(gl.maximum((whole_end - begin) // BLOCK_N, first_whole), gl.maximum(num_key_tiles - 1, 0))
    keys = (begin, num_key_tiles, first_whole, end_whole, lowest)
    return item // count, request, (first_query, num_live, context), keys, (cached_begin, length)
