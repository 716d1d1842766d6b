"""Triton kernels, and the typed functions that launch them on an NVIDIA GPU, or under Triton's interpreter without one.

Callers pass tensors and sizes that the host knows, and never see a launch grid. Importing this needs the triton
package.

Each folder holds one operation or a family of them, and its `__init__.py` says which files to read first. `hopper/` has
the kernels of all operations that run only on Hopper GPUs; `launch/` is how kernels are launched and compiled.
`common.py` has the device functions and checks that all share, `step.py` the bookkeeping of a step, and
`rank_exchange.py` sums and gathers over ranks.
"""

from outrider.kernels.gpu.attention.decode import decode_attention
from outrider.kernels.gpu.attention.exact_attention import exact_attention, exact_tiles_config
from outrider.kernels.gpu.attention.merge import prepare_counters
from outrider.kernels.gpu.attention.prefill import (
    PrefillChoice,
    QueryTiles,
    choose_prefill,
    device_query_tiles,
    prefill_attention,
    query_tiles,
)
from outrider.kernels.gpu.attention.splits import SplitList, can_pack, list_splits, pays_split_list
from outrider.kernels.gpu.drafts.entry import store_drafts
from outrider.kernels.gpu.drafts.join import join_embedding, take_rows
from outrider.kernels.gpu.drafts.ngram import find_ngram
from outrider.kernels.gpu.elements.activation import gelu_tanh_mul, limited_silu_mul, relu2, silu_mul
from outrider.kernels.gpu.elements.gated_norm import gated_norm
from outrider.kernels.gpu.elements.norm import add_rms_norm, norm_add_norm, rms_norm
from outrider.kernels.gpu.gated_delta.steps import delta_config, delta_steps
from outrider.kernels.gpu.launch.precompile import (
    compiling_ahead,
    finish_compiling,
    has_postponed,
    is_compiling,
    postponing,
)
from outrider.kernels.gpu.linear.matvec import matvec
from outrider.kernels.gpu.linear.split import split_linear
from outrider.kernels.gpu.linear.thin import gated_linear, thin_linear
from outrider.kernels.gpu.pages.cache_write import cache_write
from outrider.kernels.gpu.pages.rope_cache import rope_cache_write
from outrider.kernels.gpu.sampling.draw import choose_scaled, draw_tokens, sample_logits
from outrider.kernels.gpu.step import commit_step, prepare_step

__all__ = [
    "PrefillChoice",
    "QueryTiles",
    "SplitList",
    "add_rms_norm",
    "cache_write",
    "can_pack",
    "choose_prefill",
    "choose_scaled",
    "commit_step",
    "compiling_ahead",
    "decode_attention",
    "delta_config",
    "delta_steps",
    "device_query_tiles",
    "draw_tokens",
    "exact_attention",
    "exact_tiles_config",
    "find_ngram",
    "finish_compiling",
    "gated_linear",
    "gated_norm",
    "gelu_tanh_mul",
    "has_postponed",
    "is_compiling",
    "join_embedding",
    "limited_silu_mul",
    "list_splits",
    "matvec",
    "norm_add_norm",
    "pays_split_list",
    "postponing",
    "prefill_attention",
    "prepare_counters",
    "prepare_step",
    "query_tiles",
    "relu2",
    "rms_norm",
    "rope_cache_write",
    "sample_logits",
    "silu_mul",
    "split_linear",
    "store_drafts",
    "take_rows",
    "thin_linear",
]
