"""The gated delta rule over a ragged batch, as one launch per layer: fold accepted drafts, apply known tokens, store
the state, compute drafts. A head decays as a whole, or each of its key channels by itself (KDA).

`kernels/recurrent.py` is the specification. A program has some value rows of one head of one request. It reads its part
of the state once and writes it once, and also writes it to pages where it passes a checkpoint's boundary. Decoding
takes as long as reading and writing the states, if enough reads are in flight. So programs are small, and they load
states before the previous kernel has made the inputs (convolved inputs, gates). The row's tail and window are updated
here, since no other program still reads them. Long runs of known tokens go in chunks: a launch before this one
(`prepare.py`) computes everything that does not need the state, and here the state advances through the chunks
(`scan.py`).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from triton import knobs

from outrider.kernels.gpu.common import (
    cdiv,
    next_power_of_two,
    pdl_options,
    release_dependents,
    require,
    uses_pdl,
    wait_for_inputs,
)
from outrider.kernels.gpu.gated_delta.parts import (
    EPS,
    DeltaSizes,
    RequestPlaces,
    next_save_of,
    part_of,
    save_checkpoints,
)
from outrider.kernels.gpu.gated_delta.prepare import PrepareConfig, first_slot, prepare_chunks
from outrider.kernels.gpu.gated_delta.scan import scan_prepared
from outrider.kernels.gpu.launch.triton_kernel import kernel
from outrider.kernels.gpu.recurrent.step_tensors import (
    LayerTensors,
    StepConfig,
    StepInputs,
    StepTensors,
    check_step,
    clear_dead,
    keep_inputs,
    keep_sizes,
    load_counts,
    load_last_stop,
    load_tail,
    save_args,
)
from outrider.kernels.recurrent import SHORT_RUN, CheckpointTargets

MAX_REGISTERS = 96  # of a walking thread: 21 programs fit a multiprocessor, and nothing spills
_SHORT_RUN = tl.constexpr(SHORT_RUN)


@triton.jit
def _token_inputs(place, end, request, part, sizes, DECAYS: tl.constexpr):
    """Load a token's inputs as the projections and the convolution made them; 0 from place `end` on."""
    is_there = place < end
    index = (place + tl.where(place < request.pending, request.folded, request.fresh)).to(tl.int64)
    row = index * sizes.conv_dim
    q = tl.load(part.q + row, mask=part.has_key & is_there, other=0.0)
    k = tl.load(part.k + row, mask=part.has_key & is_there, other=0.0)
    v = tl.load(part.v + row, mask=part.has_value & is_there, other=0.0)
    if DECAYS > 1:
        g = tl.load(part.g + index * (sizes.heads * DECAYS), mask=part.has_key & is_there, other=0.0)
    else:
        g = tl.load(part.g + index * sizes.heads, mask=is_there, other=0.0)
    beta = tl.load(part.beta + index * sizes.heads, mask=is_there, other=0.0)
    return q, k, v, g, beta


@triton.jit
def _walk(state, begin, end, next_save, cells, request, part, saves, sizes, scale, KEY_DIM: tl.constexpr,
          PAGE_WORDS: tl.constexpr, STORES: tl.constexpr, DECAYS: tl.constexpr):
    """Apply the tokens at places begin to end - 1 in order, each loaded while the one before it is computed. STORES:
    the state is stored where the known tokens end, if the walk passes there. next_save: the first boundary of a
    checkpoint; with PAGE_WORDS of 0 none is written."""
    q, k, v, g, beta = _token_inputs(begin, end, request, part, sizes, DECAYS)
    for place in range(begin, end):
        next_q, next_k, next_v, next_g, next_beta = _token_inputs(place + 1, end, request, part, sizes, DECAYS)
        q = q * (tl.rsqrt(tl.sum(q * q, axis=0) + EPS) * scale)
        k = k * tl.rsqrt(tl.sum(k * k, axis=0) + EPS)
        if DECAYS > 1:
            state = state * tl.exp(g)[None, :]
        else:
            state = state * tl.exp(g)
        error = (v - tl.sum(state * k[None, :], axis=1)) * beta
        state = state + error[:, None] * k[None, :]
        y = tl.sum(state * q[None, :], axis=1)
        at = part.y + (request.token_row + place).to(tl.int64) * sizes.out_dim
        tl.store(at, y.to(part.y.dtype.element_ty), mask=part.has_value & (place >= request.pending))
        if PAGE_WORDS > 0:
            if request.begin + place + 1 == next_save:
                save_checkpoints(state, next_save, request, part, saves, KEY_DIM, PAGE_WORDS)
                next_save = next_save_of(next_save, request, saves)
        if STORES:
            if place + 1 == request.known_end:
                tl.store(cells, state, mask=part.has, eviction_policy="evict_first")
        q, k, v, g, beta = next_q, next_k, next_v, next_g, next_beta
    return state


