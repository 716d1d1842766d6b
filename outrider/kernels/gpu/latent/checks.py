"""Checks of the arguments that all kernels of attention over the latent cache share."""

from __future__ import annotations

import torch

from outrider.kernels.fp8_cache import FP8
from outrider.kernels.gpu.common import FLOATS, require, require_tensor
from outrider.kernels.latent import TokenContexts


def check_latents(name: str, q: torch.Tensor, cache: torch.Tensor, contexts: TokenContexts,
                  latent_dim: int, sinks: torch.Tensor | None = None) -> tuple[int, int, int]:
    """Check the arguments, and return (token rows, heads, width of an entry)."""
    device, integers = q.device, (torch.int32, torch.int64)
    require_tensor(name, "q", q, (None, None, None), device, FLOATS)
    num_tokens, num_heads, width = q.shape
    require_tensor(name, "cache", cache, (None, None, width), device, (q.dtype, FP8))
    require(0 < latent_dim <= width, name, "latent_dim", f"is {latent_dim}, expected at most the entry's {width}")
    page_tokens = cache.shape[1]
    require(page_tokens & (page_tokens - 1) == 0, name, "cache", f"has {page_tokens} tokens per page, expected a power"
            " of two")
    require_tensor(name, "page_table", contexts.page_table, (None, None), device, integers)
    for argument in ("request_of", "first", "stop"):
        require_tensor(name, argument, getattr(contexts, argument), (num_tokens,), device, integers)
    if sinks is not None:
        require_tensor(name, "sinks", sinks, (num_heads,), device, (torch.float32,))
    return num_tokens, num_heads, width
