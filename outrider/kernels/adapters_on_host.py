"""What adapters add to the products of a model on the CPU, by the products of exact mode."""

from __future__ import annotations

from functools import partial

from outrider.kernels.adapters import add_by, add_embeddings_by, add_heads_by, mix_experts_by
from outrider.kernels.ops import exact

add_adapters = partial(add_by, exact.linear)
add_adapter_embeddings = partial(add_embeddings_by, exact.linear)
add_head_adapters = partial(add_heads_by, exact.linear)
mix_adapted_experts = partial(mix_experts_by, exact.linear)
