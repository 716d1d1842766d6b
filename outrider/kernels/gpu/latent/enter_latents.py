"""Queries of few token rows before latent attention, in one launch: multiplied into the latent space, and rotated.

Both parts read the same product and write to different places, so each program does one or the other.
"""

from __future__ import annotations

import torch
import triton.language as tl

from outrider.kernels.gpu.common import (
    cdiv,
    next_power_of_two,
    pdl_options,
    release_dependents,
    require_tensor,
    uses_pdl,
    wait_for_inputs,
)
from outrider.kernels.gpu.latent.head_products import FEW_TOKENS, MAX_WHOLE, product_config, product_tile
from outrider.kernels.gpu.latent.inputs import rotate_part, rotation_launch
from outrider.kernels.gpu.launch.triton_kernel import kernel
from outrider.kernels.latent_inputs import RopeRows


@kernel(do_not_specialize=["num_tokens"], do_not_specialize_on_alignment=["positions"])
def _enter_latents_kernel(
    queries, positions, table, q, index_q, max_len, in_stride, q_token_stride, q_head_stride, weight, num_tokens,
    num_parts, weight_head_stride, weight_out_stride, weight_in_stride,
    HEADS: tl.constexpr, NOPE: tl.constexpr, L: tl.constexpr, ROT: tl.constexpr, HALF_PAD: tl.constexpr,
    INDEX_HEADS: tl.constexpr, D: tl.constexpr, REST_PAD: tl.constexpr, IN_PAIRS: tl.constexpr,
    INDEX_FIRST: tl.constexpr, INDEX_PAIRS: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PDL: tl.constexpr,
):
    """The first programs compute some latent columns of a head for all token rows; the others rotate a part of a token
    row."""
    release_dependents(PDL)
    BLOCKS: tl.constexpr = (L + BLOCK_N - 1) // BLOCK_N
    program = tl.program_id(0)
    if program < HEADS * BLOCKS:
        column = program % BLOCKS * BLOCK_N + tl.arange(0, BLOCK_N)
        product_tile(queries, weight, q, (program // BLOCKS).to(tl.int64), column, tl.arange(0, BLOCK_T), num_tokens,
                     in_stride, NOPE + ROT, weight_head_stride, weight_out_stride, weight_in_stride, q_token_stride,
                     q_head_stride, NOPE, L, BLOCK_T, BLOCK_N, BLOCK_K, PDL)
    else:
        wait_for_inputs(PDL)
        part = program - HEADS * BLOCKS
        rotate_part(queries, positions, table, q, index_q, (part // num_parts).to(tl.int64), part % num_parts, max_len,
                    in_stride, q_token_stride, q_head_stride, HEADS, NOPE, L, ROT, HALF_PAD, INDEX_HEADS, D, REST_PAD,
                    IN_PAIRS, INDEX_FIRST, INDEX_PAIRS, BLOCK_H)


def enter_latents(
    queries: torch.Tensor, rope: RopeRows, q: torch.Tensor, to_latent: torch.Tensor, index_q: torch.Tensor | None,
    index_in_pairs: bool, *, pdl: bool | None = None,
) -> None:
    """Project the queries of few token rows into the latent space and rotate them; see
    `kernels.latent_inputs.enter_latents` for the arguments. Accepts the calls for which `takes_few` is true."""
    name, pdl = "enter_latents", uses_pdl(queries.device) if pdl is None else pdl
    num_heads, latent, nope = to_latent.shape
    num_tokens = queries.shape[0]
    parts, args, options = rotation_launch(name, queries, rope, q, nope, index_q, index_in_pairs)
    require_tensor(name, "to_latent", to_latent, (q.shape[1], options["L"], nope), queries.device, (queries.dtype,),
                   inner_contiguous=0)
    config = product_config(num_tokens, latent, nope, queries.element_size())
    _enter_latents_kernel[(num_heads * cdiv(latent, config.block_n) + num_tokens * parts,)](
        *args, to_latent, num_tokens, parts, *to_latent.stride(), **options, BLOCK_T=config.block_t,
        BLOCK_N=config.block_n, BLOCK_K=max(config.block_k, next_power_of_two(nope)), PDL=pdl,
        num_warps=config.num_warps, num_stages=3, **pdl_options(pdl),
    )


def takes_few(queries: torch.Tensor, rope: RopeRows, q: torch.Tensor, to_latent: torch.Tensor,
              index_q: torch.Tensor | None, index_in_pairs: bool) -> bool:
    """Whether token rows are few enough for one tile of products, and heads narrow enough for that tile."""
    return 0 < queries.shape[0] <= FEW_TOKENS and to_latent.shape[2] <= MAX_WHOLE
