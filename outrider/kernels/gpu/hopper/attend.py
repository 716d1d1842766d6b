"""The part of Hopper prefill attention that the multiplying warps run. A group of four warps owns 64 rows of the query
tile or, if heads are wide, half of the columns of 64 rows.

A group starts the product of its queries with the next keys before it computes the softmax weights of the current ones,
so that the tensor cores work during the softmax. If a head is too wide for the registers of one group, two groups have
the same rows. Each multiplies its half of the columns, the two add up their scores, and each sums up its half of the
values.
"""

from __future__ import annotations

import triton.experimental.gluon.language as gl
from triton.experimental import gluon
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from outrider.kernels.gpu.hopper.items import (
    barrier,
    count_tiles,
    first_seen,
    locate,
    nth_tile,
    phase_of,
    receive,
    slot_of,
)

LOG2E = gl.constexpr(1.4426950408889634)
ROWS = gl.constexpr(64)  # of the query tile that one group multiplies


@gluon.jit
def _tanh(x):
    return 1.0 - 2.0 / (1.0 + gl.exp(2.0 * x))


@gluon.jit
def _exp2(x):
    """Compute 2^x in one instruction. gl.exp2 is a library function, which the compiler would link and inline hundreds
    of times."""
    return gl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def _mask(score, position, last, lowest, HAS_LOWEST: gl.constexpr):
    """Put -inf in place of the scores of keys after `last` or before `lowest`. This is assembly, because the compiler
    would pack the comparisons bit by bit into words and unpack them again."""
    if HAS_LOWEST:
        return gl.inline_asm_elementwise(
            "{ .reg .pred p; setp.gt.s32 p, $2, $3; setp.lt.or.s32 p, $2, $4, p; selp.f32 $0, 0fFF800000, $1, p; }",
            "=f,f,r,r,r", [score, position, last, lowest], dtype=gl.float32, is_pure=True, pack=1)
    else:
        return gl.inline_asm_elementwise(
            "{ .reg .pred p; setp.gt.s32 p, $2, $3; selp.f32 $0, 0fFF800000, $1, p; }",
            "=f,f,r,r", [score, position, last], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def _weigh(
    score, peak, total, start, q_position, lowest, scaling, is_masked,
    BLOCK_N: gl.constexpr, MASKED: gl.constexpr, WINDOW_KIND: gl.constexpr, HAS_STARTS: gl.constexpr,
    HAS_SOFTCAP: gl.constexpr,
):
    """Return the softmax weights of one tile of keys, the new (peak, total), and the factor for everything summed so
    far. Peaks are in base 2. MASKED: whether is_masked may be true."""
    scale, softcap, window = scaling
    if HAS_SOFTCAP:
        score = softcap * _tanh(score * (scale / softcap))
        scale = LOG2E
    else:
        scale = scale * LOG2E
    if MASKED:
        if is_masked:
            position = (start + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, score.type.layout)))[None, :]
            if WINDOW_KIND:
                score = _mask(score, position, q_position[:, None],
                              gl.maximum(first_seen(q_position, window, WINDOW_KIND), lowest)[:, None], True)
            else:
                score = _mask(score, position, q_position[:, None], lowest, HAS_STARTS)
    new_peak = gl.maximum(peak, gl.max(score, axis=1) * scale)
    base = new_peak
    if MASKED:  # a query that has seen no key yet: -inf minus -inf is NaN
        base = gl.where(new_peak == float("-inf"), 0.0, new_peak)
    weight = _exp2(score * scale - base[:, None])
    # Exactly 1 where the peak stays: a tile that a query sees nothing of changes no bit of its result.
    shrink = _exp2(peak - base)
    return weight, new_peak, total * shrink + gl.sum(weight, axis=1), shrink


@gluon.jit
def _add_other_half(score, turn, exchange, GROUP_INDEX: gl.constexpr):
    """Add the scores that the other group of warps computed from the other half of the columns. Both groups add the
    same two numbers, so they get the same bits."""
    halves, ready = exchange
    slot = slot_of(turn, 2)
    halves.index(slot * 2 + GROUP_INDEX).store(score)
    barrier()
    mbarrier.arrive(ready.index(slot), count=1)
    mbarrier.wait(ready.index(slot), phase_of(turn, 2))
    return score + halves.index(slot * 2 + 1 - GROUP_INDEX).load(score.type.layout)


