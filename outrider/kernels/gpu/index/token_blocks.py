"""Block-sparse attention: attends to the blocks of a context that an indexer chose, and writes the indexer's keys to
the cache.

`kernels/token_blocks.py` says what a block is. Each program attends, for the heads of one kv head of one token row, to
one split of the chosen blocks and last tokens; the splits are merged as in latent attention. Contexts and choices are
read on the device: the host sets the grid from the number of token rows alone.
"""

from __future__ import annotations

import torch
import triton.language as tl

from outrider.kernels.gpu.attention.core import no_sums, weigh_scores
from outrider.kernels.gpu.common import (
    FLOATS,
    LOG2E,
    cdiv,
    next_power_of_two,
    num_sms,
    pdl_options,
    release_dependents,
    require,
    require_tensor,
    uses_pdl,
    wait_for_inputs,
)
from outrider.kernels.gpu.latent.attention import MOST_SPLITS, merge_splits
from outrider.kernels.gpu.launch.triton_kernel import kernel
from outrider.kernels.latent import TokenContexts
from outrider.kernels.latent_inputs import RopeRows
from outrider.kernels.token_blocks import TokenBlocks, check_blocks

_INTEGERS = (torch.int32, torch.int64)
_INTS = ["page_table", "request_of", "first", "stop", "chosen"]
EXACT_SPLITS = 8
EXACT_ROWS = 512  # token rows whose splits exist at a time
_KEYS = {2: 64, 4: 32}  # keys of a tile, by the bytes of a number


