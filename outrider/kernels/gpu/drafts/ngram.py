"""n-gram lookup: proposes the tokens that followed the last tokens of a request's text where they occurred before. It
reads only the known tokens, not the row's whole buffer.

Each program searches one part of one row's text. If there are several parts, a second launch takes the best match of
them.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from outrider.kernels.gpu.common import cdiv, next_power_of_two, require, require_tensor
from outrider.kernels.gpu.launch.triton_kernel import kernel

_BLOCK = 1024  # tokens at a time
_PART = 4096  # tokens of a program, at least
_MOST_PARTS = 64
_LONGER = tl.constexpr(1 << 40)  # in a score: one more token that is equal counts more than any place


@triton.jit
def _best_in(text, last, begin, end, MIN_N: tl.constexpr, MAX_N: tl.constexpr, BLOCK: tl.constexpr):
    """Return the best score of a match that ends at positions begin to end - 1; -1 if there is none. Longer matches
    score higher; of equally long ones, later ones."""
    best = tl.full([], -1, dtype=tl.int64)
    for start in range(begin, end, BLOCK):
        place = start + tl.arange(0, BLOCK)
        still = place < end
        matched = tl.zeros([BLOCK], dtype=tl.int64)
        for back in tl.static_range(MAX_N):
            wanted = tl.load(text + tl.maximum(last - back, 0))
            still = still & (place >= back)
            still = still & (tl.load(text + place - back, mask=still, other=-1) == wanted)
            matched += still.to(tl.int64)
        score = tl.where(matched >= MIN_N, matched * _LONGER + place, -1)
        best = tl.maximum(best, tl.max(score, axis=0))
    return best


@triton.jit
def _store_what_follows(best, text, length, request, drafts, counts, num_wanted, DRAFTS: tl.constexpr):
    at = best % _LONGER
    count = tl.where(best >= 0, tl.minimum(length - at - 1, num_wanted), 0)
    index = tl.arange(0, DRAFTS)
    token = tl.load(text + at + 1 + index, mask=index < count, other=0)
    tl.store(drafts + request * num_wanted + index, token, mask=index < num_wanted)
    tl.store(counts + request, count)


@kernel(do_not_specialize=["width", "part_size", "num_wanted"], do_not_specialize_on_alignment=["rows"])
def _find_kernel(
    tokens, known, rows, parts, drafts, counts, stride, width, part_size, num_wanted,
    MIN_N: tl.constexpr, MAX_N: tl.constexpr, BLOCK: tl.constexpr, PARTS: tl.constexpr, DRAFTS: tl.constexpr,
):
    request, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row = tl.load(rows + request)
    text = tokens + row * stride
    length = tl.minimum(tl.load(known + row), width)
    last = length - 1
    begin = part * part_size
    best = _best_in(text, last, begin, tl.minimum(begin + part_size, last), MIN_N, MAX_N, BLOCK)
    if PARTS == 1:
        _store_what_follows(best, text, length, request, drafts, counts, num_wanted, DRAFTS)
    else:
        tl.store(parts + request * PARTS + part, best)


@kernel(do_not_specialize=["width", "num_wanted"], do_not_specialize_on_alignment=["rows"])
def _best_kernel(
    tokens, known, rows, parts, drafts, counts, stride, width, num_wanted, PARTS: tl.constexpr, PADDED: tl.constexpr,
    DRAFTS: tl.constexpr,
):
    request = tl.program_id(0).to(tl.int64)
    row = tl.load(rows + request)
    part = tl.arange(0, PADDED)
    best = tl.max(tl.load(parts + request * PARTS + part, mask=part < PARTS, other=-1), axis=0)
    length = tl.minimum(tl.load(known + row), width)
    _store_what_follows(best, tokens + row * stride, length, request, drafts, counts, num_wanted, DRAFTS)


def find_ngram(
    tokens: torch.Tensor, known: torch.Tensor, rows: torch.Tensor, width: int, num_wanted: int, min_n: int, max_n: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Find the tokens that followed an earlier occurrence of each row's last tokens; see `reference.find_ngram` for the
    arguments. Tokens past the count are 0."""
    name, device, int64, requests = "find_ngram", tokens.device, (torch.int64,), rows.shape[0]
    require_tensor(name, "tokens", tokens, (None, None), device, int64)
    require_tensor(name, "known", known, (tokens.shape[0],), device, int64)
    require_tensor(name, "rows", rows, (requests,), device, int64)
    require(0 < width <= tokens.shape[1], name, "width", f"is {width}, and rows hold {tokens.shape[1]} tokens")
    require(1 <= min_n <= max_n, name, "min_n", f"is {min_n}, expected 1 to {max_n}")
    require(num_wanted > 0, name, "num_wanted", f"is {num_wanted}")
    num_parts = min(cdiv(width, _PART), _MOST_PARTS)
    drafts = torch.empty(requests, num_wanted, dtype=torch.int64, device=device)
    counts = torch.empty(requests, dtype=torch.int64, device=device)
    parts = torch.empty(requests, num_parts, dtype=torch.int64, device=device) if num_parts > 1 else counts
    if requests:
        padded_drafts = next_power_of_two(num_wanted)
        _find_kernel[(requests, num_parts)](
            tokens, known, rows, parts, drafts, counts, tokens.stride(0), width, cdiv(width, num_parts),
            num_wanted, MIN_N=min_n, MAX_N=max_n, BLOCK=_BLOCK, PARTS=num_parts, DRAFTS=padded_drafts, num_warps=4,
        )
    if requests and num_parts > 1:
        _best_kernel[(requests,)](
            tokens, known, rows, parts, drafts, counts, tokens.stride(0), width, num_wanted, PARTS=num_parts,
            PADDED=next_power_of_two(num_parts), DRAFTS=padded_drafts, num_warps=1,
        )
    return drafts, counts
