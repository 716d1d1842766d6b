"""Recurrences of Mamba-2, gated delta and KDA layers in plain torch: one token of many rows, or many tokens of one
request.

A *step* function is the recurrence itself, token by token, and the specification. A *scan* function computes the same
in chunks, with matrix products in place of a loop over tokens. Arithmetic is in float32, or in float64 for float64
inputs, with fixed shapes and no host reads. This file does not depend on layers or requests.

A token that is not finite makes its own result and those of the later tokens NaN, in scans as in steps. Products over a
chunk multiply later tokens by 0, and 0 x NaN is NaN, so a scan computes with zeros from that token on and puts NaN into
the results at the end."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

SHORT_RUN = 4  # runs of known tokens up to this length go token by token, longer ones are scanned
CHUNK = 64  # tokens that products handle at once; work within a chunk grows with its square
CHANNEL_CHUNK = 16  # the same where every key channel decays by itself: its decays have an axis more
NORM_EPS = 1e-6  # added to the squared lengths of q and k


class ScanTarget(NamedTuple):
    """A boundary among the tokens of a request that is scanned, as the host knows it."""

    request: int
    target: int
    offset: int  # known tokens of the step before the boundary, if the row is where the host thinks


class CheckpointTargets(NamedTuple):
    """Checkpoints that a step may write, by request: request r has entries starts[r] to starts[r + 1] - 1. int64."""

    starts: Tensor  # [requests + 1]
    request: Tensor  # [targets]
    boundary: Tensor  # [targets] tokens that the state has seen; -1 where nothing is to be written
    pages: Tensor  # [targets, pages of a checkpoint]
    scans: tuple[ScanTarget, ...] = ()  # for backends that do not find boundaries on the device


# The convolution before the recurrence


def causal_conv(inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return silu of a causal convolution of each channel; see `plain_conv`."""
    return F.silu(plain_conv(inputs, weight, bias))


