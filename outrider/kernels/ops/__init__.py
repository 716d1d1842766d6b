"""The table of operations: each has a torch reference, which defines it, and kernels that carry it out.

A row names the reference, then kernels in the order in which they are asked, each with the dtypes that it serves and
a condition on its arguments (`takes`). Native code serves the CPU and Triton a GPU. Operations are called like their
references: `ops.rms_norm(x, weight, eps)`. Other packages add rows for operations of their own.

The column `exact` is the one place that says how an operation keeps its bits in exact mode: by itself, by another
operation (those of products are in `exact.py`), or not at all.

Rows are in one file for each kind of operation; `__all__` lists them by file.
"""

from __future__ import annotations

from outrider.kernels.ops.adapters import (
    add_adapter_embeddings,
    add_adapters,
    add_adapters_gated,
    add_head_adapters,
    mix_adapted_experts,
    reduce_adapters,
    sort_slots,
)
from outrider.kernels.ops.attention import (
    choose_positions,
    dense_latent_attention,
    enter_latents,
    head_products,
    latent_attention,
    latent_values,
    list_stretches,
    paged_attention,
    rope_write,
    rotate_queries,
    stretch_attention,
    visible_ranges,
    write_keys_values,
    write_latents,
    write_pooled_keys,
    write_stretch_keys,
)
from outrider.kernels.ops.coded import (
    arrange_codes,
    scaled_experts,
    scaled_gated,
    scaled_linear,
    scaled_rows,
    scaled_wide,
)
from outrider.kernels.ops.drafting import (
    find_ngram,
    forget_pages,
    join_embedding,
    plan_block_passes,
    plan_draft_passes,
    plan_first_slots,
    plan_reading_pass,
    take_rows,
)
from outrider.kernels.ops.elements import (
    add_rms_norm,
    cap_logits,
    gated,
    gated_norm,
    gelu_scale,
    gelu_tanh_mul,
    limited_silu_mul,
    norm_add_norm,
    relu2,
    rms_norm,
    sigmoid_scale,
    silu_mul,
)
from outrider.kernels.ops.expert_products import experts, experts_with_shared, route
from outrider.kernels.ops.operation import (
    BFLOAT16,
    FLOAT32,
    SIXTEEN_BITS,
    UP_TO_FLOAT32,
    Exactness,
    Kernel,
    NotExact,
    Operation,
    has_native,
    has_triton,
    native_kernel,
    operations,
    triton_kernel,
    using,
)
from outrider.kernels.ops.products import gated_linear, linear, linear_add, linear_wide, prepare_linear, relu2_linear
from outrider.kernels.ops.steps import commit_step, count_runs, prepare_step, share_drafts, store_drafts
from outrider.kernels.ops.streams import (
    add_silu,
    gate_values,
    join_streams,
    mix_streams,
    read_streams,
    stream_gates,
    write_streams,
)

__all__ = [
    # The table itself, and what its rows are written with (operation.py)
    "BFLOAT16", "FLOAT32", "SIXTEEN_BITS", "UP_TO_FLOAT32", "Exactness", "Kernel", "NotExact", "Operation",
    "has_native", "has_triton", "native_kernel", "operations", "triton_kernel", "using",
    # Norms and activations (elements.py)
    "rms_norm", "add_rms_norm", "norm_add_norm", "gated_norm", "silu_mul", "gelu_tanh_mul", "relu2",
    "limited_silu_mul", "sigmoid_scale", "gelu_scale", "cap_logits", "gated",
    # Attention (attention.py)
    "rope_write", "paged_attention", "visible_ranges", "write_latents", "rotate_queries", "head_products",
    "enter_latents", "choose_positions", "latent_attention", "dense_latent_attention", "latent_values",
    "write_stretch_keys", "write_pooled_keys", "list_stretches", "write_keys_values", "stretch_attention",
    # Residual streams (streams.py)
    "join_streams", "stream_gates", "mix_streams", "gate_values", "add_silu", "read_streams", "write_streams",
    # Products (products.py)
    "linear", "prepare_linear", "linear_wide", "gated_linear", "relu2_linear", "linear_add",
    # Products with codes and scales (coded.py)
    "arrange_codes", "scaled_experts", "scaled_gated", "scaled_linear", "scaled_rows", "scaled_wide",
    # Adapters (adapters.py)
    "sort_slots", "reduce_adapters", "add_adapters", "add_adapters_gated", "add_adapter_embeddings",
    "add_head_adapters", "mix_adapted_experts",
    # Experts (expert_products.py)
    "route", "experts", "experts_with_shared",
    # Drafting (drafting.py)
    "join_embedding", "take_rows", "find_ngram", "plan_draft_passes", "plan_block_passes", "plan_first_slots",
    "plan_reading_pass", "forget_pages",
    # Steps (steps.py)
    "count_runs", "prepare_step", "share_drafts", "commit_step", "store_drafts",
]
