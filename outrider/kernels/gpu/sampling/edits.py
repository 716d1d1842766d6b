"""Edits of logits: allowed tokens, logit bias, bad words, min_tokens, penalties and masks. Also finds each row's
greatest logit.

A row without edits is not copied: later kernels read the model's logits. Every product, sum and quotient is rounded by
itself (fusion is off), so that edited logits equal those of `sample/edits.py` bit for bit.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from outrider.kernels import sampling_flags as flags
from outrider.kernels.gpu.common import (
    pdl_options,
    release_dependents,
    require,
    require_tensor,
    uses_pdl,
    wait_for_inputs,
)
from outrider.kernels.gpu.launch.triton_kernel import kernel
from outrider.kernels.gpu.sampling.draw import GROUP, SLICES, TILE, Spans
from outrider.kernels.gpu.sampling.scans import load_logits
from outrider.kernels.gpu.sampling.token_counts import find_counts

_ALLOWED, _BIAS, _BAD_WORDS = tl.constexpr(flags.ALLOWED), tl.constexpr(flags.BIAS), tl.constexpr(flags.BAD_WORDS)
_TOP_K, _MASKED = tl.constexpr(flags.TOP_K), tl.constexpr(flags.MASKED)
_MIN_TOKENS, _PENALTIES = tl.constexpr(flags.MIN_TOKENS), tl.constexpr(flags.PENALTIES)
_LISTED, _EDITED, _OUTPUTS = tl.constexpr(flags.LISTED), tl.constexpr(flags.EDITED), tl.constexpr(flags.OUTPUTS)
_LIST = 128  # entries of a list that are read at a time
_REGISTERS = 64  # of a thread, so that twice as many programs are there to wait for memory


class EditRows(NamedTuple):
    """The parameters of all rows that edits read: [rows] int64, except where a comment says otherwise."""

    flags: torch.Tensor
    temperature: torch.Tensor  # float32
    presence: torch.Tensor  # float32
    frequency: torch.Tensor  # float32
    repetition: torch.Tensor  # float32
    min_tokens: torch.Tensor
    prompt_len: torch.Tensor
    num_stop_ids: torch.Tensor
    stop_ids: torch.Tensor  # [rows, stop ids]
    bias_start: torch.Tensor  # in `arena`
    bias_len: torch.Tensor
    words_start: torch.Tensor  # in `arena`
    num_words: torch.Tensor
    arena: torch.Tensor  # [ints] int32; the layouts are those of sample/lists.py
    allowed: torch.Tensor  # [rows, vocabulary / 32] int32: bit t % 32 of word t // 32
    counts: torch.Tensor  # [1]: the address of [rows, vocabulary] int32, 0 while no row has penalties
    masks: torch.Tensor | None  # [rows, drafts + 1, vocabulary / 32] int32: what is allowed after each draft


class Text(NamedTuple):
    """Each row's tokens: tokens[row, :known[row]], then its drafts. All int64."""

    tokens: torch.Tensor  # [rows, length]
    known: torch.Tensor  # [rows]
    drafts: torch.Tensor  # [rows, drafts]


@triton.jit
def _token_at(place, of, text, token_stride, draft_stride, num_columns):
    """Return the token at a position of a row; -1 before its first token."""
    known = tl.load(text.known + of)
    old = tl.load(text.tokens + of * token_stride + place, mask=(place >= 0) & (place < known), other=-1)
    index = place - known
    draft = tl.load(text.drafts + of * draft_stride + index, mask=(index >= 0) & (index < num_columns), other=-1)
    return tl.where(index < 0, old, draft)


