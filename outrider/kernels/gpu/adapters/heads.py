"""LoRA adapters of MLA's expansion of latents (kv_b_proj), head by head: one launch multiplies with both low-rank
factors. `kernels/adapter_products.py` is the specification.

For a token row and head, the product with the first factor has as many numbers as the adapter's rank, so it stays
inside the program. Sums are over whole heads, so a token row has the same bits whatever rows are beside it. Token rows
are processed in tiles, sorted by adapter slot. If a tile has several slots, several programs divide them, and each
takes its slots one after the other. A program without a slot ends at once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from outrider.kernels.adapter_products import HeadColumns
from outrider.kernels.delta_tables import ALIGNMENT, NUM_PLACES, DeltaTables, RowSlots
from outrider.kernels.gpu.adapters.linear import TILE, require_tables
from outrider.kernels.gpu.common import (
    FLOATS,
    cdiv,
    next_power_of_two,
    pdl_options,
    release_dependents,
    require,
    require_tensor,
    uses_pdl,
    wait_for_inputs,
)
from outrider.kernels.gpu.launch.triton_kernel import kernel

_BLOCK_K, _BLOCK_N = 128, 128
# Programs that share the slots of a tile, up to so many token rows of a step, and the most programs that a launch gets
# by that. Programs without a slot take time, too.
_SHARES = ((1, 1), (2, 2), (4, 4), (16, 8), (64, 4), (256, 2))
_MAX_SHARED = 1024


@triton.jit
def without_largest(slot, count):
    """Return the adapter slots of a tile's rows, with -1 in place of the `count` largest distinct slots."""
    for _ in range(count):
        slot = tl.where(slot == tl.max(slot, axis=0), -1, slot)
    return slot


@triton.jit
def own_slots(sorted_slots, place_of_row, M, share):
    """Return the adapter slots of a tile's rows; the program begins with the largest. A slot is negative if the row has
    no adapter, or if a program with a lower number serves that slot first."""
    slot = tl.load(sorted_slots + place_of_row, mask=place_of_row < M, other=-1)
    return without_largest(slot, tl.program_id(0) % share)


@kernel(do_not_specialize=["M", "share", "target", "num_targets"])
def _head_kernel(
    x, out, numbers, places, scales, sorted_slots, order, x_stride, x_head, out_stride, out_head, M, share,
    target, num_targets, num_columns, head_columns, first_column, K: tl.constexpr, N: tl.constexpr,
    INTO_LATENTS: tl.constexpr, TILE: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_N: tl.constexpr, PLACES: tl.constexpr,
    ALIGNMENT: tl.constexpr, PDL: tl.constexpr,
):
    """Add the adapters' low-rank products of one head to a tile of token rows. num_columns: columns of the second
    factor, of all heads. first_column: where the columns to use begin in each head."""
    release_dependents(PDL)
    lane = tl.arange(0, TILE)
    place_of_row = tl.program_id(0) // share * TILE + lane
    head = tl.program_id(1)
    token = tl.load(order + place_of_row, mask=place_of_row < M, other=0)
    slot = own_slots(sorted_slots, place_of_row, M, share)
    own_columns = head * head_columns + first_column
    feature = tl.program_id(2) * BLOCK_N + tl.arange(0, BLOCK_N)
    x_at = x + token[:, None] * x_stride + head * x_head
    out_at = out + token[:, None] * out_stride + head * out_head + feature[None, :]
    current = tl.max(slot, axis=0)
    while current >= 0:
        is_own = slot == current
        place = places + (current * num_targets + target) * PLACES
        a = numbers + tl.multiple_of(tl.load(place), ALIGNMENT)
        b = numbers + tl.multiple_of(tl.load(place + 1), ALIGNMENT) + own_columns
        rank = tl.load(place + 2)
        scale = tl.load(scales + current * num_targets + target)
        wait_for_inputs(PDL)
        if rank > 0:
            inside = is_own[:, None] & (feature < N)[None, :]
            acc = tl.zeros([TILE, BLOCK_N], dtype=tl.float32)
            for block in range(0, rank, TILE):
                in_rank = block + lane < rank
                if INTO_LATENTS:
                    first_at, second_at = b + (block + lane)[:, None] * num_columns, a + (block + lane)[:, None] * N
                else:
                    first_at, second_at = a + (block + lane)[:, None] * K, b + (block + lane)[:, None] * num_columns
                inner = tl.zeros([TILE, TILE], dtype=tl.float32)
                for start in tl.static_range(0, K, BLOCK_K):
                    column = start + tl.arange(0, BLOCK_K)
                    value = tl.load(x_at + column[None, :], mask=is_own[:, None] & (column < K)[None, :], other=0.0)
                    first = tl.load(first_at + column[None, :], mask=in_rank[:, None] & (column < K)[None, :],
                                    other=0.0)
                    inner = tl.dot(value, tl.trans(first), inner, input_precision="ieee")
                second = tl.load(second_at + feature[None, :], mask=in_rank[:, None] & (feature < N)[None, :],
                                 other=0.0)
                acc = tl.dot(inner.to(second.dtype), second, acc, input_precision="ieee")
            before = tl.load(out_at, mask=inside, other=0.0).to(tl.float32)
            tl.store(out_at, (before + scale * acc).to(out.dtype.element_ty), mask=inside)
        slot = without_largest(slot, share)
        current = tl.max(slot, axis=0)
    wait_for_inputs(PDL)


