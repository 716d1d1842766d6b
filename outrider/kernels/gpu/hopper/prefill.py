"""The Hopper kernel of prefill attention and its launch. This file says which kinds of warps there are and what they
share; `attend.py` and `fetch.py` are what they run.

A program stays on its multiprocessor and takes items of work (`items.py`) until none are left. Keys that a query may
not see are masked in the scores. Values beyond a request's own keys are zeroed before they are used.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
import triton.experimental.gluon.language as gl
from triton import knobs
from triton.experimental import gluon
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from outrider.kernels.gpu.attention.core import AttentionShape
from outrider.kernels.gpu.attention.windows import window_kind
from outrider.kernels.gpu.common import next_power_of_two, num_sms, require
from outrider.kernels.gpu.hopper.attend import ROWS, attend
from outrider.kernels.gpu.hopper.fetch import COLUMNS, STRIP, fetch_keys, fetch_values
from outrider.kernels.gpu.hopper.items import barrier
from outrider.kernels.gpu.launch.triton_kernel import TritonKernel

REGISTERS = 168  # of each of the 384 threads, before the kinds of warps share them out
_VARYING = ["fill_to", "num_requests", "num_tiles", "window", "table_stride"]
_INTS = ["page_table", "query_starts", "lengths", "live", "key_starts", "tile_requests", "tile_indices", "counter",
         "sinks"]


@gluon.jit
def make_barriers(number: gl.constexpr, arrivals: gl.constexpr):
    """Make the barriers of a program. Some warps must use each of them to the end, because Triton reuses the memory of
    a barrier that is no longer used. A GPU that resumes a stopped program (for another process, say) restores its
    barriers, and would overwrite what was stored in that memory since."""
    barriers = gl.allocate_shared_memory(gl.int64, [number, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(number):
        mbarrier.init(barriers.index(i), count=arrivals)
    return barriers


@gluon.jit
def _zero_padding(
    out, query_starts, num_requests, fill_to, out_token_stride, out_head_stride,
    GROUP: gl.constexpr, GROUP_PAD: gl.constexpr, D: gl.constexpr, KV_HEADS: gl.constexpr,
):
    """Zero the token rows before `fill_to` that no request owns, because they must not be read as NaN."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    head = gl.arange(0, GROUP_PAD, layout=gl.SliceLayout(1, layout))
    column = gl.arange(0, D, layout=gl.SliceLayout(0, layout))
    zeros = gl.zeros([GROUP_PAD, D], out.dtype.element_ty, layout=layout)
    first = gl.load(query_starts + num_requests)
    for row in range(gl.program_id(0), (fill_to - first) * KV_HEADS, gl.num_programs(0)):
        at = out + (first + row // KV_HEADS).to(gl.int64) * out_token_stride
        heads = row % KV_HEADS * GROUP + head
        gl.store(at + heads[:, None] * out_head_stride + column[None, :], zeros, mask=(head < GROUP)[:, None])


@TritonKernel
@gluon.jit(do_not_specialize=_VARYING, do_not_specialize_on_alignment=_INTS)
def _prefill_kernel(
    q, k_pages, v_pages, page_table, query_starts, lengths, live, key_starts, tile_requests, tile_indices, counter, out,
    sinks, scale, softcap, window, fill_to, num_requests, num_tiles,
    q_token_stride, q_head_stride, table_stride, out_token_stride, out_head_stride,
    GROUP: gl.constexpr, GROUP_PAD: gl.constexpr, D: gl.constexpr, PAGE: gl.constexpr, Q_TILE: gl.constexpr,
    BLOCK_N: gl.constexpr, STAGES: gl.constexpr, SPLIT: gl.constexpr, KV_HEADS: gl.constexpr,
    WINDOW_KIND: gl.constexpr, HAS_SOFTCAP: gl.constexpr, HAS_STARTS: gl.constexpr,
    HAS_SINKS: gl.constexpr, SEARCH: gl.constexpr, PRODUCER_REGS: gl.constexpr, CONSUMER_REGS: gl.constexpr,
):
    dtype: gl.constexpr = q.dtype.element_ty
    tile_layout: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    q_tiles = gl.allocate_shared_memory(dtype, [2, ROWS, D // SPLIT], tile_layout)
    k_tiles = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, D], tile_layout)
    v_tiles = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, D], tile_layout)
    items = gl.allocate_shared_memory(gl.int32, [2, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    # (what, barriers of its slots: it is there, it may be overwritten). Tiles have two readers, items three.
    keys = (k_tiles, make_barriers(STAGES, 1), make_barriers(STAGES, 2))
    values = (v_tiles, make_barriers(STAGES + 1, 1), make_barriers(STAGES, 2))
    queue = (items, make_barriers(2, 1), make_barriers(2, 3))
    if SPLIT > 1:
        layout: gl.constexpr = gl.SwizzledSharedLayout(4, 1, 8, [1, 0])
        exchange = (gl.allocate_shared_memory(gl.float32, [4, ROWS, BLOCK_N], layout), make_barriers(2, 2))
    else:
        exchange = ()  # type: ignore[assignment]
    fence_async_shared()
    barrier()
    if fill_to > 0:  # no variant of its own: this kernel takes seconds to compile
        _zero_padding(out, query_starts, num_requests, fill_to, out_token_stride, out_head_stride, GROUP, GROUP_PAD,
                      D, KV_HEADS)
    tiles = (tile_requests, tile_indices, lengths, live, key_starts, num_requests, num_tiles, window)
    strides = (q_token_stride, q_head_stride, out_token_stride, out_head_stride)
    scaling = (scale, softcap, window)
    gl.warp_specialize(
        [
            (attend, (q, out, query_starts, sinks, tiles, strides, q_tiles, keys, values, exchange, queue, scaling,
                      0, GROUP, D, Q_TILE, BLOCK_N, STAGES, SPLIT, SEARCH, WINDOW_KIND, HAS_STARTS, HAS_SOFTCAP,
                      HAS_SINKS, KV_HEADS)),
            (attend, (q, out, query_starts, sinks, tiles, strides, q_tiles, keys, values, exchange, queue, scaling,
                      1, GROUP, D, Q_TILE, BLOCK_N, STAGES, SPLIT, SEARCH, WINDOW_KIND, HAS_STARTS, HAS_SOFTCAP,
                      HAS_SINKS, KV_HEADS)),
            (fetch_keys, (k_pages, page_table, table_stride, tiles, counter, keys, queue,
                          D, PAGE, Q_TILE, BLOCK_N, STAGES, SEARCH, WINDOW_KIND, HAS_STARTS, KV_HEADS)),
            (fetch_values, (v_pages, page_table, table_stride, tiles, values, queue,
                            D, PAGE, Q_TILE, BLOCK_N, STAGES, SEARCH, WINDOW_KIND, HAS_STARTS, KV_HEADS)),
        ],
        [4, 1, 1],
        [CONSUMER_REGS, PRODUCER_REGS, PRODUCER_REGS],
    )


@dataclass(frozen=True)
class HopperConfig:
    block_n: int  # keys of a tile
    num_stages: int = 2  # tiles of keys, and of values, that shared memory holds
    value_split: int = 1  # groups that share the columns of the same rows
    producer_regs: int = 56  # registers of a thread that fetches; the attending ones get the rest

    @property
    def block_m(self) -> int:
        """The rows of a tile: query tokens times query heads per key/value head."""
        return 128 // self.value_split

    @property
    def consumer_regs(self) -> int:
        return (3 * REGISTERS - self.producer_regs) // 2


CONFIGS = {
    64: HopperConfig(block_n=128, num_stages=3), 128: HopperConfig(block_n=128, num_stages=3),
    256: HopperConfig(block_n=64), 512: HopperConfig(block_n=32, value_split=2),
}


@lru_cache(maxsize=16)
def is_hopper(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) == (9, 0) and not knobs.runtime.interpret


def takes_cache(num_heads: int, k_cache: torch.Tensor) -> bool:
    """Whether the kernel serves this cache [pages, page tokens, kv heads, dim]; values must be laid out like keys."""
    page_size, num_kv_heads, head_dim = k_cache.shape[1:]
    page_stride, token_stride, head_stride, stride = k_cache.stride()
    return (
        is_hopper(k_cache.device) and k_cache.dtype in (torch.bfloat16, torch.float16) and head_dim in CONFIGS
        and num_heads // num_kv_heads <= CONFIGS[head_dim].block_m and page_size >= STRIP.value
        and (head_stride, stride) == (head_dim, 1)
        and page_stride % 8 == token_stride % 8 == k_cache.data_ptr() % 16 == 0
    )


def _describe_pages(cache: torch.Tensor, block_n: int) -> TensorDescriptor:
    """Make a tensor descriptor with which the copy engine (TMA) reads the cache: 64 columns of a page's tokens at a
    time, at most a tile of them."""
    num_pages, page_size, num_heads, dim = cache.shape
    return TensorDescriptor(cache, [num_pages, page_size, num_heads * dim], [cache.stride(0), cache.stride(1), 1],
                            [1, min(page_size, block_n), COLUMNS.value], gl.NVMMASharedLayout(128, 16, rank=3))


def launch_prefill(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, page_table: torch.Tensor,
    query_starts: torch.Tensor, lengths: torch.Tensor, live: torch.Tensor, key_starts: torch.Tensor | None,
    tile_requests: torch.Tensor, tile_indices: torch.Tensor, counter: torch.Tensor, out: torch.Tensor,
    shape: AttentionShape, config: HopperConfig, *, scale: float, softcap: float | None, window: int | None,
    is_chunked: bool, num_tiles: int, tile_queries: int, search: int, fill_padding: bool,
    sinks: torch.Tensor | None = None,
) -> None:
    """Launch the kernel. `prefill_attention` has checked the arguments; tile_requests, tile_indices and search describe
    the tiles."""
    name = "prefill_attention"
    require(scale > 0, name, "scale", f"is {scale}, expected more than 0")
    require(takes_cache(shape.num_heads, k_cache) and k_cache.stride() == v_cache.stride(), name, "tiles",
            "were built for a kernel that does not take this cache")
    _prefill_kernel[(min(num_tiles * shape.num_kv_heads, num_sms(q.device)),)](
        q, _describe_pages(k_cache, config.block_n), _describe_pages(v_cache, config.block_n), page_table,
        query_starts, lengths, live, lengths if key_starts is None else key_starts, tile_requests,
        tile_indices, counter, out, lengths if sinks is None else sinks,
        scale, softcap or 1.0, window or 0, shape.num_tokens if fill_padding else 0, shape.num_requests, num_tiles,
        q.stride(0), q.stride(1), page_table.stride(0), out.stride(0), out.stride(1),
        GROUP=shape.heads_per_kv, GROUP_PAD=next_power_of_two(shape.heads_per_kv), D=shape.head_dim,
        PAGE=shape.page_size, Q_TILE=tile_queries, BLOCK_N=config.block_n, STAGES=config.num_stages,
        SPLIT=config.value_split, KV_HEADS=shape.num_kv_heads, WINDOW_KIND=window_kind(window, is_chunked),
        HAS_SOFTCAP=softcap is not None, HAS_STARTS=key_starts is not None, HAS_SINKS=sinks is not None, SEARCH=search,
        PRODUCER_REGS=config.producer_regs, CONSUMER_REGS=config.consumer_regs, num_warps=4, maxnreg=REGISTERS,
    )
