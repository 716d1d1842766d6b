"""Triton kernels: typed wrappers around what runs on a CUDA card, or under Triton's interpreter without one.

Callers see tensors and host bounds, never a launch grid. Importing this needs the triton package.
"""

from outrider.kernels.triton.activation import gelu_tanh_mul, silu_mul
from outrider.kernels.triton.attention import decode_attention
from outrider.kernels.triton.norm import add_rms_norm, rms_norm
from outrider.kernels.triton.pages import clear_pages, copy_pages
from outrider.kernels.triton.prefill import QueryTiles, prefill_attention, query_tiles
from outrider.kernels.triton.rope_cache import rope_cache_write
from outrider.kernels.triton.sampling import sample_logits
from outrider.kernels.triton.step import Scheduled, Verified, commit_step, prepare_step
from outrider.kernels.triton.thin_linear import gated_linear, thin_linear

__all__ = [
    "QueryTiles",
    "Scheduled",
    "Verified",
    "add_rms_norm",
    "clear_pages",
    "commit_step",
    "copy_pages",
    "decode_attention",
    "gated_linear",
    "gelu_tanh_mul",
    "prefill_attention",
    "prepare_step",
    "query_tiles",
    "rms_norm",
    "rope_cache_write",
    "sample_logits",
    "silu_mul",
    "thin_linear",
]
