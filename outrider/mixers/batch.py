"""ForwardBatch, the one description of a step's token rows.

Mixers read page tables, lengths and bounds only from the batch they are given: nothing is kept between steps.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from outrider.cache.groups import Group
from outrider.cache.kinds import pages_for


@dataclass(frozen=True)
class LengthBound:
    """The longest context of a batch, at most: made from its own bounds. Only graph capture makes the worst case."""

    tokens: int

    def after(self, steps: int, max_len: int) -> LengthBound:
        """The bound of drafting step `steps`, one token later each."""
        return LengthBound(min(self.tokens + steps, max_len))


@dataclass(frozen=True)
class BatchView:
    """Token rows of a step, all tensors cut to the same counts of requests and tokens.

    Tokens of a request are contiguous; its live tokens come first. Dead and padded tokens have slot -1.
    """

    num_requests: int
    num_tokens: int
    query_lens: tuple[int, ...]  # scheduled tokens per request, on the host; zero for padded ones; see longest_short
    max_length: LengthBound
    rows: torch.Tensor  # [requests] row of each request
    query_starts: torch.Tensor  # [requests + 1]
    lengths: torch.Tensor  # [requests] context length with this step's live tokens; 0 for padded and ended requests
    live: torch.Tensor  # [requests] live tokens
    token_ids: torch.Tensor  # [tokens]
    positions: torch.Tensor  # [tokens]
    request_of: torch.Tensor  # [tokens] index of the token's request in this batch
    page_tables: tuple[torch.Tensor, ...]  # per group [requests, columns]; read through page_table()
    token_slots: tuple[torch.Tensor, ...]  # per group [tokens]; read through slots()
    key_starts: torch.Tensor | None = None  # [requests] first key that may be seen; None: the first of all
    int32_copies: tuple[tuple[torch.Tensor, torch.Tensor], ...] = ()  # (field, copy); read through int32()
    longest_short: int | None = None  # a captured batch with prompts in it: requests with more tokens are such

    @property
    def max_query(self) -> int:
        return max(self.query_lens, default=0)

    def page_table(self, group: Group) -> torch.Tensor:
        """[requests, columns up to the batch's own bound]"""
        return self.page_tables[group.index][:, : pages_for(self.max_length.tokens, group.page_tokens)]

    def int32(self, field: torch.Tensor) -> torch.Tensor:
        """One of this view's tensors as int32: the copy made with it, or a new one. A view with another tensor in the
        field never meets the copy of the old one."""
        copies = [copy for original, copy in self.int32_copies if original is field]
        return copies[0] if copies else field.int()

    def slots(self, group: Group) -> torch.Tensor:
        """[tokens] cell of each token in the group's pages, -1 for dead and padded tokens."""
        return self.token_slots[group.index]


@dataclass(frozen=True)
class ForwardBatch:
    """One step's batch in both cuts. Target and drafter take one or the other, whole; nobody cuts a tensor by hand."""

    padded: BatchView
    unpadded: BatchView


def check_rows(view: BatchView, group: Group) -> None:
    """Every kernel wrapper's first line: all request-axis tensors must speak of the same requests."""
    table, lengths, starts = view.page_table(group), view.lengths, view.query_starts
    if not table.shape[0] == lengths.shape[0] == starts.shape[0] - 1 == view.live.shape[0]:
        raise ValueError(
            f"attention rows disagree: page table {table.shape[0]}, lengths {lengths.shape[0]}, "
            f"query starts {starts.shape[0]} - 1, live {view.live.shape[0]}"
        )
    if not view.slots(group).shape[0] == view.positions.shape[0] == view.token_ids.shape[0]:
        raise ValueError(
            f"attention token rows disagree: slots {view.slots(group).shape[0]}, positions {view.positions.shape[0]}, "
            f"tokens {view.token_ids.shape[0]}"
        )
