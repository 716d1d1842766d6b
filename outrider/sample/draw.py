"""Draws tokens: directly from the logits of requests whose only parameter is a temperature, or from logits that were
edited and filtered before."""

from __future__ import annotations

import torch

from outrider.kernels.ops import FLOAT32, Exactness, Operation, native_kernel, triton_kernel
from outrider.kernels.sampling_keys import SamplingKeys
from outrider.sample.filters import scale
from outrider.sample.philox import gumbel


def _choose_scaled(scaled: torch.Tensor, row: torch.Tensor, position: torch.Tensor, keys: SamplingKeys,
                   any_sampled: bool) -> torch.Tensor:
    """Choose the token [L] with the greatest logit, after Gumbel noise is added where the temperature is not 0. The
    lowest id wins a tie.

    `scaled`: logits [L, V] that are already divided by their temperatures. `keys`: the keys of all rows."""
    if not any_sampled:
        return scaled.argmax(dim=1)
    noise = gumbel(keys.seed[row], keys.sample_index[row], position, None, scaled.shape[1], scaled.dtype)
    noise.masked_fill_((keys.temperature[row] == 0)[:, None], 0)
    return noise.add_(scaled).argmax(dim=1)


choose_scaled = Operation(
    _choose_scaled, triton_kernel("outrider.kernels.gpu.sampling.draw:choose_scaled", FLOAT32), name="choose_scaled",
    exact=Exactness.ROW_BY_ROW,
)


def _draw_tokens(logits: torch.Tensor, row: torch.Tensor, position: torch.Tensor, keys: SamplingKeys,
                 any_sampled: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw tokens [L] from logits [L, V] of requests that use no sampling parameter except a temperature. Also return
    [L] bool: whether the logit of the chosen token is not finite; the token is then 0."""
    best = choose_scaled(scale(logits, row, keys) if any_sampled else logits, row, position, keys, any_sampled)
    bad = ~logits.gather(1, best[:, None]).squeeze(1).isfinite()
    return best.masked_fill(bad, 0), bad


draw_tokens = Operation(
    _draw_tokens,
    native_kernel("outrider.kernels.cpu:draw_tokens", FLOAT32, "outrider.kernels.cpu.checks:takes_draw"),
    triton_kernel("outrider.kernels.gpu.sampling.draw:draw_tokens", FLOAT32),
    name="draw_tokens", exact=Exactness.ROW_BY_ROW,
)
