"""ForwardBatch: the only description of a step's token rows that models and mixers get.

Mixers read page tables, lengths and upper bounds from this batch, and store nothing between steps."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from outrider.cache.groups import Group
from outrider.cache.kinds import pages_for


@dataclass(frozen=True)
class LengthBound:
    """An upper bound, known to the host, of the longest context in a batch. It follows from the bounds of the requests;
    only graph capture uses the longest context that is allowed."""

    tokens: int

    def after(self, steps: int, max_len: int) -> LengthBound:
        """Return the bound after `steps` drafting passes, each of which adds one token."""
        return LengthBound(min(self.tokens + steps, max_len))


@dataclass(frozen=True)
class ExactQueries:
    """Marks a batch in which the host knows exactly how many tokens each request has. A padded request has none."""

    lens: tuple[int, ...]


@dataclass(frozen=True)
class DecodeQueries:
    """Marks a batch in which every request has at most `most` tokens; only the device knows how many each has."""

    most: int
    shares_pages: bool = False  # several requests hold the same pages, which attention may read once for all of them


@dataclass(frozen=True)
class MixedQueries:
    """Marks a batch in which requests may have any number of tokens; only the device knows how many each has."""

    decode_kernel_max_query: int  # requests with more tokens than this use the prefill kernel


Queries = ExactQueries | DecodeQueries | MixedQueries  # the host's knowledge of the requests' token counts


@dataclass(frozen=True)
class AllKeys:
    """Marks a batch in which a token sees its request's keys from the first one on."""


@dataclass(frozen=True)
class KeysFrom:
    """Marks a batch in which a token sees its request's keys from `starts` on. Earlier keys were never written."""

    starts: torch.Tensor  # [requests] first visible key
    starts_int32: torch.Tensor


VisibleKeys = AllKeys | KeysFrom
ALL_KEYS = AllKeys()


@dataclass(frozen=True)
class NoExtraKeys:
    """Plain causal attention: no token of a batch sees a key after its own."""


@dataclass(frozen=True)
class ExtraKeys:
    """A range of positions [starts, ends) that each token sees in addition to what the causal rule, windows and masks
    allow. Both are 0 for a token without a range. The tokens of a range are all in one batch."""

    starts: torch.Tensor  # [tokens]
    ends: torch.Tensor  # [tokens] one past the last position


NO_EXTRA_KEYS = NoExtraKeys()


@dataclass(frozen=True)
class BatchView:
    """The token rows of a step, with all tensors cut to the same numbers of requests and tokens.

    The tokens of a request are contiguous, live ones first. Dead and padded tokens have slot -1. The int32 copies are
    made together with the view, for kernels that take only int32.
    """

    num_requests: int
    num_tokens: int
    queries: Queries
    max_length: LengthBound
    rows: torch.Tensor  # [requests] row of each request
    query_starts: torch.Tensor  # [requests + 1]
    lengths: torch.Tensor  # [requests] context length with this step's live tokens; 0 for padded and ended requests
    live: torch.Tensor  # [requests] live tokens
    query_starts_int32: torch.Tensor
    lengths_int32: torch.Tensor
    live_int32: torch.Tensor
    token_ids: torch.Tensor  # [tokens]
    positions: torch.Tensor  # [tokens]
    request_of: torch.Tensor  # [tokens] index of the token's request in this batch
    page_tables: tuple[torch.Tensor, ...]  # per group [requests, columns]; read through page_table()
    token_slots: tuple[torch.Tensor, ...]  # per group [tokens]; read through slots()
    visible: VisibleKeys = ALL_KEYS
    extra_keys: ExtraKeys | NoExtraKeys = NO_EXTRA_KEYS

    def page_table(self, group: Group) -> torch.Tensor:
        """Return the page table [requests, columns] of a group, cut to the columns that the batch's longest context can
        use."""
        return self.page_tables[group.index][:, : pages_for(self.max_length.tokens, group.page_tokens)]

    def slots(self, group: Group) -> torch.Tensor:
        """Return the slot [tokens] of each token in the group's pages; -1 for dead and padded tokens."""
        return self.token_slots[group.index]


@dataclass(frozen=True)
class ForwardBatch:
    """One step's batch, with and without padding. The target and the drafter each use one of the two views as a whole;
    no other code slices these tensors. In a captured step only the device knows what was scheduled, so both views are
    the padded batch."""

    padded: BatchView
    unpadded: BatchView


def check_rows(view: BatchView, group: Group) -> None:
    """Check that the tensors of a view agree in their numbers of requests and of tokens. Every kernel wrapper calls
    this first."""
    table, lengths, starts = view.page_table(group), view.lengths, view.query_starts
    if not table.shape[0] == lengths.shape[0] == starts.shape[0] - 1 == view.live.shape[0]:
        raise ValueError(f"attention: these must belong to the same number of requests: page table {table.shape[0]}, "
                         f"lengths {lengths.shape[0]}, query starts {starts.shape[0]} - 1, live {view.live.shape[0]}")
    if not view.slots(group).shape[0] == view.positions.shape[0] == view.token_ids.shape[0]:
        raise ValueError("attention: these must have the same number of token rows: slots "
                         f"{view.slots(group).shape[0]}, positions {view.positions.shape[0]}, tokens "
                         f"{view.token_ids.shape[0]}")