@kernel(do_not_specialize_on_alignment=["positions", "slots", "offsets", "page_table", "request_of"])
def _write_kernel(
    raw, gain, table, positions, slots, offsets, page_table, request_of, cache, eps, raw_stride, rope_stride,
    table_stride, page_stride, key_stride,
    SIZE: tl.constexpr, ANCHOR: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr, HALF: tl.constexpr,
    PAGE: tl.constexpr, PDL: tl.constexpr,
):
    """Each program writes one token's key, or the key of the block that the token completes. A dimension is computed
    together with the one that the rope rotates with it."""
    release_dependents(PDL)
    wait_for_inputs(PDL)
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token)
    if slot >= 0:
        dim = tl.arange(0, D_PAD)
        valid = dim < D
        other = tl.where(dim < HALF, dim + HALF, tl.where(dim < 2 * HALF, dim - HALF, dim))
        dtype: tl.constexpr = cache.dtype.element_ty
        own = tl.load(raw + token * raw_stride + dim, mask=valid, other=0.0)
        begin = tl.load(positions + token) - (SIZE - 1)
        if (begin >= ANCHOR) & ((begin - ANCHOR) % SIZE == 0):
            offset = tl.load(offsets + token)
            pages = page_table + tl.load(request_of + token) * table_stride
            total = own.to(tl.float32)
            total_other = tl.load(raw + token * raw_stride + other, mask=valid, other=0.0).to(tl.float32)
            for back in range(1, SIZE):
                position = begin + SIZE - 1 - back
                in_step = back <= offset  # then the key is not in the cache yet
                page = tl.load(pages + position // PAGE, mask=offset < back, other=0).to(tl.int64)
                kept = cache + page * page_stride + (position % PAGE) * key_stride
                given = raw + (token - back) * raw_stride
                for_step, for_cache = valid & in_step, valid & (offset < back)
                total += tl.load(given + dim, mask=for_step, other=0.0).to(tl.float32)
                total += tl.load(kept + dim, mask=for_cache, other=0.0).to(tl.float32)
                total_other += tl.load(given + other, mask=for_step, other=0.0).to(tl.float32)
                total_other += tl.load(kept + other, mask=for_cache, other=0.0).to(tl.float32)
            mean = (total / SIZE).to(dtype).to(tl.float32)
            mean_other = (total_other / SIZE).to(dtype).to(tl.float32)
            scale = tl.rsqrt(tl.sum(tl.where(valid, mean * mean, 0.0), axis=0) / D + eps)
            key = (mean * scale * tl.load(gain + dim, mask=valid, other=0.0).to(tl.float32)).to(dtype).to(tl.float32)
            factor = tl.load(gain + other, mask=valid, other=0.0).to(tl.float32)
            key_other = (mean_other * scale * factor).to(dtype).to(tl.float32)
            turns = dim < 2 * HALF
            angle = table + begin * rope_stride + dim % HALF
            cos = tl.load(angle, mask=turns, other=1.0).to(tl.float32)
            sin = tl.load(angle + HALF, mask=turns, other=0.0).to(tl.float32)
            own = (key * cos + tl.where(dim < HALF, -key_other, key_other) * sin).to(dtype)
        tl.store(cache + (slot // PAGE) * page_stride + (slot % PAGE) * key_stride + dim, own, mask=valid)


def write_block_keys(
    raw: torch.Tensor, gain: torch.Tensor, eps: float, rope: RopeRows, slots: torch.Tensor, offsets: torch.Tensor,
    contexts: TokenContexts, cache: torch.Tensor, blocks: TokenBlocks, *, pdl: bool | None = None,
) -> None:
    """Write the indexer's keys of the step's tokens and of the blocks that they complete; see
    `kernels.token_blocks.write_block_keys` for the arguments."""
    name, device = "write_block_keys", raw.device
    pdl = uses_pdl(device) if pdl is None else pdl
    require_tensor(name, "raw", raw, (None, None), device, FLOATS)
    num_tokens, dim = raw.shape
    require_tensor(name, "gain", gain, (dim,), device, FLOATS)
    require_tensor(name, "cache", cache, (None, None, dim), device, (raw.dtype,))
    require_tensor(name, "table", rope.table, (None, None), device, FLOATS)
    turning = rope.table.shape[1]
    require(0 < turning <= dim and turning % 2 == 0, name, "table", f"turns {turning} of {dim} dimensions")
    for argument, tensor in (("positions", rope.positions), ("slots", slots), ("offsets", offsets)):
        require_tensor(name, argument, tensor, (num_tokens,), device, (torch.int64,))
    require_tensor(name, "page_table", contexts.page_table, (None, None), device, _INTEGERS)
    require_tensor(name, "request_of", contexts.request_of, (num_tokens,), device, _INTEGERS)
    if num_tokens:
        _write_kernel[(num_tokens,)](
            raw, gain, rope.table, rope.positions, slots, offsets, contexts.page_table, contexts.request_of, cache, eps,
            raw.stride(0), rope.table.stride(0), contexts.page_table.stride(0), *cache.stride()[:2],
            SIZE=blocks.size, ANCHOR=blocks.anchor, D=dim, D_PAD=next_power_of_two(dim), HALF=turning // 2,
            PAGE=cache.shape[1], PDL=pdl, num_warps=1 if dim <= 256 else 4, **pdl_options(pdl),
        )


@kernel(do_not_specialize=["num_splits"], do_not_specialize_on_alignment=_INTS)
def _attention_kernel(
    q, k_cache, v_cache, page_table, request_of, first, stop, chosen, out, part_lse, scale, num_splits, q_token_stride,
    q_head_stride, k_page_stride, k_token_stride, k_head_stride, v_page_stride, v_token_stride, v_head_stride,
    table_stride, chosen_stride, out_token_stride, out_head_stride, out_split_stride,
    SIZE: tl.constexpr, ANCHOR: tl.constexpr, SHIFT: tl.constexpr, TOP: tl.constexpr, GROUP: tl.constexpr,
    GROUP_PAD: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr, PAGE: tl.constexpr, BLOCK_N: tl.constexpr,
    SPLIT: tl.constexpr, PDL: tl.constexpr,
):
    """Attend, for one token row, to the tokens of its chosen blocks, then to the tokens after its last whole block."""
    release_dependents(PDL)
    wait_for_inputs(PDL)
    token, kv_head, split = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    low, high = tl.load(first + token).to(tl.int32), tl.load(stop + token).to(tl.int32)
    table = page_table + tl.load(request_of + token).to(tl.int64) * table_stride
    row, dim = tl.arange(0, GROUP_PAD), tl.arange(0, D_PAD)
    head = kv_head * GROUP + row
    query = tl.load(q + token * q_token_stride + head[:, None] * q_head_stride + dim[None, :],
                    mask=(row < GROUP)[:, None] & (dim < D)[None, :], other=0.0)
    whole = tl.maximum(high - ANCHOR, 0) // SIZE
    num_chosen = tl.minimum(tl.maximum(whole - (tl.maximum(low - ANCHOR, 0) + SIZE - 1) // SIZE, 0), TOP) * SIZE
    tail = ANCHOR + whole * SIZE
    tail = tl.maximum(tail, low)
    count = num_chosen + tl.maximum(high - tail, 0)
    size = tl.cdiv(tl.cdiv(count, num_splits), BLOCK_N) * BLOCK_N
    end = tl.minimum(count, (split + 1) * size)
    acc, peak, total = no_sums(GROUP_PAD, D_PAD)
    for start in range(split * size, end, BLOCK_N):
        entry = start + tl.arange(0, BLOCK_N)
        inside = entry < end
        is_chosen = entry < num_chosen
        place = tl.load(chosen + token * chosen_stride + entry // SIZE, mask=inside & is_chosen, other=0).to(tl.int32)
        position = tl.where(is_chosen, ANCHOR + (place - SHIFT) * SIZE + entry % SIZE, tail + entry - num_chosen)
        page = tl.load(table + position // PAGE, mask=inside, other=0).to(tl.int64)
        cell, mask = position % PAGE, inside[:, None] & (dim < D)[None, :]
        key = tl.load(k_cache + (page * k_page_stride + cell * k_token_stride + kv_head * k_head_stride)[:, None]
                      + dim[None, :], mask=mask, other=0.0)
        score = tl.dot(query, tl.trans(key), input_precision="ieee") * (scale * LOG2E)
        score = tl.where(inside[None, :], score, float("-inf"))
        weight, shrink, peak, total = weigh_scores(score, peak, total)
        value = tl.load(v_cache + (page * v_page_stride + cell * v_token_stride + kv_head * v_head_stride)[:, None]
                        + dim[None, :], mask=mask, other=0.0)
        acc = tl.dot(weight.to(value.dtype), value, acc * shrink[:, None], input_precision="ieee")
    divisor = tl.where(total == 0, 1.0, total)
    to = out + token * out_token_stride + head[:, None] * out_head_stride + dim[None, :]
    if SPLIT:
        to += split * out_split_stride
        lse = tl.where(total == 0, float("-inf"), peak + tl.log2(divisor))
        heads = tl.num_programs(1) * GROUP
        tl.store(part_lse + (token * heads + head) * num_splits + split, lse, mask=row < GROUP)
    tl.store(to, (acc / divisor[:, None]).to(out.dtype.element_ty), mask=(row < GROUP)[:, None] & (dim < D)[None, :])


def block_attention(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, contexts: TokenContexts, chosen: torch.Tensor,
    scale: float, blocks: TokenBlocks, *, num_splits: int | None = None, pdl: bool | None = None,
) -> torch.Tensor:
    """Attend to each token row's chosen blocks; see `kernels.token_blocks.block_attention` for the arguments."""
    name, device = "block_attention", q.device
    pdl = uses_pdl(device) if pdl is None else pdl
    require_tensor(name, "q", q, (None, None, None), device, FLOATS)
    check_blocks(q, k_cache, contexts, chosen)
    num_tokens, num_heads, dim = q.shape
    for argument, cache in (("k_cache", k_cache), ("v_cache", v_cache)):
        require_tensor(name, argument, cache, (None, None, None, dim), device, (q.dtype,))
    require(v_cache.shape == k_cache.shape, name, "v_cache", f"has shape {list(v_cache.shape)}, the keys have another")
    page_tokens, num_kv = k_cache.shape[1:3]
    require_tensor(name, "page_table", contexts.page_table, (None, None), device, _INTEGERS)
    for argument in ("request_of", "first", "stop"):
        require_tensor(name, argument, getattr(contexts, argument), (num_tokens,), device, _INTEGERS)
    require_tensor(name, "chosen", chosen, (num_tokens, None), device, _INTEGERS)
    out = torch.empty(num_tokens, num_heads, dim, dtype=q.dtype, device=device)
    if num_tokens == 0:
        return out
    top, block_n = chosen.shape[1], _KEYS[q.element_size()]
    most = cdiv((top + 1) * blocks.size - 1, block_n)
    splits = num_splits or max(1, min(most, 2 * num_sms(device) // (num_tokens * num_kv), MOST_SPLITS))
    made, lse = out, None
    if splits > 1:
        made = torch.empty(num_tokens, num_heads, splits, dim, dtype=torch.float32, device=device)
        lse = torch.empty(num_tokens, num_heads, splits, dtype=torch.float32, device=device)
    strides = (*made.stride()[:2], 0 if lse is None else made.stride(2))
    group = num_heads // num_kv
    _attention_kernel[(num_tokens, num_kv, splits)](
        q, k_cache, v_cache, contexts.page_table, contexts.request_of, contexts.first, contexts.stop, chosen, made,
        made if lse is None else lse, scale, splits, *q.stride()[:2], *k_cache.stride()[:3], *v_cache.stride()[:3],
        contexts.page_table.stride(0), chosen.stride(0), *strides, SIZE=blocks.size, ANCHOR=blocks.anchor,
        SHIFT=blocks.shift, TOP=top, GROUP=group, GROUP_PAD=max(16, next_power_of_two(group)), D=dim,
        D_PAD=max(16, next_power_of_two(dim)), PAGE=page_tokens, BLOCK_N=block_n, SPLIT=lse is not None, PDL=pdl,
        num_warps=4, num_stages=2, **pdl_options(pdl),
    )
    if lse is not None:
        merge_splits(made, lse, out, pdl)
    return out


def exact_block_attention(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, contexts: TokenContexts, chosen: torch.Tensor,
    scale: float, blocks: TokenBlocks, *, pdl: bool | None = None,
) -> torch.Tensor:
    """Compute `block_attention` with the same number of splits for any number of token rows. Every token row has
    programs of its own, so its bits do not depend on other rows."""
    check_blocks(q, k_cache, contexts, chosen)
    parts = [slice(begin, begin + EXACT_ROWS) for begin in range(0, max(1, q.shape[0]), EXACT_ROWS)]
    made = [block_attention(q[rows], k_cache, v_cache, contexts.cut(rows), chosen[rows], scale, blocks,
                            num_splits=EXACT_SPLITS, pdl=pdl) for rows in parts]
    return made[0] if len(made) == 1 else torch.cat(made)