@kernel(do_not_specialize=["requests", "tokens", "layer_word"])
def _delta_kernel(
    counts, requests, tokens, convolved, g, beta, conv_in, conv_stride, gates, gate_strides, states, tail, window,
    gate_windows, out, chunks, saves, layer_word, num_pages, scale,
    HEADS: tl.constexpr, KEY_HEADS: tl.constexpr, VALUE_DIM: tl.constexpr, KEY_DIM: tl.constexpr, TILE: tl.constexpr,
    KEYS: tl.constexpr, TILES: tl.constexpr, TOKENS: tl.constexpr, CHUNKED: tl.constexpr, DECAYS: tl.constexpr,
    PRECISION: tl.constexpr, Y_PRECISION: tl.constexpr, STAGES: tl.constexpr, PAGE_WORDS: tl.constexpr,
    FOLD_ONLY: tl.constexpr,
    CONV_DIM: tl.constexpr, WIDTH: tl.constexpr, WINDOW: tl.constexpr, PARTS: tl.constexpr,
    CHANNELS: tl.constexpr, TAIL: tl.constexpr, DRAFTS: tl.constexpr, EARLY: tl.constexpr, PDL: tl.constexpr,
):
    """Advance some value rows of one head's state of one request by a step. EARLY: of the tensors read here, kernels
    that may still run write only convolved, g, beta and chunks. Everything else, above all the state, is loaded before
    this kernel waits for them."""
    release_dependents(PDL)
    if not EARLY:
        wait_for_inputs(PDL)
    tile, head, index = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    row, start, stop, computed, known, drafts, pending = load_counts(counts, index, requests)
    last_stop = load_last_stop(counts, requests)
    sizes = DeltaSizes(CONV_DIM, HEADS, HEADS * VALUE_DIM, VALUE_DIM, KEY_DIM)
    part = part_of(head, tile, convolved, g, beta, out, sizes, KEY_HEADS, TILE, KEYS, DECAYS)
    live = tl.where(known > 0, known + drafts, 0)
    request = RequestPlaces(index, index * WINDOW, requests * WINDOW + start - pending, start - pending, pending,
                       pending + known, computed - pending, layer_word, num_pages)
    is_walked = (known > 0) | FOLD_ONLY
    cells = states + (row * (HEADS * VALUE_DIM) + part.first_row) * KEY_DIM + part.element
    # The next step reads the state again, after the states and weights of all other layers: caches cannot keep it.
    state = tl.load(cells, mask=part.has & is_walked, other=0.0, eviction_policy="evict_first")
    kept_tail = load_tail(head * TILES + tile, row, start, known, pending, is_walked, conv_in, conv_stride, tail,
                          window, CONV_DIM, WIDTH, WINDOW, PARTS, CHANNELS, TAIL)
    next_save = -1
    if PAGE_WORDS > 0:
        next_save = next_save_of(request.begin, request, saves)
    if EARLY:
        wait_for_inputs(PDL)
    column = head * VALUE_DIM + tile * TILE + tl.arange(0, TILE)
    clear_dead(out, HEADS * VALUE_DIM, column, part.has_value, index, requests, live, start, stop, last_stop, tokens)
    if is_walked:
        is_long = CHUNKED & (known > _SHORT_RUN)
        end = tl.where(is_long, pending, pending + live)
        state = _walk(state, 0, end, next_save, cells, request, part, saves, sizes, scale, KEY_DIM, PAGE_WORDS,
                      not FOLD_ONLY, DECAYS)
        if CHUNKED:
            if is_long:
                state = scan_prepared(state, first_slot(start, index, TOKENS), request, part, chunks, saves, sizes,
                                      KEY_DIM, PAGE_WORDS, DECAYS, TOKENS, TILE, KEYS, TILES, PRECISION, Y_PRECISION,
                                      STAGES)
                tl.store(cells, state, mask=part.has)
                _walk(state, request.known_end, pending + live, -1, cells, request, part, saves, sizes, scale,
                      KEY_DIM, 0, False, DECAYS)
        if not FOLD_ONLY:
            keep_inputs(
                kept_tail, head * TILES + tile, row, start, known, drafts, conv_in, conv_stride, gates, gate_strides,
                tail, window, gate_windows, CONV_DIM, WIDTH, WINDOW, HEADS, HEADS * DECAYS, 2, PARTS, CHANNELS, TAIL,
                DRAFTS,
            )


class ChunkConfig(NamedTuple):
    """The sizes with which long runs are computed in chunks. They are equal for all batches, because the bits of the
    results depend on them."""

    chunk: int = 16  # tokens, a power of two from 16 on; more tokens need more registers and fewer steps
    stages: int = 3  # of the loop over chunks: two chunks are on their way to shared memory while one is computed
    prepare: PrepareConfig = PrepareConfig(piece=32, num_warps=2)


