"""Merging of the splits of decode attention: each program stores the result of its split, and the program that ends
last merges all results in the order of the splits. Other kernels also use the counters that tell which program is
last."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from outrider.kernels.gpu.attention.core import no_sums

MIN_COUNTERS = 1 << 16  # tiles that may wait for their last split, at least


@triton.jit
def tile_counter(counters, request, kv_head, tile, num_tiles):
    """Return the counter of a tile's finished programs. Axis 0 of the grid must be the key/value heads."""
    return counters + (request * tl.num_programs(0) + kv_head) * num_tiles + tile


@triton.jit
def arrive(counter, num_active):
    """Count this program at the tile's counter. Returns whether all other splits of the tile have stored their parts,
    which can then be read. The last program resets the counter to 0."""
    tl.debug_barrier()  # every thread's part is stored before one of them says so
    is_last = tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") == num_active - 1
    if is_last:
        tl.store(counter, 0)
    return is_last


@triton.jit
def store_part(part_out, part_lse, at, acc, peak, total, is_query, D_PAD: tl.constexpr):
    """Store the result of one split for each row at `at`: the weighted mean of the values, and the logarithm of the sum
    of weights."""
    divisor = tl.where(total > 0, total, 1.0)
    dim = tl.arange(0, D_PAD)
    tl.store(part_out + at[:, None] * D_PAD + dim[None, :], acc / divisor[:, None], mask=is_query[:, None])
    lse = tl.where(total > 0, peak + tl.log2(divisor), float("-inf"))
    tl.store(part_lse + at, lse, mask=is_query)


@triton.jit
def _part(part_out, part_lse, at, exists, D_PAD: tl.constexpr):
    """Load (logarithm of the sum of weights, values) of a split. Another multiprocessor wrote them, so they are read
    from the L2 cache, which all multiprocessors share."""
    lse = tl.load(part_lse + at, mask=exists, other=float("-inf"), cache_modifier=".cg")
    value = tl.load(part_out + at[:, None] * D_PAD + tl.arange(0, D_PAD)[None, :], mask=exists[:, None], other=0.0,
                    cache_modifier=".cg")
    return lse, value


@triton.jit
def _add_part(acc, peak, total, lse, value):
    new_peak = tl.maximum(peak, lse)
    # Before any key was seen the peak is -inf: subtract 0 instead, as -inf minus -inf is NaN.
    base = tl.where(new_peak == float("-inf"), 0.0, new_peak)
    weight, shrink = tl.exp2(lse - base), tl.exp2(peak - base)
    return acc * shrink[:, None] + weight[:, None] * value, new_peak, total * shrink + weight


@triton.jit
def merge_parts(
    part_out, part_lse, part, is_query, num_active, most_active, BLOCK_M: tl.constexpr, D_PAD: tl.constexpr
):
    """Return (weighted values, peak, total) over all splits of each row, merged in order. num_active: splits of the
    tile or of each row; most_active: the most of any row. Two parts are loaded ahead."""
    acc, peak, total = no_sums(BLOCK_M, D_PAD)
    for split in range(0, most_active, 2):
        exists, next_exists = is_query & (split < num_active), is_query & (split + 1 < num_active)
        lse, value = _part(part_out, part_lse, part + split, exists, D_PAD)
        next_lse, next_value = _part(part_out, part_lse, part + split + 1, next_exists, D_PAD)
        acc, peak, total = _add_part(acc, peak, total, lse, value)
        acc, peak, total = _add_part(acc, peak, total, next_lse, next_value)
    return acc, peak, total


_counters_of: dict[tuple[torch.device, int], torch.Tensor] = {}  # for ever: graphs hold their addresses


def counters_for(device: torch.device, size: int) -> torch.Tensor:
    """Return counters that are 0 before and after every launch. All launches on a device share them and must not
    overlap."""
    if (device, size) not in _counters_of:
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise RuntimeError("decode_attention: run it once before it is captured in a graph, because its counters "
                               "must be allocated outside the graph")
        with torch.inference_mode(False):  # they stay, and are changed in whatever mode comes later
            _counters_of[device, size] = torch.zeros(size, dtype=torch.int32, device=device)
    return _counters_of[device, size]


def prepare_counters(device: torch.device) -> None:
    """Allocate the counters for all usual launches now, so that none is allocated during graph capture."""
    counters_for(device, MIN_COUNTERS)
