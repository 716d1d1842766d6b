"""Plain torch versions of the kernels. They define each operation, and run where no kernel serves.

They work on any device and floating type; 16-bit inputs are computed in float32. All tensor operations have fixed
shapes, and nothing is read from the device to the host. This file does not depend on layers, models or batches."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from outrider.kernels.sampling_keys import CountTable

if TYPE_CHECKING:
    from outrider.kernels.cpu.products import CpuProduct

# Most gathered key elements at a time; bounds the memory of attention over long page tables.
MAX_GATHERED = 1 << 24
MAX_WIDENED = 8192  # weight rows widened at a time


def widened(x: Tensor) -> Tensor:
    """Return the tensor in float32 if its type is narrower, since sums are made in float32 at least."""
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


# Norms


def rms_norm(x: Tensor, weight: Tensor, eps: float, rounding: int = 0) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last axis. rounding: if not 0, the products that follow round token
    rows to fp8 in groups of this many columns, and a kernel may do that rounding here."""
    wide = widened(x)
    return F.rms_norm(wide, (x.shape[-1],), weight.to(wide.dtype), eps).to(x.dtype)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float, rounding: int = 0) -> Tensor:
    """Add x to the residual in place, and return the norm of the sum."""
    return rms_norm(residual.add_(x), weight, eps)


def gated_norm(y: Tensor, z: Tensor, weight: Tensor, group_size: int, eps: float, gate_first: bool,
               activation: str = "silu") -> Tensor:
    """RMS norm of y over groups of columns, with a gate silu(z) or sigmoid(z) that multiplies y before the norm
    (`gate_first`) or the result after it. y and z [tokens, size].

    weight [size], or [group_size] for all groups. The result has z's dtype.
    """
    gate = {"silu": F.silu, "sigmoid": torch.sigmoid}[activation](widened(z))
    x = widened(y) * gate if gate_first else widened(y)
    groups = x.unflatten(1, (-1, group_size))
    x = (F.rms_norm(groups, (group_size,), None, eps) * widened(weight).view(-1, group_size)).flatten(1)
    return (x if gate_first else x * gate).to(z.dtype)


# Activations


def silu_mul(gate_up: Tensor, rounding: int = 0) -> Tensor:
    """silu(gate) * up of gate_up [tokens, 2 x width], gate first. rounding: as in `rms_norm`."""
    gate, up = widened(gate_up).chunk(2, dim=-1)
    return (F.silu(gate) * up).to(gate_up.dtype)


def gelu_tanh_mul(gate_up: Tensor, rounding: int = 0) -> Tensor:
    """Like silu_mul, with the tanh form of gelu."""
    gate, up = widened(gate_up).chunk(2, dim=-1)
    return (F.gelu(gate, approximate="tanh") * up).to(gate_up.dtype)


SWIGLU_LIMIT, SWIGLU_GAIN = 7.0, 1.702  # of `clamped_swiglu`


def clamped_swiglu(x: Tensor) -> Tensor:
    """x [.., 2 * width], gate and up -> gate * sigmoid(1.702 gate) * (up + 1), with gate at most 7 and up from -7 to 7.
    """
    gate, up = widened(x).chunk(2, dim=-1)
    gate, up = gate.clamp(max=SWIGLU_LIMIT), up.clamp(-SWIGLU_LIMIT, SWIGLU_LIMIT)
    return (gate * torch.sigmoid(SWIGLU_GAIN * gate) * (up + 1)).to(x.dtype)


def limited_silu_mul(gate_up: Tensor, limit: float) -> Tensor:
    """Like silu_mul, with gate at most `limit` and up from -limit to limit."""
    gate, up = widened(gate_up).chunk(2, dim=-1)
    return (F.silu(gate.clamp(max=limit)) * up.clamp(-limit, limit)).to(gate_up.dtype)


def relu2(x: Tensor) -> Tensor:
    """The square of relu(x)."""
    return F.relu(x).square()


def sigmoid_scale(x: Tensor, gate: Tensor) -> Tensor:
    """x * sigmoid(gate), both [tokens, width], or [tokens, 1] for a gate of the whole token row."""
    return x * gate.sigmoid()


def gelu_scale(gate: Tensor, x: Tensor) -> Tensor:
    """gelu(gate) * x in the tanh form of gelu, both [tokens, width]."""
    return F.gelu(gate, approximate="tanh") * x


def cap_logits(logits: Tensor, cap: float) -> Tensor:
    """cap * tanh(logits / cap), in place."""
    return logits.div_(cap).tanh_().mul_(cap)


# Rope and cache write


def rotate(x: Tensor, cos: Tensor, sin: Tensor, rotary_dim: int) -> Tensor:
    """Rotate the first rotary_dim elements of each head of x [tokens, heads, dim]: element i together with element i +
    rotary_dim / 2.

    cos and sin [tokens, rotary_dim / 2], or [tokens, rotary_dim] with a value for each half.
    """
    half = rotary_dim // 2
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    a, b = x[..., :half], x[..., half:rotary_dim]
    first = a * cos[..., :half] - b * sin[..., :half]
    second = b * cos[..., -half:] + a * sin[..., -half:]
    return torch.cat((first, second, x[..., rotary_dim:]), dim=-1)


