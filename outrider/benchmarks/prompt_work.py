"""Counts the operations that prompts take in a benchmark, to compare their speed with that of one large product on the
same device.

The count includes the products of every prompt token with the weights that it uses (for experts, the chosen ones), and
attention over the keys that it sees. It leaves out recurrent layers, norms, drafters, and the output product of one
token.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import torch

from outrider.core import RequestOutput
from outrider.layers import Linear, find_modules
from outrider.layers.moe import MoE
from outrider.mixers import AttentionLayer
from outrider.models.base import Model
from outrider.runner.graphs.costs import best_seconds

CUDA_SIZE, CPU_SIZE = 8192, 1024
REPEATS = 5


def measure_product(device: torch.device, dtype: torch.dtype) -> float:
    """Measure torch's product of two large square matrices, and return the operations per second of the fastest of a
    few runs. On a CPU the product runs in a separate thread, as steps do, because products in the main thread take a
    different time."""
    if device.type == "cuda":
        return _measure_product(device, dtype)
    with ThreadPoolExecutor(max_workers=1) as thread:
        return thread.submit(_measure_product, device, dtype).result()


def _measure_product(device: torch.device, dtype: torch.dtype) -> float:
    size = CUDA_SIZE if device.type == "cuda" else CPU_SIZE
    left, right = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    best = best_seconds(partial(torch.matmul, left, right), device, repeats=REPEATS)
    del left, right
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return 2 * size**3 / best


class PromptWork:
    """The number of operations that a model's prompts take. A multiplication and an addition count as two."""

    def __init__(self, model: Model) -> None:
        linears = [linear for linear in find_modules([model], Linear) if linear is not model.lm_head]
        self.token_operations = 2 * sum(linear.in_features * linear.out_features for linear in linears)
        for moe in find_modules([model], MoE):
            expert_bytes = moe.experts.format.weight_bytes // moe.experts.num_experts
            self.token_operations += 2 * moe.router.rule.top_k * (expert_bytes // model.dtype.itemsize)
        self._attention = [layer for layer in model.attention_layers if isinstance(layer, AttentionLayer)]

    def total(self, lengths: Sequence[int]) -> float:
        kinds = {(layer.window, layer.is_chunked) for layer in self._attention}
        pairs = {kind: sum(visible_pairs(length, *kind) for length in lengths) for kind in kinds}
        attention = sum(4 * layer.num_heads * layer.head_dim * pairs[layer.window, layer.is_chunked]
                        for layer in self._attention)
        return sum(lengths) * self.token_operations + attention


def visible_pairs(length: int, window: int | None, is_chunked: bool = False) -> int:
    """The number of pairs of a token and a key that it attends to, over a whole prompt. is_chunked: the window does not
    slide."""
    if is_chunked and window is not None:
        return length // window * visible_pairs(window, None) + visible_pairs(length % window, None)
    full = min(length, window or length)
    return full * (full + 1) // 2 + (length - full) * full


def four_digits(value: float) -> float:
    """Round to four significant digits, because speeds of CPUs and GPUs differ a thousandfold."""
    return float(f"{value:.4g}")


def prompt_speed(operations: float, outputs: Sequence[RequestOutput],
                 product: Callable[[float], float]) -> dict[str, Any]:
    """Return the seconds until all requests had their first token, the operations per second in that time, and the
    ratio of this speed to that of a large product. operations: the operations of all prompts. product: divides a speed
    by that of the large product."""
    first = [output.metrics.first_token_time for output in outputs]
    seconds = max(t for t in first if t is not None) - min(output.metrics.arrival_time for output in outputs)
    speed = operations / seconds
    return {"prompts_s": round(seconds, 4), "prompt_tflop_s": four_digits(speed / 1e12),
            "of_product": round(product(speed), 3)}
