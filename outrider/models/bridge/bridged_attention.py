"""The engine's attention as an attention function of transformers, and the function that outlines a model with it.

transformers' attention modules call the function that their config names with q, k and v of the token rows of one
sequence. Here that sequence is a step's ragged batch, and the engine's mixer separates the rows of different
requests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from importlib import import_module
from typing import Any

import torch
import torch.nn.functional as F

from outrider.models.bridge.current_step import CurrentStep
from outrider.models.bridge.installed import import_transformers

NAME = "outrider"  # transformers makes no masks for it
OUTLINE = "outrider_outline"  # masks are described by `describe_mask`, calls by the recorder of the module
CALLED = "outrider_attention"  # attribute of an attention module: what its function calls


class StepAttention:
    """The attention of one layer over the pages of the current step."""

    def __init__(self, layer: int, head_dim: int, step: CurrentStep) -> None:
        self.layer, self.head_dim, self.step = layer, head_dim, step

    def __call__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **_: Any) -> torch.Tensor:
        """Attend, and return [1, tokens, heads, value dim]. q: [1, heads, tokens, dim]; k, v: [1, kv heads, tokens,
        dim]. Keys and values of different sizes are padded to the cache's size."""
        num_tokens, value_dim = q.shape[2], v.shape[3]
        if q.is_meta:
            return q.new_empty(1, num_tokens, q.shape[1], value_dim)
        rows = [self._padded(part[0].transpose(0, 1)) for part in (q, k, v)]
        out = self.step.mixer(self.layer)(*rows).view(1, num_tokens, q.shape[1], self.head_dim)
        return out if value_dim == self.head_dim else out[..., :value_dim]

    def _padded(self, rows: torch.Tensor) -> torch.Tensor:
        """Pad rows [tokens, heads, dim] to the cache's size, with the heads of a token side by side, which is the order
        that kernels are compiled for."""
        missing = self.head_dim - rows.shape[-1]
        if missing:
            return F.pad(rows, (0, missing))
        return rows if rows.stride(1) == rows.shape[2] and rows.stride(2) == 1 else rows.contiguous()


def _attend(module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
            attention_mask: torch.Tensor | None, **options: Any) -> tuple[torch.Tensor, None]:
    """The attention function that transformers' modules call. It passes each call to the object stored in the module's
    attribute `CALLED`."""
    return getattr(module, CALLED)(query, key, value, attention_mask=attention_mask, **options), None


class MaskDescriptions:
    """Makes a placeholder tensor for each mask that transformers' code asks for while the model is outlined, and
    records the mask's window."""

    def __init__(self) -> None:
        self._windows: dict[int, tuple[torch.Tensor, int | None]] = {}

    def describe(self, *, q_length: int, kv_length: int, mask_function: Callable[..., Any],
                 local_size: int | None = None, **_: Any) -> torch.Tensor:
        mask = torch.empty(1, 1, q_length, kv_length, dtype=torch.bool, device="meta")
        self._windows[id(mask)] = mask, _window_of(mask_function, local_size)
        return mask

    def window(self, mask: torch.Tensor) -> int | None:
        return self._windows[id(mask)][1]

    def __contains__(self, mask: torch.Tensor) -> bool:
        return id(mask) in self._windows


def _window_of(mask_function: Callable[..., Any], local_size: int | None) -> int | None:
    """Find the window of a mask by evaluating the mask at tokens around the window's edges. Returns None if a token
    sees all tokens before it. Raises ValueError for a mask of another form."""
    reach = local_size or 8
    queries = torch.tensor([0, 1, reach - 1, reach, reach + 1, 2 * reach + 3])
    offsets = torch.tensor([-1, 0, 1, reach - 1, reach, reach + 1])
    query = queries[:, None].expand(-1, len(offsets))
    key = query - offsets
    zero = torch.zeros((), dtype=torch.int64)
    seen = torch.as_tensor(mask_function(zero, zero, query, key)).expand(key.shape) & (key >= 0)
    causal = (key <= query) & (key >= 0)
    for window in (local_size, None):
        expected = causal if window is None else causal & (query - key < window)
        if torch.equal(seen, expected):
            return window
    raise ValueError("the model's attention mask is neither causal nor a sliding window")


_DESCRIBED: ContextVar[MaskDescriptions] = ContextVar("masks of the outline that is being made")


def _describe_mask(**options: Any) -> torch.Tensor:
    return _DESCRIBED.get().describe(**options)


def register_attention() -> None:
    """Register the two attention functions with transformers. A second call changes nothing."""
    import_transformers()
    functions = import_module("transformers.modeling_utils").ALL_ATTENTION_FUNCTIONS
    masks = import_module("transformers.masking_utils").ALL_MASK_ATTENTION_FUNCTIONS
    for name in (NAME, OUTLINE):
        functions.register(name, _attend)
    masks.register(OUTLINE, _describe_mask)


@contextmanager
def describing(masks: MaskDescriptions) -> Iterator[None]:
    """Context manager: masks requested inside it are described in `masks`."""
    token = _DESCRIBED.set(masks)
    try:
        yield
    finally:
        _DESCRIBED.reset(token)


def use_function(model: torch.nn.Module, name: str) -> None:
    """Make all attention modules of a model call the attention function of this name."""
    configs = {id(module.config): module.config for module in model.modules() if hasattr(module, "config")}
    for config in configs.values():
        config._attn_implementation = name