@triton.jit
def _is_in(mask, token, valid):
    """Whether a token's bit is set in a mask."""
    word = tl.load(mask + token // 32, mask=valid, other=0)
    return ((word >> (token % 32)) & 1) != 0


@triton.jit
def _penalise(logit, token, valid, of, num_before, rows, text, counts, draft_stride, count_stride):
    """Apply penalties to logits. Penalties count the row's outputs and the drafts before this logit row."""
    packed = tl.load(counts + of * count_stride + token, mask=valid, other=0)
    outputs = packed & _OUTPUTS
    for index in range(0, num_before):
        draft = tl.load(text.drafts + of * draft_stride + index)
        outputs += (token == draft).to(tl.int32)
    factor = tl.where((packed != 0) | (outputs > 0), tl.load(rows.repetition + of), 1.0)
    logit = tl.where(logit > 0, tl.div_rn(logit, factor), logit * factor)
    logit = logit - outputs.to(tl.float32) * tl.load(rows.frequency + of)
    return logit - tl.where(outputs > 0, tl.load(rows.presence + of), 0.0)


@triton.jit
def _edit(
    logit, token, valid, flag, of, num_before, rows, text, counts, mask_words, num_columns, draft_stride, count_stride
):
    if (flag & _ALLOWED) != 0:
        logit = tl.where(_is_in(rows.allowed + of * mask_words, token, valid), logit, float("-inf"))
    if (flag & _PENALTIES) != 0:
        logit = _penalise(logit, token, valid, of, num_before, rows, text, counts, draft_stride, count_stride)
    if (flag & _MASKED) != 0:
        mask = rows.masks + (of * (num_columns + 1) + num_before) * mask_words
        logit = tl.where(_is_in(mask, token, valid), logit, float("-inf"))
    return logit


@triton.jit
def _add_bias(
    own, edited, lowest, end, flag, of, num_before, rows, text, counts, mask_words, num_columns, draft_stride,
    count_stride, LIST: tl.constexpr,
):
    """Add the logit bias to the tokens that have one. Their logits are edited again from the model's, because the bias
    comes before the penalties."""
    ids, size = rows.arena + tl.load(rows.bias_start + of), tl.load(rows.bias_len + of).to(tl.int32)
    for first in range(0, size, LIST):
        entry = first + tl.arange(0, LIST)
        token = tl.load(ids + entry, mask=entry < size, other=-1)
        inside = (token >= lowest) & (token < end)
        bias = tl.load(ids + size + entry, mask=inside, other=0).to(tl.float32, bitcast=True)
        logit = tl.load(own + token, mask=inside, other=0.0) + bias
        logit = _edit(logit, token, inside, flag, of, num_before, rows, text, counts, mask_words, num_columns,
                      draft_stride, count_stride)
        tl.store(edited + token, logit, mask=inside)


@triton.jit
def _forbid_bad_words(edited, lowest, end, of, place, rows, text, token_stride, draft_stride, num_columns,
                      LIST: tl.constexpr):
    """Forbid the last token of each bad word whose other tokens have just been said. A word is (offset, length) in the
    row's table; its tokens lie backwards, the forbidden one first."""
    table, size = rows.arena + tl.load(rows.words_start + of), tl.load(rows.num_words + of).to(tl.int32)
    for first in range(0, size, LIST):
        word = first + tl.arange(0, LIST)
        valid = word < size
        letters = table + tl.load(table + 2 * word, mask=valid, other=0)
        length = tl.load(table + 2 * word + 1, mask=valid, other=0)
        token = tl.load(letters, mask=valid, other=-1)
        matches = valid & (token >= lowest) & (token < end)
        for back in range(1, tl.max(length, axis=0)):
            before = _token_at(place - back, of, text, token_stride, draft_stride, num_columns)
            letter = tl.load(letters + back, mask=valid & (back < length), other=0)
            matches = matches & ((letter == before) | (back >= length))
        tl.store(edited + token, float("-inf"), mask=matches)


@triton.jit
def _forbid_stops(edited, lowest, end, of, place, rows, stop_stride, LIST: tl.constexpr):
    if place - tl.load(rows.prompt_len + of) < tl.load(rows.min_tokens + of):
        size = tl.load(rows.num_stop_ids + of).to(tl.int32)
        for first in range(0, size, LIST):
            entry = first + tl.arange(0, LIST)
            token = tl.load(rows.stop_ids + of * stop_stride + entry, mask=entry < size, other=-1)
            tl.store(edited + token, float("-inf"), mask=(token >= lowest) & (token < end))


@triton.jit
def _keep_groups(group_greatest, tile, logit, SIZE: tl.constexpr, GROUP: tl.constexpr):
    """Store the greatest logit of every group of a tile: the search for the bound of top-k reads these."""
    GROUPS: tl.constexpr = SIZE // GROUP
    greatest = tl.max(tl.reshape(logit, [GROUPS, GROUP]), axis=1)
    tl.store(group_greatest + tile * GROUPS + tl.arange(0, GROUPS), greatest)


@triton.jit
def _greatest_of(logits, first, last, vocab, group_greatest, flag, SIZE: tl.constexpr, GROUP: tl.constexpr):
    """Return the greatest logit of some tiles. If the row has a top-k, also store the greatest logit of each group."""
    greatest = tl.full([SIZE], float("-inf"), dtype=tl.float32)
    for tile in range(first, last):
        token = tile * SIZE + tl.arange(0, SIZE)
        logit = load_logits(logits, token, token < vocab)
        greatest = tl.maximum(greatest, logit)
        if (flag & _TOP_K) != 0:
            _keep_groups(group_greatest, tile, logit, SIZE, GROUP)
    return tl.max(greatest, axis=0)


@triton.jit
def _edit_tiles(
    own, new, first, last, vocab, flag, of, num_before, rows, text, counts, mask_words, num_columns, draft_stride,
    count_stride, group_greatest, SIZE: tl.constexpr, GROUP: tl.constexpr,
):
    """Apply all edits to some tiles, except the edits that name tokens in lists. Returns (greatest edited logits,
    greatest logits of the model) [SIZE]."""
    greatest = tl.full([SIZE], float("-inf"), dtype=tl.float32)
    raw = tl.full([SIZE], float("-inf"), dtype=tl.float32)
    for tile in range(first, last):
        token = tile * SIZE + tl.arange(0, SIZE)
        valid = token < vocab
        logit = tl.load(own + token, mask=valid, other=float("-inf"))
        raw = tl.maximum(raw, tl.where(logit == logit, logit, float("inf")))
        logit = _edit(logit, token, valid, flag, of, num_before, rows, text, counts, mask_words, num_columns,
                      draft_stride, count_stride)
        tl.store(new + token, logit, mask=valid)
        logit = tl.where(logit == logit, logit, float("inf"))
        greatest = tl.maximum(greatest, logit)
        if (flag & _TOP_K) != 0:
            _keep_groups(group_greatest, tile, logit, SIZE, GROUP)
    return greatest, raw


@triton.jit
def _edit_by_lists(
    own, new, lowest, end, place, flag, of, num_before, rows, text, counts, mask_words, stop_stride, token_stride,
    num_columns, draft_stride, count_stride, LIST: tl.constexpr,
):
    """Edit those of the tokens [lowest, end) that the row's lists name: logit bias, bad words, stop ids."""
    tl.debug_barrier()  # a bias is written over what another thread has written, a ban over a bias
    if (flag & _BIAS) != 0:
        _add_bias(own, new, lowest, end, flag, of, num_before, rows, text, counts, mask_words, num_columns,
                  draft_stride, count_stride, LIST)
        tl.debug_barrier()
    if (flag & _BAD_WORDS) != 0:
        _forbid_bad_words(new, lowest, end, of, place, rows, text, token_stride, draft_stride, num_columns, LIST)
    if (flag & _MIN_TOKENS) != 0:
        _forbid_stops(new, lowest, end, of, place, rows, stop_stride, LIST)
    tl.debug_barrier()


@kernel(do_not_specialize=["span"], do_not_specialize_on_alignment=[*SLICES, "draft_index"])
def _edit_kernel(
    logits, edited, row, draft_index, position, rows, text, span_greatest, group_greatest, num_candidates, logit_stride,
    edited_stride, mask_words, stop_stride, token_stride, draft_stride, count_stride, num_columns, vocab, num_tiles,
    span, SIZE: tl.constexpr, GROUP: tl.constexpr, LIST: tl.constexpr, PDL: tl.constexpr,
):
    """Each program edits one span of one logit row, including what lists name; no other program writes there."""
    release_dependents(PDL)
    wait_for_inputs(PDL)
    at = tl.program_id(1).to(tl.int64)
    first = tl.program_id(0) * span
    last = tl.minimum(first + span, num_tiles)
    of = tl.load(row + at)
    flag = tl.load(rows.flags + of)
    own = logits + at * logit_stride
    group_greatest += at * num_tiles * (SIZE // GROUP)
    if (tl.program_id(0) == 0) & ((flag & _TOP_K) != 0):
        tl.store(num_candidates + at, 0)
    greatest_at = span_greatest + at * tl.num_programs(0) + tl.program_id(0)
    if (flag & _EDITED) != 0:
        new, counts = edited + at * edited_stride, find_counts(rows.counts)
        num_before = tl.minimum(tl.load(draft_index + at), num_columns).to(tl.int32)
        greatest, raw = _edit_tiles(
            own, new, first, last, vocab, flag, of, num_before, rows, text, counts, mask_words, num_columns,
            draft_stride, count_stride, group_greatest, SIZE, GROUP,
        )
        top = tl.max(greatest, axis=0)
        if (flag & _LISTED) != 0:
            _edit_by_lists(
                own, new, first * SIZE, tl.minimum(last * SIZE, vocab), tl.load(position + at), flag, of, num_before,
                rows, text, counts, mask_words, stop_stride, token_stride, num_columns, draft_stride, count_stride,
                LIST,
            )
            top = _greatest_of(new, first, last, vocab, group_greatest, flag, SIZE, GROUP)
        # Where the model's own logits are bad the row is bad, whatever the edits made of them.
        is_bad = tl.max(raw, axis=0) == float("inf")
        tl.store(greatest_at, tl.where(is_bad, float("inf"), top))
    elif tl.load(rows.temperature + of) > 0:
        tl.store(greatest_at, _greatest_of(own, first, last, vocab, group_greatest, flag, SIZE, GROUP))


def edit_logits(
    logits: torch.Tensor, row: torch.Tensor, draft_index: torch.Tensor, position: torch.Tensor, rows: EditRows,
    text: Text, spans: Spans, *, any_edits: bool = True, num_counts: int | None = None, pdl: bool | None = None,
) -> torch.Tensor:
    """Return the edited logits [logit rows, vocabulary]. Only logit rows with an edit are written; read all others from
    `logits`. Fills `spans.greatest` for logit rows that are edited or have a temperature: the greatest logit of each
    span (and of each group, if the row has a top-k), or +inf if the model's logits there hold a NaN or +inf.

    If `any_edits` is false, no request has an edit and `logits` itself is returned. `num_counts`: token counts of a
    row, if their number differs from the number of columns.
    """
    name, device, vocab = "edit_logits", logits.device, logits.shape[1]
    require_tensor(name, "logits", logits, (None, None), device, (torch.float32,))
    for argument, tensor in (("row", row), ("draft_index", draft_index), ("position", position)):
        require_tensor(name, argument, tensor, (logits.shape[0],), device, (torch.int64,))
    _check_rows(name, rows, text, vocab, device)
    edited = torch.empty(logits.shape, dtype=torch.float32, device=device) if any_edits else logits
    if logits.shape[0] == 0:
        return edited
    pdl = uses_pdl(device) if pdl is None else pdl
    count_stride = vocab if num_counts is None else num_counts
    require(count_stride >= vocab, name, "num_counts", f"is {count_stride} for {vocab} tokens")
    # Without masks no row has a grammar; the kernel is the same.
    rows = rows._replace(masks=rows.arena if rows.masks is None else rows.masks)
    stop_stride, (token_stride, draft_stride) = rows.stop_ids.stride(0), (text.tokens.stride(0), text.drafts.stride(0))
    _edit_kernel[spans.grid](
        logits, edited, row, draft_index, position, rows, text,
        *spans[3:], logits.stride(0), edited.stride(0), rows.allowed.shape[1], stop_stride, token_stride,
        draft_stride, count_stride, text.drafts.shape[1], vocab, spans.num_tiles, spans.length,
        SIZE=TILE, GROUP=GROUP, LIST=_LIST, PDL=pdl, num_warps=4, maxnreg=_REGISTERS,
        enable_fp_fusion=False, **pdl_options(pdl),
    )
    return edited


def _check_rows(name: str, rows: EditRows, text: Text, vocab: int, device: torch.device) -> None:
    num_rows = rows.flags.shape[0]
    floats = ("temperature", "presence", "frequency", "repetition")
    wide = {"stop_ids": (num_rows, None), "arena": (None,), "allowed": (num_rows, None), "counts": (1,),
            "masks": (num_rows, text.drafts.shape[1] + 1, rows.allowed.shape[1])}
    for field, tensor in zip(rows._fields, rows, strict=True):
        if tensor is not None:
            dtype = torch.float32 if field in floats else torch.int64
            dtype = torch.int32 if field in ("arena", "allowed", "masks") else dtype
            require_tensor(name, f"rows.{field}", tensor, wide.get(field, (num_rows,)), device, (dtype,))
    for field, tensor in zip(text._fields, text, strict=True):
        require_tensor(name, f"text.{field}", tensor, (num_rows,) if field == "known" else (num_rows, None), device,
                       (torch.int64,))
    require(32 * rows.allowed.shape[1] >= vocab, name, "rows.allowed", f"has fewer bits than {vocab} tokens")
