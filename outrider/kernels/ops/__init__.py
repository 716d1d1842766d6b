"""The table of operations: each has a torch reference, which defines it, and kernels that carry it out.

A row names the reference, then kernels in the order in which they are asked, each with the dtypes that it serves and
a condition on its arguments (`takes`). Native code serves the CPU and Triton a GPU. Operations are called like their
references: `ops.rms_norm(x, weight, eps)`. Other packages add rows for operations of their own.

The column `exact` is the one place that says how an operation keeps its bits in exact mode: by itself, by another
operation (those of products are in `exact.py`), or not at all.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from outrider.kernels import (
    adapters,
    drafting,
    float32_products,
    latent,
    latent_inputs,
    moe,
    pooled_keys,
    reference,
    step,
    streams,
    stretches,
    vendor_products,
)
from outrider.kernels.native import checks
from outrider.kernels.ops import conditions, exact
from outrider.kernels.ops.coded import (
    arrange_codes,
    scaled_experts,
    scaled_gated,
    scaled_linear,
    scaled_rows,
    scaled_wide,
)
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

__all__ = [
    "BFLOAT16",
    "FLOAT32",
    "SIXTEEN_BITS",
    "UP_TO_FLOAT32",
    "Exactness",
    "Kernel",
    "Operation",
    "NotExact",
    "add_adapter_embeddings",
    "add_adapters",
    "add_adapters_gated",
    "add_head_adapters",
    "reduce_adapters",
    "sort_slots",
    "mix_adapted_experts",
    "arrange_codes",
    "has_native",
    "has_triton",
    "native_kernel",
    "operations",
    "scaled_experts",
    "scaled_gated",
    "scaled_linear",
    "scaled_rows",
    "scaled_wide",
    "triton_kernel",
    "using",
]

ROW_BY_ROW, NO_ARITHMETIC, DRAFTS = Exactness.ROW_BY_ROW, Exactness.NO_ARITHMETIC, Exactness.DRAFTS

# Norms

rms_norm = Operation(
    reference.rms_norm,
    native_kernel("outrider.kernels.native:rms_norm", FLOAT32, checks.takes_rms_norm),
    triton_kernel("outrider.kernels.triton.norm:rms_norm", UP_TO_FLOAT32, conditions.is_matrix),
    exact=ROW_BY_ROW,
)
add_rms_norm = Operation(
    reference.add_rms_norm,
    native_kernel("outrider.kernels.native:add_rms_norm", FLOAT32, checks.takes_add_rms_norm),
    triton_kernel("outrider.kernels.triton.norm:add_rms_norm", UP_TO_FLOAT32),
    exact=ROW_BY_ROW,
)


def _norm_add_norm(x: torch.Tensor, post_weight: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float,
                   factor: float = 1.0, rounding: int = 0) -> torch.Tensor:
    """Set residual to factor * residual + norm(x) in place. Returns the norm of the result."""
    if factor != 1.0:
        residual.mul_(factor)
    return add_rms_norm(rms_norm(x, post_weight, eps), residual, weight, eps)


norm_add_norm = Operation(
    _norm_add_norm,
    triton_kernel("outrider.kernels.triton.norm:norm_add_norm", UP_TO_FLOAT32),
    name="norm_add_norm", exact=ROW_BY_ROW,
)
gated_norm = Operation(
    reference.gated_norm, triton_kernel("outrider.kernels.triton.gated_norm:gated_norm", UP_TO_FLOAT32),
    exact=exact.gated_norm,
)

# Activations

silu_mul = Operation(
    reference.silu_mul,
    native_kernel("outrider.kernels.native:silu_mul", FLOAT32, checks.takes_gated),
    triton_kernel("outrider.kernels.triton.activation:silu_mul", UP_TO_FLOAT32),
    exact=ROW_BY_ROW,
)
gelu_tanh_mul = Operation(
    reference.gelu_tanh_mul,
    native_kernel("outrider.kernels.native:gelu_tanh_mul", FLOAT32, checks.takes_gated),
    triton_kernel("outrider.kernels.triton.activation:gelu_tanh_mul", UP_TO_FLOAT32),
    exact=ROW_BY_ROW,
)
relu2 = Operation(reference.relu2, triton_kernel("outrider.kernels.triton.activation:relu2", UP_TO_FLOAT32),
                  exact=ROW_BY_ROW)


def _limited_silu_mul(gate_up: torch.Tensor, limit: float) -> torch.Tensor:
    """`reference.limited_silu_mul` by `silu_mul`, whose bits do not depend on the other token rows."""
    gate, up = gate_up.chunk(2, dim=-1)
    return silu_mul(torch.cat((gate.clamp(max=limit), up.clamp(-limit, limit)), dim=-1))


limited_silu_mul = Operation(
    _limited_silu_mul,
    triton_kernel("outrider.kernels.triton.activation:limited_silu_mul", UP_TO_FLOAT32),
    name="limited_silu_mul", exact=ROW_BY_ROW,
)
sigmoid_scale = Operation(
    reference.sigmoid_scale,
    native_kernel("outrider.kernels.native:sigmoid_scale", FLOAT32, checks.takes_elements),
    exact=ROW_BY_ROW,
)
gelu_scale = Operation(
    reference.gelu_scale,
    native_kernel("outrider.kernels.native:gelu_scale", FLOAT32, checks.takes_elements),
    exact=ROW_BY_ROW,
)
cap_logits = Operation(
    reference.cap_logits,
    native_kernel("outrider.kernels.native:cap_logits", FLOAT32, checks.takes_logits),
    exact=ROW_BY_ROW,
)


def gated(gate_up: torch.Tensor, activation: str, rounding: int = 0) -> torch.Tensor:
    """act(gate) * up of [tokens, gate | up]. rounding: as in `reference.silu_mul`."""
    if (limit := moe.silu_limit(activation)) is not None:
        return limited_silu_mul(gate_up, limit)
    hint = (rounding,) if rounding else ()
    return silu_mul(gate_up, *hint) if activation == "silu" else gelu_tanh_mul(gate_up, *hint)


# Attention on the CPU; on a GPU a backend plans its launches (mixers/paged)

rope_write = Operation(
    reference.rope_write,
    native_kernel("outrider.kernels.native:rope_write", FLOAT32, checks.takes_rope_write),
    exact=ROW_BY_ROW,
)
paged_attention = Operation(
    reference.paged_attention,
    native_kernel("outrider.kernels.native:paged_attention", FLOAT32, checks.takes_paged_attention),
    exact=ROW_BY_ROW,
)

# Latent attention and its indexer

visible_ranges = Operation(
    latent.visible_ranges, triton_kernel("outrider.kernels.triton.latent_inputs:visible_ranges"), exact=NO_ARITHMETIC
)
write_latents = Operation(
    latent_inputs.write_latents,
    triton_kernel("outrider.kernels.triton.latent_inputs:write_latents", UP_TO_FLOAT32),
    exact=exact.write_latents,
)
rotate_queries = Operation(
    latent_inputs.rotate_queries,
    triton_kernel("outrider.kernels.triton.latent_inputs:rotate_queries", UP_TO_FLOAT32),
    exact=ROW_BY_ROW,
)
head_products = Operation(
    latent_inputs.head_products,
    triton_kernel("outrider.kernels.triton.head_products:head_products", UP_TO_FLOAT32),
    exact=exact.head_products,
)
enter_latents = Operation(
    latent_inputs.enter_latents,
    triton_kernel("outrider.kernels.triton.enter_latents:enter_latents", SIXTEEN_BITS,
                  "outrider.kernels.triton.enter_latents:takes_few"),
    exact=NotExact("it serves few token rows, and more of them are rotated and multiplied one after the other"),
)
choose_positions = Operation(
    latent.choose_positions,
    triton_kernel("outrider.kernels.triton.index_prefill:choose_positions", SIXTEEN_BITS,
                  "outrider.kernels.triton.hopper.index:takes_prompts"),
    triton_kernel("outrider.kernels.triton.index_choice:choose_positions", UP_TO_FLOAT32),
    exact=exact.choose_positions,
)
latent_attention = Operation(
    latent.latent_attention,
    triton_kernel("outrider.kernels.triton.hopper.latent:latent_attention", SIXTEEN_BITS,
                  "outrider.kernels.triton.hopper.latent:takes_many_rows"),
    triton_kernel("outrider.kernels.triton.latent_attention:latent_attention", UP_TO_FLOAT32),
    exact=exact.latent_attention,
)
dense_latent_attention = Operation(
    latent.dense_latent_attention,
    triton_kernel("outrider.kernels.triton.hopper.latent:dense_latent_attention", SIXTEEN_BITS,
                  "outrider.kernels.triton.hopper.latent:takes_many_rows"),
    triton_kernel("outrider.kernels.triton.latent_attention:dense_latent_attention", UP_TO_FLOAT32),
    exact=exact.dense_latent_attention,
)
latent_values = Operation(
    latent.latent_values,
    triton_kernel("outrider.kernels.triton.latent_values:latent_values", SIXTEEN_BITS,
                  "outrider.kernels.triton.latent_values:takes_few"),
    exact=NotExact("it serves few token rows, and more of them attend and are multiplied one after the other"),
)

# Attention to chosen stretches

write_stretch_keys = Operation(
    stretches.write_stretch_keys,
    triton_kernel("outrider.kernels.triton.stretches:write_stretch_keys", UP_TO_FLOAT32),
    exact=ROW_BY_ROW,
)
write_pooled_keys = Operation(
    pooled_keys.write_pooled_keys,
    triton_kernel("outrider.kernels.triton.pooled_keys:write_pooled_keys", UP_TO_FLOAT32),
    exact=exact.write_pooled_keys,
)


def _chosen_of(contexts: latent.TokenContexts, chosen: torch.Tensor, *_: object) -> torch.Tensor:
    return chosen


list_stretches = Operation(
    pooled_keys.list_stretches,
    triton_kernel("outrider.kernels.triton.pooled_keys:list_stretches"),
    subject=_chosen_of, exact=NO_ARITHMETIC,
)
write_keys_values = Operation(
    stretches.write_keys_values,
    triton_kernel("outrider.kernels.triton.cache_write:cache_write", UP_TO_FLOAT32),
    exact=ROW_BY_ROW,
)
stretch_attention = Operation(
    stretches.stretch_attention,
    triton_kernel("outrider.kernels.triton.stretches:stretch_attention", UP_TO_FLOAT32),
    exact=exact.stretch_attention,
)

# Residual streams


def _streams_of(x: torch.Tensor | None, weights: torch.Tensor | None, streams: torch.Tensor,
                *_: object) -> torch.Tensor:
    return streams


join_streams = Operation(
    streams.join_streams,
    triton_kernel("outrider.kernels.triton.streams:join_streams", UP_TO_FLOAT32),
    subject=_streams_of, exact=ROW_BY_ROW,
)
stream_gates = Operation(
    streams.stream_gates,
    triton_kernel("outrider.kernels.triton.streams:stream_gates", UP_TO_FLOAT32),
    exact=exact.stream_gates,
)
mix_streams = Operation(
    streams.mix_streams,
    triton_kernel("outrider.kernels.triton.streams:mix_streams", UP_TO_FLOAT32),
    exact=exact.mix_streams,
)
gate_values = Operation(streams.gate_values, exact=exact.gate_values)
add_silu = Operation(streams.add_silu, exact=exact.add_silu)
read_streams = Operation(
    streams.read_streams,
    triton_kernel("outrider.kernels.triton.hyper_streams:read_streams", UP_TO_FLOAT32),
    exact=exact.read_streams,
)
write_streams = Operation(
    streams.write_streams,
    triton_kernel("outrider.kernels.triton.hyper_streams:write_streams", UP_TO_FLOAT32),
    exact=ROW_BY_ROW,
)

# Products with a weight [outputs, inputs]. A norm before a product is better done once, by its own kernel: every
# program of the product would read and scale the whole input again.

linear = Operation(
    reference.linear,
    triton_kernel("outrider.kernels.triton.hopper.few_rows:few_rows_linear", BFLOAT16,
                  "outrider.kernels.triton.hopper.few_rows:is_fastest"),
    triton_kernel("outrider.kernels.triton.matvec:matvec", BFLOAT16, "outrider.kernels.triton.matvec:is_fastest"),
    triton_kernel("outrider.kernels.triton.split_linear:split_linear", BFLOAT16,
                  "outrider.kernels.triton.split_linear:is_fastest"),
    triton_kernel("outrider.kernels.triton.thin_linear:thin_linear", BFLOAT16,
                  "outrider.kernels.triton.thin_linear:is_fastest"),
    Kernel("library", "cuda", float32_products.summed_product, FLOAT32, float32_products.takes_rows),
    exact=exact.linear,
)
prepare_linear = Operation(
    reference.prepare_linear,
    Kernel("host", "cpu", "outrider.kernels.native.products:make_product"),
    exact=exact.prepare_linear,
)
linear_wide = Operation(
    reference.linear_wide,
    native_kernel("outrider.kernels.native:linear", FLOAT32, conditions.is_few_rows_for_native),
    triton_kernel("outrider.kernels.triton.matvec:matvec_wide", BFLOAT16, "outrider.kernels.triton.matvec:is_fastest"),
    triton_kernel("outrider.kernels.triton.hopper.few_rows:few_rows_wide", BFLOAT16,
                  "outrider.kernels.triton.hopper.few_rows:is_fastest_wide"),
    Kernel("library", "cuda", vendor_products.wide_product, SIXTEEN_BITS),
    exact=exact.linear_wide,
)


def _gated_linear(x: torch.Tensor, weight: torch.Tensor, activation: str) -> torch.Tensor:
    """act(gate) * up of a product with weight rows gate | up."""
    return gated(linear(x, weight), activation)


gated_linear = Operation(
    _gated_linear,
    triton_kernel("outrider.kernels.triton.matvec:gated_matvec", BFLOAT16, conditions.has_one_row),
    triton_kernel("outrider.kernels.triton.hopper.few_rows:few_rows_gated", BFLOAT16,
                  "outrider.kernels.triton.hopper.few_rows:is_fastest_gated"),
    triton_kernel("outrider.kernels.triton.thin_linear:gated_linear", BFLOAT16,
                  "outrider.kernels.triton.thin_linear:is_fastest_gated"),
    name="gated_linear", exact=exact.gated_linear,
)


def _relu2_linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """The square of relu of a product."""
    return relu2(linear(x, weight))


relu2_linear = Operation(
    _relu2_linear,
    triton_kernel("outrider.kernels.triton.matvec:relu2_matvec", BFLOAT16, conditions.has_one_row),
    name="relu2_linear", exact=exact.relu2_linear,
)


def _linear_add(residual: torch.Tensor, x: torch.Tensor, weight: torch.Tensor,
                bias: torch.Tensor | None = None) -> None:
    """residual += x @ weight' + bias, in place."""
    residual.add_(linear(x, weight, bias))


