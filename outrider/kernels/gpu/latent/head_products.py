"""Products of every head of token rows with the head's own matrix: queries into the latent space, and values out of it.

Each program computes some outputs of one head for a tile of token rows. Inputs, weights and outputs may be strided, so
that both directions use the same stored weight, and results are written where the next kernel reads them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from outrider.kernels.gpu.common import (
    FLOATS,
    add_product,
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

FEW_TOKENS = 16  # up to here a program reads its whole weight before it waits for token rows
MAX_WHOLE = 512  # inputs of a program that takes all of them


@triton.jit
def product_tile(
    x, weight, out, head, column, token, num_tokens, x_token_stride, x_head_stride, weight_head_stride,
    weight_out_stride, weight_in_stride, out_token_stride, out_head_stride,
    K: tl.constexpr, N: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):
    """Compute some outputs (columns) of one head for some token rows. Waits for the previous kernel."""
    own = weight + head * weight_head_stride
    x_row = x + token.to(tl.int64)[:, None] * x_token_stride + head * x_head_stride
    acc = tl.zeros([BLOCK_T, BLOCK_N], dtype=tl.float32)
    if K <= BLOCK_K:
        # The weight is read while the kernel before this one still runs.
        k = tl.arange(0, BLOCK_K)
        w = tl.load(own + k[:, None] * weight_in_stride + column[None, :] * weight_out_stride,
                    mask=(k < K)[:, None] & (column < N)[None, :], other=0.0)
        wait_for_inputs(PDL)
        value = tl.load(x_row + k[None, :], mask=(token < num_tokens)[:, None] & (k < K)[None, :], other=0.0)
        acc = tl.dot(value, w, acc, input_precision="ieee")
    else:
        wait_for_inputs(PDL)
        for start in range(0, K, BLOCK_K):
            k = start + tl.arange(0, BLOCK_K)
            value = tl.load(x_row + k[None, :], mask=(token < num_tokens)[:, None] & (k < K)[None, :], other=0.0)
            w = tl.load(own + k[:, None] * weight_in_stride + column[None, :] * weight_out_stride,
                        mask=(k < K)[:, None] & (column < N)[None, :], other=0.0)
            acc = add_product(acc, value, w)
    to = out + token.to(tl.int64)[:, None] * out_token_stride + head * out_head_stride + column[None, :]
    tl.store(to, acc.to(out.dtype.element_ty), mask=(token < num_tokens)[:, None] & (column < N)[None, :])


@kernel(do_not_specialize=["num_tokens"])
def _head_products_kernel(
    x, weight, out, num_tokens, x_token_stride, x_head_stride, weight_head_stride, weight_out_stride, weight_in_stride,
    out_token_stride, out_head_stride,
    K: tl.constexpr, N: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):
    release_dependents(PDL)
    column = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    token = tl.program_id(2) * BLOCK_T + tl.arange(0, BLOCK_T)
    product_tile(x, weight, out, tl.program_id(0).to(tl.int64), column, token, num_tokens, x_token_stride,
                 x_head_stride, weight_head_stride, weight_out_stride, weight_in_stride, out_token_stride,
                 out_head_stride, K, N, BLOCK_T, BLOCK_N, BLOCK_K, PDL)


@dataclass(frozen=True)
class ProductConfig:
    """Token rows, outputs and inputs per tile, and warps."""

    block_t: int
    block_n: int
    block_k: int
    num_warps: int


def product_config(num_tokens: int, n: int, k: int, itemsize: int) -> ProductConfig:
    """Return the tile for these sizes, measured for 16 bits on an H200."""
    if num_tokens > FEW_TOKENS or itemsize > 2:
        return exact_product_config(num_tokens, n, k, itemsize)
    block_k = min(MAX_WHOLE, max(16, next_power_of_two(k)))
    return ProductConfig(16, min(64, max(16, next_power_of_two(n))), block_k, 8 if block_k > 256 else 4)


def exact_product_config(num_tokens: int, n: int, k: int, itemsize: int) -> ProductConfig:
    """Return the tile of exact mode, whose inputs per step do not depend on the number of token rows."""
    if num_tokens <= 1024:  # enough programs for all multiprocessors
        block_t, block_n, warps = min(64, max(16, next_power_of_two(num_tokens))), 64, 4
    else:
        block_t, block_n, warps = 128, 128, 8
    if itemsize > 2:
        block_t, block_n = min(block_t, 32), 32
    block_k = min(128 if itemsize <= 2 else 64, max(16, next_power_of_two(k)))
    return ProductConfig(block_t, min(block_n, max(16, next_power_of_two(n))), block_k, warps)


def head_products(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, *, config: ProductConfig | None = None,
                  pdl: bool | None = None) -> None:
    """Multiply each head of the token rows with its own matrix; see `kernels.latent_inputs.head_products` for the
    arguments."""
    name, device = "head_products", x.device
    pdl = uses_pdl(device) if pdl is None else pdl
    require_tensor(name, "x", x, (None, None, None), device, FLOATS)
    num_tokens, num_heads, k = x.shape
    require_tensor(name, "weight", weight, (num_heads, None, k), device, (x.dtype,), inner_contiguous=0)
    n = weight.shape[1]
    require(1 in weight.stride()[1:], name, "weight", f"has strides {weight.stride()}, expected rows or columns packed")
    require_tensor(name, "out", out, (num_tokens, num_heads, n), device, (x.dtype,))
    if num_tokens == 0:
        return
    config = config or product_config(num_tokens, n, k, x.element_size())
    _head_products_kernel[(num_heads, cdiv(n, config.block_n), cdiv(num_tokens, config.block_t))](
        x, weight, out, num_tokens, x.stride(0), x.stride(1), *weight.stride(), out.stride(0), out.stride(1), K=k, N=n,
        BLOCK_T=config.block_t, BLOCK_N=config.block_n, BLOCK_K=config.block_k, PDL=pdl, num_warps=config.num_warps,
        num_stages=3, **pdl_options(pdl),
    )


def exact_head_products(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> None:
    """Compute `head_products` with the same chain of additions for every number of token rows."""
    config = exact_product_config(x.shape[0], weight.shape[1], x.shape[2], x.element_size())
    head_products(x, weight, out, config=config)