@gluon.jit
def _hold(total):
    """Keep the assembler from moving the wait for the values' product ahead of the exponentials; it would, because it
    assumes that the wait costs little. The wait cannot move ahead of the store in this function, which depends on all
    weights and never actually runs."""
    return gl.inline_asm_elementwise(
        "{ .reg .pred p; .reg .b32 a; mov.b32 a, 0; setp.lt.f32 p, $1, 0fBF800000; "
        "@p st.volatile.shared.b32 [a], $1; mov.b32 $0, $1; }",
        "=r,r,~{memory}", [total], dtype=gl.float32, is_pure=False, pack=1)


@gluon.jit
def _start_scores(
    q_tile, keys, turn, BLOCK_N: gl.constexpr, STAGES: gl.constexpr, SPLIT: gl.constexpr, GROUP_INDEX: gl.constexpr,
):
    tiles, ready, free = keys
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    slot = slot_of(turn, STAGES)
    mbarrier.wait(ready.index(slot), phase_of(turn, STAGES))
    k_tile = tiles.index(slot * SPLIT + GROUP_INDEX % SPLIT)
    score = gl.zeros([ROWS, BLOCK_N], gl.float32, layout=layout)
    return warpgroup_mma(q_tile, k_tile.permute((1, 0)), score, use_acc=False, is_async=True)


@gluon.jit
def _start_values(
    acc, weight, values, turn, STAGES: gl.constexpr, SPLIT: gl.constexpr, GROUP_INDEX: gl.constexpr,
):
    tiles, ready, free = values
    slot = slot_of(turn, STAGES)
    mbarrier.wait(ready.index(slot), phase_of(turn, STAGES))
    return warpgroup_mma(weight, tiles.index(slot * SPLIT + GROUP_INDEX % SPLIT), acc, is_async=True)


@gluon.jit
def _step(
    acc, weight, peak, total, turn, start, q_tile, keys, values, exchange, q_position, lowest, scaling, is_masked,
    BLOCK_N: gl.constexpr, STAGES: gl.constexpr, SPLIT: gl.constexpr, GROUP_INDEX: gl.constexpr,
    MASKED: gl.constexpr, WINDOW_KIND: gl.constexpr, HAS_STARTS: gl.constexpr, HAS_SOFTCAP: gl.constexpr,
):
    """Compute one step of the loop over key tiles: start the scores of tile number `turn`, add the weighted values of
    the previous tile, and compute the softmax weights of the scores while the tensor cores multiply the values."""
    score = _start_scores(q_tile, keys, turn, BLOCK_N, STAGES, SPLIT, GROUP_INDEX)
    acc = _start_values(acc, weight, values, turn - 1, STAGES, SPLIT, GROUP_INDEX)
    score = warpgroup_mma_wait(1, deps=[score])
    mbarrier.arrive(keys[2].index(slot_of(turn, STAGES)), count=1)
    if SPLIT > 1:
        score = _add_other_half(score, turn, exchange, GROUP_INDEX)
    new_weight, peak, total, shrink = _weigh(score, peak, total, start, q_position, lowest, scaling, is_masked,
                                             BLOCK_N, MASKED, WINDOW_KIND, HAS_STARTS, HAS_SOFTCAP)
    total = _hold(total)
    acc, weight = warpgroup_mma_wait(0, deps=[acc, weight])
    mbarrier.arrive(values[2].index(slot_of(turn - 1, STAGES)), count=1)
    acc = acc * gl.convert_layout(shrink, gl.SliceLayout(1, acc.type.layout))[:, None]
    weight = gl.convert_layout(new_weight.to(weight.dtype), weight.type.layout)
    return acc, weight, peak, total