linear_add = Operation(
    _linear_add,
    triton_kernel("outrider.kernels.triton.matvec:add_matvec", BFLOAT16, conditions.has_one_row),
    Kernel("library", "cuda", vendor_products.add_product, SIXTEEN_BITS, vendor_products.has_many_rows),
    name="linear_add", exact=exact.linear_add,
)

# Adapters

sort_slots = Operation(
    adapters.sort_slots,
    native_kernel("outrider.kernels.native.adapters:sort_slots", takes="outrider.kernels.native.adapters:takes_sort"),
    exact=NO_ARITHMETIC,
)
reduce_adapters = Operation(
    adapters.reduce_adapters,
    native_kernel("outrider.kernels.native.adapters:reduce_adapters", FLOAT32,
                  "outrider.kernels.native.adapters:takes_reduce"),
    Kernel("host", "cpu", "outrider.kernels.adapters_on_host:reduce_adapters"),
    triton_kernel("outrider.kernels.triton.adapters:reduce_adapters", UP_TO_FLOAT32),
    exact=ROW_BY_ROW,
)
add_adapters = Operation(
    adapters.add_adapters,
    native_kernel("outrider.kernels.native.adapters:add_adapters", FLOAT32,
                  "outrider.kernels.native.adapters:takes_add"),
    Kernel("host", "cpu", "outrider.kernels.adapters_on_host:add_adapters"),
    triton_kernel("outrider.kernels.triton.adapters:add_adapters", UP_TO_FLOAT32),
    exact=ROW_BY_ROW,
)
add_adapters_gated = Operation(
    adapters.add_adapters_gated,
    Kernel("host", "cpu", "outrider.kernels.adapters_on_host:add_adapters_gated"),
    triton_kernel("outrider.kernels.triton.adapters:add_adapters_gated", UP_TO_FLOAT32,
                  "outrider.kernels.triton.adapters:takes_gated"),
    exact=ROW_BY_ROW,
)
add_adapter_embeddings = Operation(
    adapters.add_adapter_embeddings,
    Kernel("host", "cpu", "outrider.kernels.adapters_on_host:add_adapter_embeddings"),
    triton_kernel("outrider.kernels.triton.adapters:add_adapter_embeddings", UP_TO_FLOAT32),
    exact=ROW_BY_ROW,
)
add_head_adapters = Operation(
    adapters.add_head_adapters,
    Kernel("host", "cpu", "outrider.kernels.adapters_on_host:add_head_adapters"),
    triton_kernel("outrider.kernels.triton.head_adapters:add_head_adapters", UP_TO_FLOAT32),
    exact=ROW_BY_ROW,
)
mix_adapted_experts = Operation(
    adapters.mix_adapted_experts,
    Kernel("host", "cpu", "outrider.kernels.adapters_on_host:mix_adapted_experts"),
    triton_kernel("outrider.kernels.triton.expert_adapters:mix_adapted_experts", UP_TO_FLOAT32),
    exact=ROW_BY_ROW,
)

