"""Residual streams: several copies of the residual stream side by side in each token row, with learned gates that read
and write them. These are the plain torch references of the kernels.

A token row holds its streams as [num_streams x hidden]. There are two ways to read and write them. In Qwen4-Exp a layer
reads a gated mean of the normed streams and adds its result to each stream, scaled by a weight of that stream
(`join_streams`, `stream_gates`, `mix_streams`). In hyper-connections (GLM5-Next, HY-V4) a layer reads a weighted sum,
and the streams are mixed with each other when it writes (`read_streams`, `write_streams`). Every function treats each
token row by itself.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

LEAST_GATE = 1e-6


def join_streams(x: Tensor | None, weights: Tensor | None, streams: Tensor, gain: Tensor, eps: float,
                 num_streams: int) -> Tensor:
    """Add x [tokens, hidden], scaled by weights [tokens, num_streams], to each stream of streams [tokens, num_streams x
    hidden], in place; without x nothing is added. Returns the RMS norm of each stream by itself, scaled by gain
    [num_streams x hidden]."""
    if x is not None and weights is not None:
        streams.add_((x[:, None, :] * weights[:, :, None]).flatten(1))
    wide = streams.to(torch.promote_types(streams.dtype, torch.float32)).unflatten(1, (num_streams, -1))
    normed = wide * torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + eps)
    return (normed.flatten(1) * gain).to(streams.dtype)


def stream_gates(projected: Tensor, num_streams: int, has_weights: bool) -> tuple[Tensor, Tensor]:
    """Compute gates from projected [tokens, low rank | num_streams]: (silu of the first part, 2 x sigmoid of the
    second), both divided by the number of streams before the activation. Without weights the second result has no
    columns."""
    rank = projected.shape[1] - (num_streams if has_weights else 0)
    scaled = projected / num_streams
    return F.silu(scaled[:, :rank]), 2 * torch.sigmoid(scaled[:, rank:])


def mix_streams(gates: Tensor, normed: Tensor, num_streams: int) -> Tensor:
    """Return the mean over streams of sigmoid(gates) * normed; both arguments [tokens, num_streams x hidden], the
    result [tokens, hidden]."""
    return (torch.sigmoid(gates) * normed).unflatten(1, (num_streams, -1)).mean(dim=1)


def gate_values(keys: Tensor, queries: Tensor, values: Tensor, num_streams: int) -> Tensor:
    """Return values [tokens, hidden] once for each stream, scaled by sigmoid(g): [tokens, num_streams x hidden]. g is
    the signed square root of the product of the stream's key and query, both [tokens, num_streams x hidden]."""
    split = (num_streams, values.shape[1])
    gate = (keys.unflatten(1, split) * queries.unflatten(1, split)).sum(dim=-1) / math.sqrt(values.shape[1])
    gate = gate.abs().clamp_min(LEAST_GATE).sqrt() * gate.sign()
    return (torch.sigmoid(gate)[..., None] * values[:, None]).flatten(1)


def add_silu(values: Tensor, convolved: Tensor) -> Tensor:
    """values + silu(convolved), both [tokens, width]."""
    return values + F.silu(convolved)


def mean_streams(streams: Tensor, num_streams: int) -> Tensor:
    """Return the mean over streams [tokens, num_streams x hidden], added up in one order: [tokens, hidden]."""
    first, *others = streams.to(torch.promote_types(streams.dtype, torch.float32)).chunk(num_streams, dim=1)
    total = first
    for each in others:
        total = total + each
    return (total / num_streams).to(streams.dtype)


class StreamRule(NamedTuple):
    """The rule by which hyper-connections compute their weights from logits."""

    num_streams: int
    rms_eps: float
    eps: float  # added to weights and to sums that divide
    post_factor: float  # of the weights with which a half of a layer adds to each stream
    post_eps: float = 0.0
    num_rounds: int = 0  # of dividing mixing weights by the sums of columns and rows; 0: streams do not mix
    writes: bool = True  # False: the streams end here, and nothing is added to them

    @property
    def parts(self) -> tuple[int, ...]:
        """The numbers of logits for the weights that read, that add and that mix. Streams that do not mix, or that end
        here, have fewer parts."""
        n = self.num_streams
        return (n,) if not self.writes else (n, n, n * n) if self.num_rounds else (n, n)

    @property
    def num_logits(self) -> int:
        return sum(self.parts)


def read_streams(streams: Tensor, logits: Tensor, scale: Tensor, base: Tensor,
                 rule: StreamRule) -> tuple[Tensor, Tensor, Tensor]:
    """Read the input of half a layer (attention or MLP) from streams [tokens, n x hidden], and compute the weights with
    which it writes back.

    logits [tokens, pre n | post n | mixing n x n], float32 or wider: the product of the streams, before their norm,
    with a matrix. With twice as many columns, the two halves are added up. scale [parts] and base [logits]: scale and
    bias of each part's logits. Returns (the weighted sum of the streams [tokens, hidden], post [tokens, n], mixing
    weights [tokens, n x n]); the last two have no columns if the rule has no such part.
    """
    n, wide = rule.num_streams, streams.to(logits.dtype)
    if logits.shape[1] == 2 * rule.num_logits:
        logits = logits[:, : rule.num_logits] + logits[:, rule.num_logits :]
    rms = torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + rule.rms_eps)
    factors = torch.cat([part.expand(size) for part, size in zip(scale, rule.parts, strict=True)])
    pre, post, mixing = (logits * rms * factors + base).tensor_split((n, 2 * n), dim=1)
    pre = torch.sigmoid(pre) + rule.eps
    read = sum(pre[:, i, None] * part for i, part in enumerate(wide.split(wide.shape[1] // n, dim=1)))
    assert isinstance(read, Tensor)
    post = rule.post_factor * torch.sigmoid(post) + rule.post_eps
    if mixing.shape[1]:
        mixing = mixing.unflatten(1, (n, n)).softmax(dim=-1) + rule.eps
        mixing = mixing / (mixing.sum(dim=1, keepdim=True) + rule.eps)
        for _ in range(rule.num_rounds - 1):
            mixing = mixing / (mixing.sum(dim=2, keepdim=True) + rule.eps)
            mixing = mixing / (mixing.sum(dim=1, keepdim=True) + rule.eps)
        mixing = mixing.flatten(1)
    return read.to(streams.dtype), post, mixing


def write_streams(streams: Tensor, x: Tensor, post: Tensor, mixing: Tensor) -> None:
    """Set stream j of streams [tokens, n x hidden], in place, to post[j] * x plus the sum over i of mixing[i, j] *
    stream i; without mixing weights, to post[j] * x plus stream j. x [tokens, hidden], post [tokens, n], mixing
    [tokens, n x n or 0]."""
    n, size = post.shape[1], x.shape[1]
    parts = streams.to(post.dtype).split(size, dim=1)
    made = []
    for j in range(n):
        total = x.to(post.dtype) * post[:, j, None]
        for i in range(n) if mixing.shape[1] else (j,):
            total = total + (parts[i] * mixing[:, i * n + j, None] if mixing.shape[1] else parts[i])
        made.append(total)
    streams.copy_(torch.cat(made, dim=1))
