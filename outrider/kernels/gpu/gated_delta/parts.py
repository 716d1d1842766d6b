"""The structures that the programs of the gated delta rule pass between their functions: a model's sizes, the order of
a request's tokens, a program's part of the state, and the checkpoints to write on the way. `steps.py` builds them."""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from outrider.kernels.gpu.recurrent.step_tensors import next_boundary, save_state
from outrider.kernels.recurrent import NORM_EPS

EPS = tl.constexpr(NORM_EPS)


class DeltaSizes(NamedTuple):
    """A model's sizes, as constants: kernels are compiled for them."""

    conv_dim: tl.constexpr
    heads: tl.constexpr
    out_dim: tl.constexpr
    value_dim: tl.constexpr
    key_dim: tl.constexpr


class RequestPlaces(NamedTuple):
    """The order in which a request's tokens are applied to its state. Places 0 to pending - 1 are accepted drafts of
    earlier steps, which are only now applied (folded) to the stored state; then come known tokens, then drafts."""

    index: tl.tensor
    folded: tl.tensor  # index of place 0 among the inputs of the recurrence
    fresh: tl.tensor  # of place `pending`, less pending
    token_row: tl.tensor  # the same among token rows
    pending: tl.tensor
    known_end: tl.tensor  # the first draft's place
    begin: tl.tensor  # tokens before place 0
    layer_word: tl.tensor  # of a checkpoint, where the layer's state begins
    num_pages: tl.tensor  # of a checkpoint


class ProgramPart(NamedTuple):
    """The value rows of the head that a program computes, with pointers to their inputs and outputs in row 0 of each
    tensor."""

    head: tl.tensor
    first_row: tl.tensor  # of the layer's state, with k dim elements each
    num_rows: tl.tensor
    has_value: tl.tensor  # [tile]
    has_key: tl.tensor  # [k dim]
    element: tl.tensor  # [tile, k dim] of the state from the first row on
    has: tl.tensor  # [tile, k dim]
    q: tl.tensor  # [k dim]
    k: tl.tensor  # [k dim]
    v: tl.tensor  # [tile]
    first_g: tl.tensor
    g: tl.tensor  # the logarithm of the decay; [k dim] where each channel has its own
    beta: tl.tensor
    y: tl.tensor  # [tile]


@triton.jit
def part_of(head, tile, convolved, g, beta, out, sizes, KEY_HEADS: tl.constexpr, TILE: tl.constexpr,
             KEYS: tl.constexpr, DECAYS: tl.constexpr):
    key, value = tl.arange(0, KEYS), tile * TILE + tl.arange(0, TILE)
    has_key, has_value = key < sizes.key_dim, value < sizes.value_dim
    first_q = convolved + head // (sizes.heads // KEY_HEADS) * sizes.key_dim
    first_k = first_q + KEY_HEADS * sizes.key_dim
    y = head * sizes.value_dim + value
    v = convolved + 2 * KEY_HEADS * sizes.key_dim + y
    # From the program's first row on: then a thread's addresses are one and constants.
    element = tl.arange(0, TILE)[:, None] * sizes.key_dim + key[None, :]
    has = has_value[:, None] & has_key[None, :]
    first_g = g + head * DECAYS
    if DECAYS > 1:
        of_g = first_g + key
    else:
        of_g = first_g
    first_row, num_rows = head * sizes.value_dim + tile * TILE, tl.minimum(TILE, sizes.value_dim - tile * TILE)
    return ProgramPart(head, first_row, num_rows, has_value, has_key, element, has, first_q + key, first_k + key, v,
                       first_g, of_g, beta + head, out + y)


@triton.jit
def save_checkpoints(state, seen, request, part, saves, KEY_DIM: tl.constexpr, PAGE_WORDS: tl.constexpr):
    """Write the request's checkpoints that are due after `seen` tokens, if any."""
    save_state(state, seen, request.index, part.first_row, part.num_rows, saves, request.layer_word, request.num_pages,
               KEY_DIM, PAGE_WORDS)


@triton.jit
def next_save_of(seen, request, saves):
    """Return the next checkpoint boundary after `seen` tokens, up to the end of the stored state; -1 if there is
    none."""
    last = request.begin + request.known_end
    found = next_boundary(seen, last + 1, request.index, saves)
    return tl.where(found > last, -1, found)
