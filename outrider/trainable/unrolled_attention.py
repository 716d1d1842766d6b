"""Attention of one training pass (see `eagle3_network.py`): each query sees the keys of pass 0 up to its slot, and one
key of each later pass.

There are two implementations. `dense_attention` stores all scores and leaves gradients to autograd; it defines the
result. `flash_attention` gives the keys of pass 0 to torch's flash kernels, which store no scores, and adds the other
keys with the log-sum-exp that these kernels return. In the backward pass the flash kernels get the log-sum-exp and the
output over *all* keys. They derive each key's softmax weight from the log-sum-exp, so they compute the right gradients
for their own keys.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from outrider.trainable.named_layers import wide

MAX_HEAD_DIM = 256
LEAST_CAPABILITY = (8, 0)
aten = torch.ops.aten


def attend(query: torch.Tensor, keys: Sequence[torch.Tensor], values: Sequence[torch.Tensor],
           scale: float) -> torch.Tensor:
    """Attend for query [texts, heads, count, dim] to keys and values [texts, kv heads, count, dim] of each pass.
    Returns [texts, heads, count, dim]."""
    way = flash_attention if _takes_flash(query) else dense_attention
    return way(query, keys, values, scale)


def _takes_flash(query: torch.Tensor) -> bool:
    """Whether torch's flash kernels serve this device, dtype and head size."""
    is_narrow, dim = query.dtype in (torch.bfloat16, torch.float16), query.shape[-1]
    return (query.is_cuda and is_narrow and dim % 8 == 0 and dim <= MAX_HEAD_DIM
            and torch.cuda.get_device_capability(query.device) >= LEAST_CAPABILITY)


def dense_attention(query: torch.Tensor, keys: Sequence[torch.Tensor], values: Sequence[torch.Tensor],
                    scale: float) -> torch.Tensor:
    kv_heads, count = keys[0].shape[1], query.shape[2]
    query = query.unflatten(1, (kv_heads, -1))  # [texts, kv heads, group, count, dim]
    shared = query.flatten(2, 3) @ keys[0].transpose(-1, -2)
    is_later = torch.ones(count, count, dtype=torch.bool, device=query.device).triu(1)
    scores = [shared.unflatten(2, (-1, count)).masked_fill(is_later, float("-inf"))]
    scores += [(query * key[:, :, None]).sum(dim=-1, keepdim=True) for key in keys[1:]]
    shares = (torch.cat([wide(score) for score in scores], dim=-1) * scale).softmax(dim=-1)
    filled = shares[..., :count].flatten(2, 3).to(values[0].dtype) @ values[0]
    mixed = filled.unflatten(2, (-1, count))
    for index, value in enumerate(values[1:]):
        mixed = mixed + shares[..., count + index, None] * value[:, :, None]
    return mixed.flatten(1, 2)


def flash_attention(query: torch.Tensor, keys: Sequence[torch.Tensor], values: Sequence[torch.Tensor],
                    scale: float) -> torch.Tensor:
    group = query.shape[1] // keys[0].shape[1]
    keys = [key.repeat_interleave(group, dim=1) for key in keys]
    values = [value.repeat_interleave(group, dim=1) for value in values]
    mixed: torch.Tensor = _FlashAttention.apply(scale, query.contiguous(), *keys, *values)
    return mixed


class _FlashAttention(torch.autograd.Function):
    """Attention by torch's flash kernels, with gradients. Tensors are [texts, heads, count, dim]."""

    @staticmethod
    def forward(ctx: Any, scale: float, query: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
        half = len(others) // 2
        keys, values = others[:half], others[half:]
        mixed, log_sum, rest = _flash(query, keys[0], values[0], scale)
        if half > 1:
            own = torch.stack([wide(query * key).sum(dim=-1) for key in keys[1:]], dim=-1) * scale
            whole = torch.logaddexp(log_sum, own.logsumexp(dim=-1))  # [texts, heads, count]
            total = wide(mixed) * (log_sum - whole).exp()[..., None]
            for index, value in enumerate(values[1:]):
                total = total + (own[..., index] - whole).exp()[..., None] * value
            mixed, log_sum = total.to(query.dtype), whole
        ctx.scale, ctx.rest = scale, rest
        ctx.save_for_backward(query, *others, mixed, log_sum)
        return mixed

    @staticmethod
    def backward(ctx: Any, *outer: torch.Tensor) -> Any:
        query, *others, mixed, log_sum = ctx.saved_tensors
        half = len(others) // 2
        keys, values, gradient = others[:half], others[half:], outer[0].to(query.dtype).contiguous()
        of_query, of_key, of_value = _flash_backward(gradient, query, keys[0], values[0], mixed, log_sum, ctx.rest,
                                                     ctx.scale)
        of_keys, of_values = [of_key], [of_value]
        offset = wide(gradient * mixed).sum(dim=-1)
        for key, value in zip(keys[1:], values[1:], strict=True):
            share = (wide(query * key).sum(dim=-1) * ctx.scale - log_sum).exp()
            of_score = (share * (wide(gradient * value).sum(dim=-1) - offset) * ctx.scale)[..., None].to(query.dtype)
            of_query = of_query + of_score * key
            of_keys.append(of_score * query)
            of_values.append(share[..., None].to(query.dtype) * gradient)
        return None, of_query, *of_keys, *of_values


def _flash(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
           scale: float) -> tuple[torch.Tensor, torch.Tensor, tuple[Any, ...]]:
    """Run causal flash attention: (output, log-sum-exp [texts, heads, count], further arguments of the backward
    kernel)."""
    if query.is_cuda:
        mixed, log_sum, *rest = aten._scaled_dot_product_flash_attention(query, key, value, 0.0, True, scale=scale)
        return mixed, log_sum, tuple(rest[:6])
    mixed, log_sum = aten._scaled_dot_product_flash_attention_for_cpu(query, key, value, 0.0, True, scale=scale)
    return mixed, log_sum, ()


def _flash_backward(gradient: torch.Tensor, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
                    mixed: torch.Tensor, log_sum: torch.Tensor, rest: tuple[Any, ...],
                    scale: float) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    if query.is_cuda:
        cum_query, cum_key, max_query, max_key, seed, offset = rest
        found = aten._scaled_dot_product_flash_attention_backward(
            gradient, query, key, value, mixed, log_sum, cum_query, cum_key, max_query, max_key, 0.0, True, seed,
            offset, scale=scale)
    else:
        found = aten._scaled_dot_product_flash_attention_for_cpu_backward(
            gradient, query, key, value, mixed, log_sum, 0.0, True, scale=scale)
    of_query, of_key, of_value = found
    return of_query, of_key, of_value