def add_head_adapters(x: torch.Tensor, out: torch.Tensor, rows: RowSlots, tables: DeltaTables, target: int,
                      columns: HeadColumns, into_latents: bool, *, pdl: bool | None = None) -> None:
    """Add the adapters' low-rank products to keys or values of each head; see
    `kernels.adapter_products.add_head_adapters` for the arguments."""
    pdl = uses_pdl(x.device) if pdl is None else pdl
    name, (num_tokens, num_heads, num_inputs) = "add_head_adapters", x.shape
    require_tensor(name, "x", x, (num_tokens, num_heads, None), x.device, FLOATS)
    require_tensor(name, "out", out, (num_tokens, num_heads, None), x.device, (x.dtype,))
    require_tables(name, rows, tables, num_tokens, x)
    require(target < len(tables.bounds), name, "target", "is beyond the tables")
    inner = num_inputs if into_latents else out.shape[2]
    require(columns.width == inner, name, "columns", f"are {columns.width} of a head, whose rows have {inner}")
    if not num_tokens:
        return
    num_outputs = out.shape[2]
    block_k, block_n = (min(most, max(TILE, next_power_of_two(size)))
                        for most, size in ((_BLOCK_K, num_inputs), (_BLOCK_N, num_outputs)))
    blocks = cdiv(num_outputs, block_n)
    share = _share_of(num_tokens, num_heads * blocks, len(tables.scales))
    _head_kernel[(cdiv(num_tokens, TILE) * share, num_heads, blocks)](
        x, out, tables.numbers, tables.places, tables.scales, rows.sorted_slots, rows.order, x.stride(0), x.stride(1),
        out.stride(0), out.stride(1), num_tokens, share, target, len(tables.bounds), num_heads * columns.per_head,
        columns.per_head, columns.first, K=num_inputs, N=num_outputs, INTO_LATENTS=into_latents, TILE=TILE,
        BLOCK_K=block_k, BLOCK_N=block_n, PLACES=NUM_PLACES, ALIGNMENT=ALIGNMENT, PDL=pdl, num_warps=4, num_stages=1,
        **pdl_options(pdl))


def _share_of(num_rows: int, programs: int, num_slots: int) -> int:
    """Return how many programs divide the adapter slots of a tile, given how many programs there are already. This
    affects only speed: results have the same bits for every number."""
    share = next((share for most, share in _SHARES if num_rows <= most), 1)
    share = min(share, next_power_of_two(num_slots))
    while share > 1 and cdiv(num_rows, TILE) * programs * share > _MAX_SHARED:
        share //= 2
    return share