def write_slots(cache: Tensor, values: Tensor, slots: Tensor) -> None:
    """Write values [tokens, heads, dim] to their slots of cache [pages, page_size, heads, dim]; slot -1 writes nothing.

    To keep shapes fixed, a token without a slot repeats the write of a token that has one. If no token has one, slot 0
    is overwritten with what it holds.
    """
    if values.shape[0] == 0:
        return
    has_slot = slots >= 0
    donor = has_slot.to(torch.uint8).argmax(keepdim=True)  # one element: a 0-dim index would be read by the host
    target = torch.where(has_slot, slots, slots[donor].clamp(min=0))
    page, offset = target // cache.shape[1], target % cache.shape[1]
    values = torch.where(has_slot[:, None, None], values, values[donor])
    values = torch.where(has_slot.any(), values.to(cache.dtype), cache[page, offset])
    cache.index_put_((page, offset), values)


def contain_non_finite(k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Keep a non-finite token from spoiling other requests: k and v [tokens, heads, dim] are about to be written to a
    cache. The token gets keys of NaN, so that every token that may attend to it fails, and values of 0, because a token
    that must not see it multiplies its value by 0, and 0 x NaN is NaN."""
    is_finite = (k.isfinite() & v.isfinite()).all(dim=(1, 2), keepdim=True)
    return torch.where(is_finite, k, torch.nan), torch.where(is_finite, v, 0)


def rope_write(
    qkv: Tensor,
    positions: Tensor,
    cos: Tensor,
    sin: Tensor,
    slots: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    eps: float = 1e-6,
    rotary_dim: int | None = None,
) -> None:
    """Norm and rotate q and k of qkv [tokens, (heads + 2 kv heads) x dim] in place, and write k and v to their slots.

    positions and slots [tokens] int64, slot = page x page_size + offset; cos and sin [max_len, rotary_dim / 2 or
    rotary_dim]; caches [pages, page_size, kv heads, dim] with any page stride. q_norm and k_norm [dim] are the weights
    of RMS norms over each head, before the rotation.
    """
    kv_heads, dim = k_cache.shape[2:]
    heads = qkv.shape[1] // dim - 2 * kv_heads
    q, k, v = qkv.view(qkv.shape[0], -1, dim).split((heads, kv_heads, kv_heads), dim=1)
    angles = cos[positions], sin[positions]
    for part, weight in ((q, q_norm), (k, k_norm)):
        normed = part if weight is None else rms_norm(part, weight, eps)
        part.copy_(rotate(widened(normed), *angles, rotary_dim or dim))
    k, v = contain_non_finite(k, v)
    write_slots(k_cache, k, slots)
    write_slots(v_cache, v, slots)


# Paged attention


def token_places(query_starts: Tensor, lengths: Tensor, live: Tensor, num_tokens: int) -> tuple[Tensor, Tensor, Tensor]:
    """For each token row: its request (clamped), its position, and whether it is live."""
    token = torch.arange(num_tokens, device=query_starts.device)
    request = torch.searchsorted(query_starts[1:].contiguous(), token, right=True)
    owned = request < lengths.shape[0]
    request = request.clamp(max=lengths.shape[0] - 1)
    index = token - query_starts[request]
    return request, lengths[request] - live[request] + index, owned & (index < live[request])


def paged_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor,
    query_starts: Tensor,
    lengths: Tensor,
    live: Tensor,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    key_starts: Tensor | None = None,
    sinks: Tensor | None = None,
    is_chunked: bool = False,
) -> Tensor:
    """Causal attention of q [tokens, heads, dim] to each request's cached keys: [tokens, heads, dim]; dead tokens give
    zeros.

    Token i of request r (of tokens query_starts[r] to query_starts[r + 1]) is live if i < live[r]. Its position is
    lengths[r] - live[r] + i, and it sees the keys from position - window + 1 (or 0 without a window) to its position,
    but none before key_starts[r]. is_chunked: the window does not slide but begins at position - position % window.
    sinks [heads]: the score of one more key that every token sees, whose value is 0. page_table [requests, columns]; a
    key that no token sees is never used, whatever its page holds.
    """
    if lengths.shape[0] == 0:
        return torch.zeros_like(q)
    request, position, is_live = token_places(query_starts, lengths, live, q.shape[0])
    key = torch.arange(page_table.shape[1] * k_cache.shape[1], device=q.device)
    visible = is_live[:, None] & (key <= position[:, None])
    if window > 0:
        first = position - position % window if is_chunked else position - window + 1
        visible &= key >= first[:, None]
    if key_starts is not None:
        visible &= key >= key_starts[request][:, None]
    table = page_table.clamp(0, k_cache.shape[0] - 1)
    chunk = max(1, MAX_GATHERED // max(1, len(key) * k_cache.shape[2] * k_cache.shape[3]))
    parts = [
        _attend(q_rows, k_cache, v_cache, table[rows], seen, scale, softcap, sinks)
        for q_rows, rows, seen in zip(q.split(chunk), request.split(chunk), visible.split(chunk), strict=True)
    ]
    return torch.cat(parts).to(q.dtype) if parts else torch.zeros_like(q)


def _attend(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, table: Tensor, visible: Tensor, scale: float, softcap: float,
    sinks: Tensor | None,
) -> Tensor:
    """Attend with q [tokens, heads, dim] to the visible keys; table [tokens, columns]; visible [tokens, keys]."""
    tokens, heads, dim = q.shape
    kv_heads = k_cache.shape[2]
    shape = (tokens, visible.shape[1], kv_heads, dim)
    seen = visible[:, :, None, None]
    k = torch.where(seen, widened(k_cache[table].reshape(shape)), 0.0)
    v = torch.where(seen, widened(v_cache[table].reshape(shape)), 0.0)
    grouped = widened(q).reshape(tokens, kv_heads, heads // kv_heads, dim)
    scores = torch.einsum("thgd,tshd->thgs", grouped, k) * scale
    if softcap > 0:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~visible[:, None, None, :], float("-inf"))
    if sinks is not None:
        sink = sinks.to(scores.dtype).view(1, kv_heads, -1, 1).expand(tokens, -1, -1, 1)
        scores = torch.cat((scores, sink), dim=-1)
    weights = torch.softmax(scores, dim=-1)[..., : visible.shape[1]].masked_fill(~visible[:, None, None, :], 0.0)
    return torch.einsum("thgs,tshd->thgd", weights, v).reshape(tokens, heads, dim)


# Products


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Multiply x [tokens, inputs] with weight [outputs, inputs]: [tokens, outputs]."""
    return F.linear(x, weight, bias)


def prepare_linear(weight: Tensor, bias: Tensor | None = None, packed: bool = False) -> CpuProduct | None:
    """Prepare many products with one weight [outputs, inputs]. Returns None if `linear` needs no preparation. packed: a
    second copy of the weight is allowed."""
    return None


def linear_wide(x: Tensor, weight: Tensor) -> Tensor:
    """Multiply in float32 if the operands have 16 bits, otherwise in the operands' dtype."""
    parts = [F.linear(widened(x), widened(rows)) for rows in weight.split(MAX_WIDENED)]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)