@gluon.jit
def _attend_run(
    acc, peak, total, turn, i, num_following, keys_of_item, q_position, q_tile, keys, values, exchange, scaling,
    BLOCK_N: gl.constexpr, STAGES: gl.constexpr, SPLIT: gl.constexpr, GROUP_INDEX: gl.constexpr,
    WINDOW_KIND: gl.constexpr, HAS_STARTS: gl.constexpr, HAS_SOFTCAP: gl.constexpr,
):
    """Add tile i, which may need a mask, and all tiles after it. With a window or first keys (`key_starts`), some later
    tiles need a mask too; otherwise none does."""
    begin, num_key_tiles, first_whole, end_whole, lowest = keys_of_item
    HAS_BRANCH: gl.constexpr = WINDOW_KIND or HAS_STARTS
    turn += i
    score = _start_scores(q_tile, keys, turn, BLOCK_N, STAGES, SPLIT, GROUP_INDEX)
    score = warpgroup_mma_wait(0, deps=[score])
    mbarrier.arrive(keys[2].index(slot_of(turn, STAGES)), count=1)
    if SPLIT > 1:
        score = _add_other_half(score, turn, exchange, GROUP_INDEX)
    at = nth_tile(i, num_key_tiles)
    new_weight, peak, total, shrink = _weigh(score, peak, total, begin + at * BLOCK_N, q_position, lowest, scaling,
                                             True, BLOCK_N, True, WINDOW_KIND, HAS_STARTS, HAS_SOFTCAP)
    if not HAS_BRANCH:  # otherwise nothing was added before
        acc = acc * gl.convert_layout(shrink, gl.SliceLayout(1, acc.type.layout))[:, None]
    weight = gl.convert_layout(new_weight.to(q_tile.dtype), gl.DotOperandLayout(0, acc.type.layout, 2))
    for now in range(turn + 1, turn + num_following + 1):
        at = nth_tile(i + now - turn, num_key_tiles)
        acc, weight, peak, total = _step(
            acc, weight, peak, total, now, begin + at * BLOCK_N, q_tile, keys, values, exchange, q_position, lowest,
            scaling, (at < first_whole) | (at >= end_whole), BLOCK_N, STAGES, SPLIT, GROUP_INDEX, HAS_BRANCH,
            WINDOW_KIND, HAS_STARTS, HAS_SOFTCAP)
    turn += num_following
    acc = _start_values(acc, weight, values, turn, STAGES, SPLIT, GROUP_INDEX)
    acc, weight = warpgroup_mma_wait(0, deps=[acc, weight])
    mbarrier.arrive(values[2].index(slot_of(turn, STAGES)), count=1)
    return acc, peak, total


@gluon.jit
def _attend_keys(
    turn, keys_of_item, q_position, q_tile, keys, values, exchange, scaling,
    WIDTH: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr, SPLIT: gl.constexpr, GROUP_INDEX: gl.constexpr,
    WINDOW_KIND: gl.constexpr, HAS_STARTS: gl.constexpr, HAS_SOFTCAP: gl.constexpr,
):
    """Return (weighted values, peak in base 2, sum of weights) over all keys of one query tile and head."""
    num_key_tiles, end_whole = keys_of_item[1], keys_of_item[3]
    acc_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, 16])
    row_layout: gl.constexpr = q_position.type.layout
    acc = gl.zeros([ROWS, WIDTH], gl.float32, layout=acc_layout)
    peak = gl.full([ROWS], float("-inf"), gl.float32, layout=row_layout)
    total = gl.zeros([ROWS], gl.float32, layout=row_layout)
    if WINDOW_KIND or HAS_STARTS:
        # One loop, with a branch around the mask: another loop for few tiles without one would save nothing.
        if num_key_tiles > 0:
            acc, peak, total = _attend_run(
                acc, peak, total, turn, 0, num_key_tiles - 1, keys_of_item, q_position, q_tile, keys, values, exchange,
                scaling, BLOCK_N, STAGES, SPLIT, GROUP_INDEX, WINDOW_KIND, HAS_STARTS, HAS_SOFTCAP)
    else:
        # Most tiles need no mask, and a branch around it would cost up to 2%. They follow the last tile with one, and
        # mostly there is one. The same code for it and the first tile makes the kernel compile in 0.7 of the time.
        num_masked = num_key_tiles - end_whole
        for i in range(num_masked):
            acc, peak, total = _attend_run(
                acc, peak, total, turn, i, gl.where(i == num_masked - 1, end_whole, 0), keys_of_item, q_position,
                q_tile, keys, values, exchange, scaling, BLOCK_N, STAGES, SPLIT, GROUP_INDEX, WINDOW_KIND, HAS_STARTS,
                HAS_SOFTCAP)
    return acc, peak, total


