"""The table of operations: each has a torch reference, which defines it, and kernels that carry it out.

A row names the reference, then kernels in the order in which they are asked, each with the dtypes that it serves and
a condition on its arguments (`takes`). Native code serves the CPU and Triton a GPU. Operations are called like their
references: `ops.rms_norm(x, weight, eps)`. Other packages add rows for operations of their own.

The column `exact` is the one place that says how an operation keeps its bits in exact mode: by itself, by another
operation (those of products are in `exact.py`), or not at all.

Rows are in one file for each kind of operation; `__all__` lists them by file.

Callers call `ops.rms_norm(...)`; only the table chooses a kernel, and it remembers the candidates by device and dtype.
Tests force a kind with `ops.using("triton")`. `sample/draw.py` and `drafters/draw.py` are examples of rows that other
packages declare.

Products with a weight (`linear`, `gated_linear`, ...) have several kernels, each of which says for which numbers of
token rows and which weights it is the fastest:

- 1 (small weights: up to 4): `linear/matvec.py`
- 2 to 64 on Hopper cards: `hopper/few_rows.py` (`plan_few_rows` is the table of what was measured)
- few, elsewhere: `linear/thin.py`, `linear/split.py`
- more: the library (`kernels/vendor_products.py`)
- float32, 2 to 1024: the library, in pieces of 128 inputs (`kernels/float32_products.py`)
- codes with scales, 1 to 64 on Hopper cards: `hopper/coded/rows.py`: fp8 that meets rounded token rows, int4 in
  groups of 16 to 128, int8 in groups of 16 to 64 (`choose` is the table of what was measured)
- int4 and int8 of these, 65 to 512 on Hopper cards: `hopper/coded/tiles.py`: codes become bf16 numbers in the
  registers of the warps that multiply, once for each tile of token rows
- codes with scales, 1 to 64, others: `linear/scaled.py`
- codes with scales, more: the library: fp8 with a scale for each output or each block of 128 x 128 as it is, other
  codes as bf16 numbers that `linear/scaled_codes.py` writes to at most 128 MiB of scratch memory
- codes with scales, of chosen experts: `experts/scaled.py`; 4-bit codes with up to 8 pairs of a token row and an
  expert on the vector units, each pair by itself (`experts/coded_rows.py`); with many token rows for each expert,
  4-bit codes as numbers of some experts at a time in scratch memory

`choose_prefill` picks the attention kernel of prompts by the card and the cache: `kernels/gpu/hopper/` on Hopper
(some warps fetch pages, groups of warps attend), `kernels/gpu/attention/prefill.py` elsewhere. Small kernels start
while the kernel before them drains (programmatic dependent launch) and wait before they touch data that another kernel
writes or reads.

**Exact mode.** In exact mode a token row has the same bits alone as among any other token rows. Every operation of the
table says in its column `exact` how this is reached:

- The operation is exact itself (`Exactness`): its kernels compute every token row alone, in one order of additions; or
  it has no floating-point arithmetic; or it computes only drafts, which cannot change an output.
- Another operation replaces it (`kernels/ops/exact.py`).
- It is not exact (`NotExact`, with the reason): a model that needs it does not start in exact mode.

`runner/exact.py` refuses devices, dtypes and heads that exact mode does not serve.

A module that calls an operation with an exact variant chooses once, in `set_exact`, which `layers.fuse.prepare` calls
for every module of the model. Formats do this for products, mixers in `Mixer.set_exact` (`mixers/mixer.py`), and
attention backends have an entry of their own (`make_exact`). Where there is no kernel, exact operations loop over the
token rows, so that a library always gets the same shape. On CUDA:

- products: one chain of additions over the inner dimension, 16 columns at a time, in a tile of any size
  (`linear/exact_linear.py`, `hopper/products.py` for many token rows)
- products with codes and scales: the ordinary kernel for more than a few token rows, with one order of additions for
  every number of them (`linear/scaled.py`, `experts/scaled.py`)
- attention: one kernel for prompts and decoding; splits over the keys have a fixed size, begin at multiples of it and
  are merged in order (`attention/exact_attention.py`)
- latent attention: its ordinary kernels, in one tile for any number of token rows (`latent/exact_latent.py`)
- chosen blocks: the ordinary kernel with a fixed number of splits; short contexts take the same kernel
  (`index/token_blocks.py`)

`tests/kernels/test_exact_operations.py` walks the table and demands a proof for every row that claims to be exact;
`tests/engine/test_exact_mode.py` compares whole engines bit for bit.

**Native code and launches.** The structures that the C code takes are declared in `kernels/cpu/structures.py` and
compared with C's own layout when the library is loaded. Kernels that the host launches are declared with `@kernel`
(`kernels/gpu/launch/triton_kernel.py`), so that start-up can collect launches and compile them
(`launch/precompile.py`), and so that a launch like an earlier one goes to its compiled kernel without Triton's search
for it (`TritonKernel._launch`; `argument_class` says which launches are alike).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from outrider.core.lazy_exports import lazy_exports

if TYPE_CHECKING:
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
        block_attention,
        choose_positions,
        dense_latent_attention,
        enter_latents,
        head_products,
        latent_attention,
        latent_values,
        list_blocks,
        rotate_queries,
        visible_ranges,
        write_block_keys,
        write_keys_values,
        write_latents,
        write_pooled_keys,
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
        planning_for,
        triton_kernel,
        using,
    )
    from outrider.kernels.ops.paged import paged_attention, rope_write
    from outrider.kernels.ops.products import (
        gated_linear,
        linear,
        linear_add,
        linear_wide,
        prepare_linear,
        relu2_linear,
    )
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
else:
    __getattr__ = lazy_exports(__name__)

__all__ = [
    # The table itself, and what its rows are written with (operation.py)
    "BFLOAT16", "FLOAT32", "SIXTEEN_BITS", "UP_TO_FLOAT32", "Exactness", "Kernel", "NotExact", "Operation",
    "has_native", "has_triton", "native_kernel", "operations", "planning_for", "triton_kernel", "using",
    # Norms and activations (elements.py)
    "rms_norm", "add_rms_norm", "norm_add_norm", "gated_norm", "silu_mul", "gelu_tanh_mul", "relu2",
    "limited_silu_mul", "sigmoid_scale", "gelu_scale", "cap_logits", "gated",
    # Paged attention (paged.py)
    "rope_write", "paged_attention",
    # Attention (attention.py)
    "visible_ranges", "write_latents", "rotate_queries", "head_products",
    "enter_latents", "choose_positions", "latent_attention", "dense_latent_attention", "latent_values",
    "write_block_keys", "write_pooled_keys", "list_blocks", "write_keys_values", "block_attention",
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