def plain_conv(inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Convolve each channel: inputs [.., width - 1 + tokens, channels] -> [.., tokens, channels].

    weight [width, channels]; the last tap is multiplied with the token itself. Taps are added one after another, so
    that a token's result has the same bits in a call with one token and with many.
    """
    width = weight.shape[0]
    tokens = inputs.shape[-2] - width + 1
    inputs = inputs.to(weight.dtype)
    total = inputs[..., :tokens, :] * weight[0]
    for tap in range(1, width):
        total = total + inputs[..., tap : tap + tokens, :] * weight[tap]
    return total if bias is None else total + bias


# Mamba-2: S <- exp(A dt) S + dt x B', y = S C + D x


def mamba2_step(
    state: Tensor, x: Tensor, dt: Tensor, b: Tensor, c: Tensor, decay: Tensor, skip: Tensor
) -> tuple[Tensor, Tensor]:
    """Advance Mamba-2 by one token: state [rows, heads, dim, n], x [rows, heads, dim], dt [rows, heads], b and c [rows,
    groups, n], decay (A, below zero) and skip (D) [heads]. Returns (y [rows, heads, dim], the new state)."""
    b, c = (_of_heads(part, x.shape[1], dim=1)[:, :, None] for part in (b, c))
    state = state * (dt * decay).exp()[:, :, None, None] + (x * dt[..., None])[..., None] * b
    return (state * c).sum(dim=-1) + x * skip[:, None], state


def mamba2_scan(
    state: Tensor, x: Tensor, dt: Tensor, b: Tensor, c: Tensor, decay: Tensor, skip: Tensor
) -> tuple[Tensor, Tensor]:
    """Run Mamba-2 over the tokens of one request, in chunks: state [heads, dim, n]; the other arguments are those of
    `mamba2_step` with [tokens, ..] instead of [rows, ..]."""
    num_tokens, num_heads = dt.shape
    xdt = x * dt[..., None]
    is_finite = _finite_so_far(xdt, b)
    xdt, dt, b = _zero_unless(is_finite, xdt, dt, b)
    # Beyond the last token dt is 0: nothing decays and nothing is added.
    xdt = _chunked(xdt, CHUNK).transpose(1, 2)  # [chunks, heads, chunk, dim]
    log_decay = _chunked(dt * decay, CHUNK).transpose(1, 2)  # [chunks, heads, chunk]
    b, c = _chunked(b, CHUNK).transpose(1, 2), _chunked(c, CHUNK).transpose(1, 2)  # [chunks, groups, chunk, n]
    between = _decay_between(log_decay)
    since_start = log_decay.cumsum(dim=-1).exp()[..., None]
    scores = _of_heads(c @ b.transpose(-1, -2), num_heads, dim=1) * between
    b, c = _of_heads(b, num_heads, dim=1), _of_heads(c, num_heads, dim=1)
    added = (xdt * between[..., -1, :, None]).transpose(-1, -2) @ b  # [chunks, heads, dim, n]
    before = []
    for chunk_decay, chunk_added in zip(since_start[:, :, -1:], added, strict=True):
        before.append(state)
        state = state * chunk_decay + chunk_added
    y = scores @ xdt + since_start * (c @ torch.stack(before).transpose(-1, -2))
    return _nan_unless(is_finite, _unchunked(y, num_tokens) + x * skip[:, None], state)


# The gated delta rule: S <- S diag(exp(g)), S <- S + beta (v - S k) k', y = S q. In gated delta layers all key channels
# of a head decay together; in KDA (Kimi delta attention) each has a decay of its own.


def delta_step(
    state: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor
) -> tuple[Tensor, Tensor]:
    """Advance the gated delta rule by one token: state [rows, heads, v dim, k dim], q and k [rows, key heads, k dim], v
    [rows, heads, v dim], g (the logarithm of the decay) [rows, heads, 1] or [rows, heads, k dim], beta [rows, heads].
    Returns (y [rows, heads, v dim], the new state)."""
    q, k = (_of_heads(part, v.shape[1], dim=1)[:, :, None] for part in _unit_lengths(q, k))
    state = state * g.exp()[:, :, None]
    error = (v - (state * k).sum(dim=-1)) * beta[..., None]
    state = state + error[..., None] * k
    return (state * q).sum(dim=-1), state


def delta_scan(
    state: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor
) -> tuple[Tensor, Tensor]:
    """Run the gated delta rule over the tokens of one request, in chunks: state [heads, v dim, k dim]; the other
    arguments are those of `delta_step` with [tokens, ..] instead of [rows, ..].

    Within a chunk every token corrects what the state and the tokens before it predict. This is a triangular system of
    equations, whose right side is linear in the state at the chunk's beginning.
    """
    num_tokens, num_heads = beta.shape
    is_finite = _finite_so_far(k, v, beta, g.exp())  # a decay to nothing has a logarithm of minus infinity
    k, v, g, beta = _zero_unless(is_finite, k, v, g, beta)
    size = CHUNK if g.shape[2] == 1 else min(CHUNK, CHANNEL_CHUNK)
    # Beyond the last token g and beta are 0: nothing decays and nothing is corrected.
    q, k = (_chunked(_of_heads(part, num_heads, dim=1), size).transpose(1, 2) for part in _unit_lengths(q, k))
    v, g, beta = (_chunked(part, size).transpose(1, 2) for part in (v, g, beta))  # [chunks, heads, chunk, ..]
    beta = beta[..., None]
    since_start = g.cumsum(dim=-2).exp()
    products, scores, to_end = _decayed_products(q, k, g)
    system = products * beta  # its diagonal is taken as ones
    right = torch.cat((v * beta, k * beta * since_start), dim=-1)
    solved = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
    values, predicting = solved.split((v.shape[-1], k.shape[-1]), dim=-1)
    q, k = q * since_start, k * to_end
    outputs = []
    for i in range(g.shape[0]):
        turned = state.transpose(-1, -2)
        corrections = values[i] - predicting[i] @ turned
        outputs.append(q[i] @ turned + scores[i] @ corrections)
        state = state * since_start[i, :, -1:] + corrections.transpose(-1, -2) @ k[i]
    return _nan_unless(is_finite, _unchunked(torch.stack(outputs), num_tokens), state)


def _decayed_products(q: Tensor, k: Tensor, g: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the products k k' and q k' [chunks, heads, chunk, chunk] of each token with those before it, decayed by
    the tokens between them, and the share of each token's addition that is left at the chunk's end [chunks, heads,
    chunk, 1 or k dim]. q and k [chunks, heads, chunk, k dim], g [chunks, heads, chunk, 1 or k dim]."""
    if g.shape[-1] == 1:
        between = _decay_between(g[..., 0])
        return k @ k.transpose(-1, -2) * between, q @ k.transpose(-1, -2) * between, between[..., -1, :, None]
    made = [_channel_products(*chunk) for chunk in zip(q, k, g, strict=True)]
    products, scores, to_end = map(torch.stack, zip(*made, strict=True))
    return products, scores, to_end


def _channel_products(q: Tensor, k: Tensor, g: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The products, scores and decays of one chunk (without the axis of chunks) whose key channels decay separately."""
    between = _decay_between(g.transpose(-1, -2)).permute(0, 2, 3, 1)  # [heads, i, j, k dim]
    decayed = between * k[:, None]  # the key of token j as it is left at token i
    return (decayed @ k[..., None])[..., 0], (decayed @ q[..., None])[..., 0], between[:, -1]


def _unit_lengths(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """Scale q and k to length 1 over the last axis, then q by 1 / sqrt(k dim), as attention does."""
    q = q * (q.square().sum(dim=-1, keepdim=True) + NORM_EPS).rsqrt() * q.shape[-1] ** -0.5
    return q, k * (k.square().sum(dim=-1, keepdim=True) + NORM_EPS).rsqrt()


# Tokens that are not finite


def _finite_so_far(*inputs: Tensor) -> Tensor:
    """Return [tokens]: whether a token and all tokens before it are finite in all of these inputs [tokens, ..]."""
    largest = torch.stack([part.abs().flatten(1).amax(dim=1) for part in inputs]).amax(dim=0)
    return (~(largest < torch.inf)).cumsum(dim=0) == 0


def _zero_unless(is_finite: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
    return tuple(torch.where(is_finite.view(-1, *[1] * (part.dim() - 1)), part, 0) for part in inputs)


def _nan_unless(is_finite: Tensor, y: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """Return y [tokens, heads, ..] and the state after the last token, with NaN in place of what a non-finite token
    affects: all rows of y where `is_finite` is false, and the state if it is false for the last token."""
    return torch.where(is_finite[:, None, None], y, torch.nan), torch.where(is_finite[-1], state, torch.nan)


# Heads and chunks


def _of_heads(x: Tensor, num_heads: int, dim: int) -> Tensor:
    """Repeat each group on axis `dim` for all heads of the group. Heads of a group are neighbours."""
    repeats = num_heads // x.shape[dim]
    return x if repeats == 1 else x.repeat_interleave(repeats, dim=dim, output_size=num_heads)


def _chunked(x: Tensor, most: int) -> Tensor:
    """Split [tokens, ..] into [chunks, at most `most` tokens, ..]; the last chunk is filled up with zeros."""
    size = min(most, x.shape[0])
    missing = -x.shape[0] % size
    if missing:
        x = torch.cat((x, x.new_zeros(missing, *x.shape[1:])))
    return x.unflatten(0, (-1, size))


def _unchunked(y: Tensor, num_tokens: int) -> Tensor:
    """Join [chunks, heads, tokens per chunk, ..] to [tokens, heads, ..]."""
    return y.transpose(1, 2).flatten(0, 1)[:num_tokens]


def _decay_between(log_decay: Tensor) -> Tensor:
    """Compute log_decay [.., tokens] -> [.., i, j]: the share of token j's addition that is left at token i; 0 for j
    after i.

    The logarithms of the tokens between i and j are added up. Differences of sums from the start would lose small steps
    beside large ones."""
    size = log_decay.shape[-1]
    later = torch.ones(size, size, dtype=torch.bool, device=log_decay.device).tril(-1)
    sums = torch.where(later, log_decay[..., None], 0).cumsum(dim=-2)
    return torch.where(later.T, 0, sums.exp())