@gluon.jit
def _attend_item(
    item, count, turn, q, out, query_starts, sinks, tiles, strides, q_tile, keys, values, exchange, scaling,
    GROUP_INDEX: gl.constexpr, GROUP: gl.constexpr, D: gl.constexpr, Q_TILE: gl.constexpr, BLOCK_N: gl.constexpr,
    STAGES: gl.constexpr, SPLIT: gl.constexpr, SEARCH: gl.constexpr, WINDOW_KIND: gl.constexpr,
    HAS_STARTS: gl.constexpr, HAS_SOFTCAP: gl.constexpr, HAS_SINKS: gl.constexpr,
):
    """Attend for one query tile of a request and one key/value head, and store the result. Returns the number of its
    key tiles."""
    WIDTH: gl.constexpr = D // SPLIT  # columns of this group
    first_row: gl.constexpr = 0 if SPLIT > 1 else GROUP_INDEX * ROWS
    first_column: gl.constexpr = GROUP_INDEX * WIDTH if SPLIT > 1 else 0
    score_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    copy_layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    q_token_stride, q_head_stride, out_token_stride, out_head_stride = strides
    row = first_row + gl.arange(0, ROWS, layout=gl.SliceLayout(1, score_layout))
    copy_row = first_row + gl.arange(0, ROWS, layout=gl.SliceLayout(1, copy_layout))
    column = (first_column + gl.arange(0, WIDTH, layout=gl.SliceLayout(0, copy_layout)))[None, :]
    in_tile = copy_row < Q_TILE * GROUP
    kv_head, request, queries, item_keys, cached = locate(item, count, tiles, Q_TILE, BLOCK_N, SEARCH, WINDOW_KIND,
                                                          HAS_STARTS)
    first_query, num_live, context = queries
    first_token = gl.load(query_starts + request)
    scheduled = gl.load(query_starts + request + 1) - first_token
    query = first_query + copy_row // GROUP
    token = (first_token + query).to(gl.int64)
    head = kv_head * GROUP + copy_row % GROUP
    q_tile.store(gl.load(q + (token * q_token_stride + head * q_head_stride)[:, None] + column,
                         mask=(in_tile & (query < num_live))[:, None], other=0.0))
    fence_async_shared()
    barrier()

    row_query = first_query + row // GROUP
    is_query = (row < Q_TILE * GROUP) & (row_query < num_live)
    q_position = gl.where(is_query, context + row_query, -1)
    acc, peak, total = _attend_keys(turn, item_keys, q_position, q_tile, keys, values, exchange, scaling,
                              WIDTH, BLOCK_N, STAGES, SPLIT, GROUP_INDEX, WINDOW_KIND, HAS_STARTS, HAS_SOFTCAP)

    if HAS_SINKS:  # one more key, whose value is 0
        sink = gl.load(sinks + kv_head * GROUP + row % GROUP, mask=is_query, other=float("-inf"))
        total += _exp2(sink * LOG2E - gl.where(peak == float("-inf"), 0.0, peak))
    factor = gl.where(is_query & (total > 0), 1.0 / gl.where(total > 0, total, 1.0), 0.0)
    result = (acc * gl.convert_layout(factor, gl.SliceLayout(1, acc.type.layout))[:, None]).to(q_tile.dtype)
    barrier()
    q_tile.store(result)  # to write whole rows
    barrier()
    gl.store(out + (token * out_token_stride + head * out_head_stride)[:, None] + column, q_tile.load(copy_layout),
             mask=(in_tile & (query < scheduled))[:, None])
    barrier()
    return item_keys[1]


@gluon.jit
def attend(
    q, out, query_starts, sinks, tiles, strides, q_tiles, keys, values, exchange, queue, scaling,
    GROUP_INDEX: gl.constexpr, GROUP: gl.constexpr, D: gl.constexpr, Q_TILE: gl.constexpr, BLOCK_N: gl.constexpr,
    STAGES: gl.constexpr, SPLIT: gl.constexpr, SEARCH: gl.constexpr, WINDOW_KIND: gl.constexpr,
    HAS_STARTS: gl.constexpr, HAS_SOFTCAP: gl.constexpr, HAS_SINKS: gl.constexpr, KV_HEADS: gl.constexpr,
):
    """Compute attention for tiles of queries. The bodies of loops are function calls, because the compiler goes through
    the lines of a loop twice, and four times through the lines of an inner loop."""
    half_layout: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    q_tile = q_tiles.index(GROUP_INDEX)
    shape: gl.constexpr = [STAGES * SPLIT, BLOCK_N, D // SPLIT]
    key_halves = (keys[0]._reinterpret(q_tile.dtype, shape, half_layout), keys[1], keys[2])
    value_halves = (values[0]._reinterpret(q_tile.dtype, shape, half_layout), values[1], values[2])
    count = count_tiles(tiles, SEARCH)
    turn = 0
    number = 0
    item = receive(number, queue)
    while item < count * KV_HEADS:
        turn += _attend_item(item, count, turn, q, out, query_starts, sinks, tiles, strides, q_tile, key_halves,
                             value_halves, exchange, scaling, GROUP_INDEX, GROUP, D, Q_TILE, BLOCK_N, STAGES, SPLIT,
                             SEARCH, WINDOW_KIND, HAS_STARTS, HAS_SOFTCAP, HAS_SINKS)
        number += 1
        item = receive(number, queue)
