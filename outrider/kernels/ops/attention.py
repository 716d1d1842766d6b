"""Entries of the table of operations: latent attention with its indexer, and attention to chosen blocks of keys."""

from __future__ import annotations

import torch

from outrider.kernels import latent, latent_inputs, pooled_keys, token_blocks
from outrider.kernels.ops.operation import (
    SIXTEEN_BITS,
    UP_TO_FLOAT32,
    Exactness,
    NotExact,
    Operation,
    triton_kernel,
)

# Latent attention and its indexer

visible_ranges = Operation(
    latent.visible_ranges,
    triton_kernel("outrider.kernels.gpu.latent.inputs:visible_ranges"),
    exact=Exactness.NO_ARITHMETIC,
)
write_latents = Operation(
    latent_inputs.write_latents,
    triton_kernel("outrider.kernels.gpu.latent.inputs:write_latents", UP_TO_FLOAT32),
    exact="outrider.kernels.ops.exact:write_latents",
)
rotate_queries = Operation(
    latent_inputs.rotate_queries,
    triton_kernel("outrider.kernels.gpu.latent.inputs:rotate_queries", UP_TO_FLOAT32),
    exact=Exactness.ROW_BY_ROW,
)
head_products = Operation(
    latent_inputs.head_products,
    triton_kernel("outrider.kernels.gpu.latent.head_products:head_products", UP_TO_FLOAT32),
    exact="outrider.kernels.ops.exact:head_products",
)
enter_latents = Operation(
    latent_inputs.enter_latents,
    triton_kernel("outrider.kernels.gpu.latent.enter_latents:enter_latents", SIXTEEN_BITS,
                  "outrider.kernels.gpu.latent.enter_latents:takes_few"),
    exact=NotExact("it serves few token rows, and more of them are rotated and multiplied one after the other"),
)
choose_positions = Operation(
    latent.choose_positions,
    triton_kernel("outrider.kernels.gpu.index.prefill:choose_positions", SIXTEEN_BITS,
                  "outrider.kernels.gpu.hopper.index:takes_prompts"),
    triton_kernel("outrider.kernels.gpu.index.choice:choose_positions", UP_TO_FLOAT32),
    exact="outrider.kernels.ops.exact:choose_positions",
)
latent_attention = Operation(
    latent.latent_attention,
    triton_kernel("outrider.kernels.gpu.hopper.latent:latent_attention", SIXTEEN_BITS,
                  "outrider.kernels.gpu.hopper.latent:takes_many_rows"),
    triton_kernel("outrider.kernels.gpu.latent.attention:latent_attention", UP_TO_FLOAT32),
    exact="outrider.kernels.ops.exact:latent_attention",
)
dense_latent_attention = Operation(
    latent.dense_latent_attention,
    triton_kernel("outrider.kernels.gpu.hopper.latent:dense_latent_attention", SIXTEEN_BITS,
                  "outrider.kernels.gpu.hopper.latent:takes_many_rows"),
    triton_kernel("outrider.kernels.gpu.latent.attention:dense_latent_attention", UP_TO_FLOAT32),
    exact="outrider.kernels.ops.exact:dense_latent_attention",
)
latent_values = Operation(
    latent.latent_values,
    triton_kernel("outrider.kernels.gpu.latent.values:latent_values", SIXTEEN_BITS,
                  "outrider.kernels.gpu.latent.values:takes_few"),
    exact=NotExact("it serves few token rows, and more of them attend and are multiplied one after the other"),
)

# Chosen blocks

write_block_keys = Operation(
    token_blocks.write_block_keys,
    triton_kernel("outrider.kernels.gpu.index.token_blocks:write_block_keys", UP_TO_FLOAT32),
    exact=Exactness.ROW_BY_ROW,
)
write_pooled_keys = Operation(
    pooled_keys.write_pooled_keys,
    triton_kernel("outrider.kernels.gpu.index.pooled_keys:write_pooled_keys", UP_TO_FLOAT32),
    exact="outrider.kernels.ops.exact:write_pooled_keys",
)


def _chosen_of(contexts: latent.TokenContexts, chosen: torch.Tensor, *_: object) -> torch.Tensor:
    return chosen


list_blocks = Operation(
    pooled_keys.list_blocks,
    triton_kernel("outrider.kernels.gpu.index.pooled_keys:list_blocks"),
    subject=_chosen_of, exact=Exactness.NO_ARITHMETIC,
)
write_keys_values = Operation(
    token_blocks.write_keys_values,
    triton_kernel("outrider.kernels.gpu.pages.cache_write:cache_write", UP_TO_FLOAT32),
    exact=Exactness.ROW_BY_ROW,
)
block_attention = Operation(
    token_blocks.block_attention,
    triton_kernel("outrider.kernels.gpu.index.token_blocks:block_attention", UP_TO_FLOAT32),
    exact="outrider.kernels.ops.exact:block_attention",
)