CHUNKS = ChunkConfig()


def delta_config(value_dim: int, chunked: bool) -> StepConfig:
    """Return the launch configuration. A program that goes token by token is one warp with few value rows: no warp
    waits for another, and a multiprocessor runs many programs, whose states are loaded at the same time. Chunked runs
    use matrix products, which need more rows and several warps. The choice does not depend on the batch, because the
    bits of the results depend on it."""
    return StepConfig(min(32, next_power_of_two(value_dim)), 4) if chunked else StepConfig(
        min(8, next_power_of_two(value_dim)), 1)


def delta_steps(
    step: StepTensors, inputs: StepInputs, layer: LayerTensors, *, num_key_heads: int,
    targets: CheckpointTargets | None = None, chunked: bool = False, fold_only: bool = False,
    config: StepConfig | None = None, chunks: ChunkConfig = CHUNKS, precision: str = "tf32x3",
    y_precision: str = "tf32x3", per_channel: bool = False, follows_inputs: bool = False,
) -> torch.Tensor:
    """Advance the rows of a batch by one step, and return y [tokens, value heads * v dim] in the inputs' dtype; 0 for
    dead and padded token rows. inputs.wide_gates: g (the logarithm of the decay) and beta; neighbouring value heads
    share a key head. per_channel: g has a number for each key channel of a head instead of one for the head. chunked:
    requests with more than SHORT_RUN known tokens go in chunks, in two launches. y_precision: in chunks, the precision
    of products that affect only y. fold_only: the requests have ended, so only checkpoints are written. follows_inputs:
    the launches before this one are `recurrent_inputs` and perhaps `save_tails`, so that states can be loaded while
    these run."""
    name = "delta_steps"
    num_heads, _, num_channels = layer.state.shape[1:]
    decays = num_channels if per_channel else 1
    sizes = check_step(name, step, inputs, layer, targets, gate_sizes=(num_heads * decays, num_heads))
    heads, value_dim, key_dim, device = sizes.heads, sizes.dim, sizes.n, layer.state.device
    ok = num_key_heads > 0 and heads % num_key_heads == 0
    require(ok, name, "num_key_heads", f"is {num_key_heads} for {heads} value heads")
    ok = sizes.conv_dim == 2 * num_key_heads * key_dim + heads * value_dim
    require(ok, name, "inputs.conv_in", f"has {sizes.conv_dim} channels, not those of q, k and v")
    chunk, stages, prepare = chunks
    ok = chunk >= 16 and chunk & (chunk - 1) == 0
    require(ok, name, "chunks", f"have {chunk} tokens, not a power of two from 16 on")
    require(not (chunked and fold_only), name, "chunked", "is set for rows that ended, which have no known tokens")
    out = torch.empty(sizes.tokens, heads * value_dim, dtype=inputs.conv_in.dtype, device=device)
    if sizes.requests == 0:
        return out.zero_()
    tile, num_warps = config or delta_config(value_dim, chunked)
    keys = next_power_of_two(key_dim)
    if chunked:  # products have least sizes
        tile, keys = max(16, tile), max(16, keys)
    num_tiles = cdiv(value_dim, tile)
    saves, layer_word, num_pages, page_words = save_args(targets, step, layer)
    pdl, is_limited = uses_pdl(device), num_warps == 1 and tile <= 8 and not knobs.runtime.interpret
    limit = {"maxnreg": MAX_REGISTERS} if is_limited else {}
    prepared = layer.state  # stands in: without chunks it is not read
    if chunked:
        prepared = prepare_chunks(step.counts, inputs, sizes, num_key_heads=num_key_heads, decays=decays, chunk=chunk,
                                  keys=keys, values=num_tiles * tile, config=prepare, precision=precision, pdl=pdl)
    _delta_kernel[(num_tiles, heads, sizes.requests)](
        step.counts, sizes.requests, sizes.tokens, inputs.convolved, *inputs.wide_gates, inputs.conv_in,
        inputs.conv_in.stride(0), inputs.gates, tuple(gate.stride(0) for gate in inputs.gates), layer.state, layer.tail,
        layer.conv_in, layer.gates, out, prepared, saves, layer_word, num_pages, key_dim**-0.5,
        HEADS=heads, KEY_HEADS=num_key_heads, VALUE_DIM=value_dim, KEY_DIM=key_dim, TILE=tile, KEYS=keys,
        TILES=num_tiles, TOKENS=chunk, CHUNKED=chunked, DECAYS=decays, PRECISION=precision, Y_PRECISION=y_precision,
        STAGES=stages, PAGE_WORDS=page_words, FOLD_ONLY=fold_only,
        **keep_sizes(sizes, heads * num_tiles), EARLY=follows_inputs, PDL=pdl, num_warps=num_warps, **limit,
        **pdl_options(pdl),
    )
    return out
