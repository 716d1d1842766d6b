"""Entries of the table of operations: n-gram lookup, and the bookkeeping before and after the passes of draft heads."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from outrider.kernels import drafting, reference
from outrider.kernels.cpu import checks
from outrider.kernels.ops.conditions import are_two
from outrider.kernels.ops.elements import rms_norm
from outrider.kernels.ops.operation import UP_TO_FLOAT32, Exactness, Operation, native_kernel, triton_kernel


def _join_embedding(tokens: torch.Tensor, table: torch.Tensor, hidden: torch.Tensor, *, scale: float | None = None,
                    gains: tuple[torch.Tensor, torch.Tensor] | None = None, eps: float = 0.0,
                    hidden_first: bool = False,
                    positions: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ([tokens, embedding | hidden], its hidden part); both parts are normed if `gains` is given. Embeddings at
    `positions` [tokens] up to 1, where a text begins, are zero. The second result may be a view of the first: a caller
    may change it in place only when it no longer needs the first."""
    embedded = F.embedding(tokens, table)
    embedded = embedded if positions is None else torch.where((positions > 1)[:, None], embedded, 0)
    embedded = embedded if scale is None else embedded * scale
    if gains is not None:
        embedded, hidden = rms_norm(embedded, gains[0], eps), rms_norm(hidden, gains[1], eps)
    return torch.cat((hidden, embedded) if hidden_first else (embedded, hidden), dim=-1), hidden


def _hidden_of(tokens: torch.Tensor, table: torch.Tensor, hidden: torch.Tensor, **_: object) -> torch.Tensor:
    return hidden


join_embedding = Operation(
    _join_embedding,
    triton_kernel("outrider.kernels.gpu.drafts.join:join_embedding", UP_TO_FLOAT32),
    name="join_embedding", subject=_hidden_of, exact=Exactness.DRAFTS,
)
take_rows = Operation(
    reference.take_rows,
    triton_kernel("outrider.kernels.gpu.drafts.join:take_rows", UP_TO_FLOAT32, are_two),
    exact=Exactness.NO_ARITHMETIC,
)
find_ngram = Operation(
    reference.find_ngram,
    native_kernel("outrider.kernels.cpu:find_ngram", takes=checks.takes_find_ngram),
    triton_kernel("outrider.kernels.gpu.drafts.ngram:find_ngram"),
    exact=Exactness.NO_ARITHMETIC,
)
plan_draft_passes = Operation(
    drafting.plan_draft_passes,
    native_kernel("outrider.kernels.cpu.draft_plan:plan_draft_passes",
                  takes="outrider.kernels.cpu.draft_plan:takes_plan"),
    triton_kernel("outrider.kernels.gpu.drafts.passes:plan_draft_passes"),
    subject=lambda requests, *_, **__: requests.rows, exact=Exactness.NO_ARITHMETIC,
)
plan_block_passes = Operation(drafting.plan_block_passes,
                              triton_kernel("outrider.kernels.gpu.drafts.blocks:plan_block_passes"),
                              subject=lambda requests, *_, **__: requests.rows, exact=Exactness.NO_ARITHMETIC)
plan_first_slots = Operation(drafting.plan_first_slots,
                             triton_kernel("outrider.kernels.gpu.drafts.first_slots:plan_first_slots"),
                             subject=lambda admitted, *_, **__: admitted.rows, exact=Exactness.NO_ARITHMETIC)
plan_reading_pass = Operation(drafting.plan_reading_pass,
                              triton_kernel("outrider.kernels.gpu.drafts.passes:plan_reading_pass"),
                              subject=lambda requests, *_, **__: requests.rows, exact=Exactness.NO_ARITHMETIC)
forget_pages = Operation(
    drafting.forget_pages,
    native_kernel("outrider.kernels.cpu.draft_plan:forget_pages",
                  takes="outrider.kernels.cpu.draft_plan:takes_forget"),
    triton_kernel("outrider.kernels.gpu.drafts.passes:forget_pages"),
    subject=lambda requests, *_, **__: requests.rows, exact=Exactness.NO_ARITHMETIC,
)