# Token rows


def take_rows(first: Tensor, second: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
    """Return (first[index], second[index]); the same tensor twice if `first` is `second`."""
    taken = first[index]
    return taken, taken if first is second else second[index]


# Text


def find_ngram(tokens: Tensor, known: Tensor, rows: Tensor, width: int, num_wanted: int, min_n: int,
               max_n: int) -> tuple[Tensor, Tensor]:
    """Look up the last tokens of each row in its earlier text, and return the tokens that followed there: ([requests,
    num_wanted] tokens, [requests] how many of them are valid).

    tokens [ROWS, length]: a row's text is its first known [ROWS] tokens, or the first `width` if that is less. The
    longest suffix of max_n down to min_n tokens that occurred before is used; of several occurrences, the latest.
    """
    history = tokens[rows, :width]
    length = known[rows].clamp_max(width)
    position = torch.arange(history.shape[1], device=history.device)
    last = (length - 1)[:, None]
    matched = torch.zeros_like(history)  # tokens up to here that equal the last ones of the row, at most max_n
    still = position < last  # an occurrence must end before the end
    for back in range(max_n):
        wanted = history.gather(1, (last - back).clamp_min(0))
        shifted = history.roll(back, dims=1) if back else history
        still = still & (shifted == wanted) & (position >= back) & (last >= back)
        matched = matched + still
    score = torch.where(matched >= min_n, matched * history.shape[1] + position, -1)
    best, at = score.max(dim=1)
    follow = at[:, None] + 1 + torch.arange(num_wanted, device=history.device)
    found = history.gather(1, follow.clamp_max(history.shape[1] - 1))
    return found, torch.where(best >= 0, (length - at - 1).clamp(0, num_wanted), 0)


# Sampling


def count_runs(row: Tensor, run: Tensor, run_len: Tensor, counts: CountTable) -> None:
    """Add 1 to the count of token run[i, j] in row[i] for every j < run_len[i]. Does nothing if no counts are
    allocated. The tensors are int64, and run is [requests, most]."""
    if counts.packed is None:
        return
    is_in = torch.arange(run.shape[1], device=run.device) < run_len[:, None]
    cells = (row[:, None] * counts.width + run).flatten()
    counts.packed.view(-1).index_add_(0, cells, is_in.flatten().to(torch.int32))
