"""Residual streams: several copies of the residual stream side by side in each token row, with learned gates that read
them and write to them. The torch twins of the kernels.

A token row has streams [num_streams x hidden]. A layer reads a gated mean of the normed streams and adds its result to
each stream, scaled by a weight of that stream. Every function treats each token row alone.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

LEAST_GATE = 1e-6


def join_streams(x: Tensor | None, weights: Tensor | None, streams: Tensor, gain: Tensor, eps: float,
                 num_streams: int) -> Tensor:
    """Adds x [tokens, hidden], scaled by weights [tokens, num_streams], to each stream of streams
    [tokens, num_streams x hidden], in place. Returns the RMS norm of every stream by itself, scaled by gain
    [num_streams x hidden]. Without x nothing is added."""
    if x is not None and weights is not None:
        streams.add_((x[:, None, :] * weights[:, :, None]).flatten(1))
    wide = streams.to(torch.promote_types(streams.dtype, torch.float32)).unflatten(1, (num_streams, -1))
    normed = wide * torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + eps)
    return (normed.flatten(1) * gain).to(streams.dtype)


def stream_gates(projected: Tensor, num_streams: int, has_weights: bool) -> tuple[Tensor, Tensor]:
    """projected [tokens, low rank | num_streams] -> (silu of the first part, 2 x sigmoid of the second), both divided
    by the number of streams before. Without weights the second part has no columns."""
    rank = projected.shape[1] - (num_streams if has_weights else 0)
    scaled = projected / num_streams
    return F.silu(scaled[:, :rank]), 2 * torch.sigmoid(scaled[:, rank:])


def mix_streams(gates: Tensor, normed: Tensor, num_streams: int) -> Tensor:
    """The mean over streams of sigmoid(gates) * normed: both [tokens, num_streams x hidden] -> [tokens, hidden]."""
    return (torch.sigmoid(gates) * normed).unflatten(1, (num_streams, -1)).mean(dim=1)


def gate_values(keys: Tensor, queries: Tensor, values: Tensor, num_streams: int) -> Tensor:
    """Values [tokens, hidden] for each stream, scaled by sigmoid(g), where g is the signed root of the product of the
    stream's key and query: both [tokens, num_streams x hidden]. Returns [tokens, num_streams x hidden]."""
    split = (num_streams, values.shape[1])
    gate = (keys.unflatten(1, split) * queries.unflatten(1, split)).sum(dim=-1) / math.sqrt(values.shape[1])
    gate = gate.abs().clamp_min(LEAST_GATE).sqrt() * gate.sign()
    return (torch.sigmoid(gate)[..., None] * values[:, None]).flatten(1)


def add_silu(values: Tensor, convolved: Tensor) -> Tensor:
    """values + silu(convolved), both [tokens, width]."""
    return values + F.silu(convolved)
