"""Tiles of pairs (token row, chosen expert), each tile for one expert. In a small batch a program searches the ids for
its pairs; otherwise the pairs are sorted first. Nothing is read on the host."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from outrider.kernels.gpu.common import pdl_options, release_dependents, require_tensor, wait_for_inputs
from outrider.kernels.gpu.launch.triton_kernel import kernel

FEW_PAIRS = 128  # up to here every program looks through all ids; beyond, sorting them once is cheaper
_CHUNK, _CHUNK_OF_MANY = (2048, 4), (8192, 8)  # ids that a sorting program looks at together, and its warps
_MANY_PAIRS = 1 << 14


@triton.jit
def find_few_pairs(ids, first, P, PAIRS: tl.constexpr, BLOCK_M: tl.constexpr):
    """Return the tile that begins with pair `first`: (expert, pairs [BLOCK_M], which of them exist, whether a tile
    begins here). The pairs of an expert are tiled in order, and a tile begins at every BLOCK_M-th of them."""
    pair = tl.arange(0, PAIRS)
    expert = tl.load(ids + first)
    same = tl.load(ids + pair, mask=pair < P, other=-1) == expert
    before = tl.sum((same & (pair < first)).to(tl.int32), axis=0)
    rank = tl.cumsum(same.to(tl.int32), axis=0) - 1 - before
    here = same[None, :] & (rank[None, :] == tl.arange(0, BLOCK_M)[:, None])
    pairs = tl.sum(tl.where(here, pair[None, :], 0), axis=1)
    return expert, pairs, tl.sum(here.to(tl.int32), axis=1) > 0, before % BLOCK_M == 0


@triton.jit
def sorted_tiles(ends, first_expert, E, EXPERTS: tl.constexpr, BLOCK_M: tl.constexpr, TALL_M: tl.constexpr):
    """Divide the sorted pairs of E experts from `first_expert` on into tiles, expert by expert: one tile for up to
    BLOCK_M pairs, else tiles of TALL_M. Returns, for each expert, the end of its tiles, their number, the positions
    where its pairs start and end, and the size of its tiles."""
    index = tl.arange(0, EXPERTS)
    listed = ends + first_expert + index
    start = tl.load(listed - 1, mask=(first_expert + index > 0) & (index < E), other=0)
    end = tl.load(listed, mask=index < E, other=0)
    size = tl.where(end - start > BLOCK_M, TALL_M, BLOCK_M)
    tiles = tl.where(index < E, (end - start + size - 1) // size, 0)
    return tl.cumsum(tiles, axis=0), tiles, start, end, size


@triton.jit
def find_sorted_tile(tile, tiles_end, tiles, start, end, size):
    """Return (expert, positions where the pairs of this tile start and end), from what `sorted_tiles` returned."""
    expert = tl.sum((tiles_end <= tile).to(tl.int32), axis=0)
    mine = tl.arange(0, tiles.shape[0]) == expert
    first = tl.sum(tl.where(mine, start + (tile - tiles_end + tiles) * size, 0), axis=0)
    last = tl.sum(tl.where(mine, tl.minimum(end, start + (tile - tiles_end + tiles + 1) * size), 0), axis=0)
    return expert.to(tl.int64), first, last


@triton.jit
def find_sorted_pairs(order, ends, tile, first_expert, E, EXPERTS: tl.constexpr, BLOCK_M: tl.constexpr):
    """Do what `find_few_pairs` does, for sorted pairs: return the tile with this number. Tiles are numbered expert by
    expert over E experts from `first_expert` on; a number may lie past the last tile."""
    tiles_end, tiles, start, end, size = sorted_tiles(ends, first_expert, E, EXPERTS, BLOCK_M, BLOCK_M)
    expert, first, last = find_sorted_tile(tile, tiles_end, tiles, start, end, size)
    row = first + tl.arange(0, BLOCK_M)
    exists = row < last
    return expert, tl.load(order + row, mask=exists, other=0), exists, expert < E


@kernel(do_not_specialize=["P"])
def _sort_kernel(ids, order, place, ends, P, CHUNK: tl.constexpr, PDL: tl.constexpr):
    """Each program serves one expert: it counts the pairs of lower experts, then lists its own pairs after those, in
    order."""
    release_dependents(PDL)
    wait_for_inputs(PDL)
    expert = tl.program_id(0)
    index = tl.arange(0, CHUNK)
    lower = 0
    for start in range(0, P, CHUNK):
        inside = start + index < P
        lower += tl.sum(((tl.load(ids + start + index, mask=inside, other=0) < expert) & inside).to(tl.int32), axis=0)
    for start in range(0, P, CHUNK):
        pair = start + index
        mine = tl.load(ids + pair, mask=pair < P, other=-1) == expert
        position = lower + tl.cumsum(mine.to(tl.int32), axis=0) - 1
        tl.store(order + position, pair, mask=mine)
        tl.store(place + pair, position, mask=mine)
        lower += tl.sum(mine.to(tl.int32), axis=0)
    tl.store(ends + expert, lower)


@dataclass(frozen=True)
class Pairs:
    """The pairs sorted by expert; pairs of one expert keep their order."""

    order: torch.Tensor  # [pairs] int32, the pair at each position
    place: torch.Tensor  # [pairs] int32, the position of each pair
    ends: torch.Tensor  # [experts] int32, the position after each expert's last pair


def sort_pairs(ids: torch.Tensor, num_experts: int, *, pdl: bool = False) -> Pairs:
    """Sort the pairs of ids [tokens, k] int64, packed; every id must be below num_experts."""
    require_tensor("sort_pairs", "ids", ids, (None, None), ids.device, (torch.int64,), inner_contiguous=2)
    order = torch.empty(ids.numel(), dtype=torch.int32, device=ids.device)
    place = torch.empty_like(order)
    ends = torch.empty(num_experts, dtype=torch.int32, device=ids.device)
    chunk, num_warps = _CHUNK if ids.numel() <= _MANY_PAIRS else _CHUNK_OF_MANY
    _sort_kernel[(num_experts,)](
        ids, order, place, ends, ids.numel(), CHUNK=chunk, PDL=pdl, num_warps=num_warps, **pdl_options(pdl)
    )
    return Pairs(order, place, ends)


def max_tiles(num_pairs: int, num_experts: int, block_m: int) -> int:
    """Return the most tiles that any choice of experts needs: one for each chosen expert's first pair, and the rest in
    full tiles."""
    taken = min(num_pairs, num_experts)
    return taken + (num_pairs - taken) // block_m