# Experts

route = Operation(
    moe.route,
    triton_kernel("outrider.kernels.triton.router:route", UP_TO_FLOAT32, "outrider.kernels.triton.router:takes_rule"),
    exact=exact.route,
)
experts = Operation(
    moe.experts,
    Kernel("host", "cpu", "outrider.kernels.experts_on_host:experts"),
    triton_kernel("outrider.kernels.triton.moe:experts", UP_TO_FLOAT32),
    exact=exact.experts,
)
experts_with_shared = Operation(
    moe.experts_with_shared,
    triton_kernel("outrider.kernels.triton.shared_expert:experts_with_shared", BFLOAT16,
                  "outrider.kernels.triton.shared_expert:takes_shared"),
    exact=NotExact("it serves one or two token rows, and more of them are computed one product after the other"),
)

# Around draft heads


def _join_embedding(tokens: torch.Tensor, table: torch.Tensor, hidden: torch.Tensor, *, scale: float | None = None,
                    gains: tuple[torch.Tensor, torch.Tensor] | None = None, eps: float = 0.0,
                    hidden_first: bool = False,
                    positions: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """([tokens, embedding | hidden], its hidden part), both parts normed where there are `gains`. Embeddings at
    `positions` [tokens] up to 1, where a text begins, are zero. The second may be a view of the first, so a caller that
    goes on with it in place must be done with the first."""
    embedded = F.embedding(tokens, table)
    embedded = embedded if positions is None else torch.where((positions > 1)[:, None], embedded, 0)
    embedded = embedded if scale is None else embedded * scale
    if gains is not None:
        embedded, hidden = rms_norm(embedded, gains[0], eps), rms_norm(hidden, gains[1], eps)
    return torch.cat((hidden, embedded) if hidden_first else (embedded, hidden), dim=-1), hidden


def _hidden_of(tokens: torch.Tensor, table: torch.Tensor, hidden: torch.Tensor, **_: object) -> torch.Tensor:
    return hidden


join_embedding = Operation(
    _join_embedding,
    triton_kernel("outrider.kernels.triton.join:join_embedding", UP_TO_FLOAT32),
    name="join_embedding", subject=_hidden_of, exact=DRAFTS,
)
take_rows = Operation(
    reference.take_rows,
    triton_kernel("outrider.kernels.triton.join:take_rows", UP_TO_FLOAT32, conditions.are_two),
    exact=NO_ARITHMETIC,
)

# Text


find_ngram = Operation(
    reference.find_ngram,
    native_kernel("outrider.kernels.native:find_ngram", takes=checks.takes_find_ngram),
    triton_kernel("outrider.kernels.triton.ngram:find_ngram"),
    exact=NO_ARITHMETIC,
)

# Sampling

count_runs = Operation(
    reference.count_runs,
    native_kernel("outrider.kernels.native:count_runs", takes=checks.takes_count_runs),
    triton_kernel("outrider.kernels.triton.token_counts:count_runs"),
    exact=NO_ARITHMETIC,
)

# Steps and proposals

prepare_step = Operation(
    step.prepare_step,
    native_kernel("outrider.kernels.native.step:prepare_step", takes="outrider.kernels.native.step:takes_prepare_step"),
    triton_kernel("outrider.kernels.triton.step:prepare_step"),
    subject=lambda packet, *_, **__: packet.rows, exact=NO_ARITHMETIC,
)
share_drafts = Operation(
    step.share_drafts, triton_kernel("outrider.kernels.triton.share_drafts:share_drafts"),
    subject=lambda packet, *_, **__: packet.rows, exact=NO_ARITHMETIC,
)
commit_step = Operation(
    step.commit_step,
    native_kernel("outrider.kernels.native.step:commit_step", takes="outrider.kernels.native.step:takes_commit_step"),
    triton_kernel("outrider.kernels.triton.step:commit_step"),
    exact=NO_ARITHMETIC,
)
store_drafts = Operation(
    step.store_drafts,
    native_kernel("outrider.kernels.native.step:store_drafts", takes="outrider.kernels.native.step:takes_store_drafts"),
    triton_kernel("outrider.kernels.triton.draft_entry:store_drafts"),
    exact=NO_ARITHMETIC,
)
plan_draft_passes = Operation(
    drafting.plan_draft_passes,
    native_kernel("outrider.kernels.native.draft_plan:plan_draft_passes",
                  takes="outrider.kernels.native.draft_plan:takes_plan"),
    triton_kernel("outrider.kernels.triton.draft:plan_draft_passes"),
    subject=lambda requests, *_, **__: requests.rows, exact=NO_ARITHMETIC,
)
plan_block_passes = Operation(drafting.plan_block_passes,
                              triton_kernel("outrider.kernels.triton.draft_blocks:plan_block_passes"),
                              subject=lambda requests, *_, **__: requests.rows, exact=NO_ARITHMETIC)
plan_first_slots = Operation(drafting.plan_first_slots,
                             triton_kernel("outrider.kernels.triton.first_slots:plan_first_slots"),
                             subject=lambda admitted, *_, **__: admitted.rows, exact=NO_ARITHMETIC)
plan_reading_pass = Operation(drafting.plan_reading_pass,
                              triton_kernel("outrider.kernels.triton.draft:plan_reading_pass"),
                              subject=lambda requests, *_, **__: requests.rows, exact=NO_ARITHMETIC)
forget_pages = Operation(
    drafting.forget_pages,
    native_kernel("outrider.kernels.native.draft_plan:forget_pages",
                  takes="outrider.kernels.native.draft_plan:takes_forget"),
    triton_kernel("outrider.kernels.triton.draft:forget_pages"),
    subject=lambda requests, *_, **__: requests.rows, exact=NO_ARITHMETIC,
)
