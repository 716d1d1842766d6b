"""Counts and token ids of drafts enter the rows as the drafter returned them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from outrider.kernels import ops
from outrider.kernels.step import PROPOSED, Proposal

NAME = "drafts enter unchecked"
TESTS = ["tests/engine/test_drafter_faults.py::test_wrong_values_are_dropped_on_the_device"]


def apply() -> None:
    def store(rows: torch.Tensor, proposals: Sequence[Proposal], goes_on: torch.Tensor, is_on: torch.Tensor, *,
              drafts: torch.Tensor, num_drafts: torch.Tensor, counts: torch.Tensor, **_: Any) -> None:
        tokens, offered, _ = proposals[0]
        columns = torch.arange(tokens.shape[1], device=rows.device)
        drafts.index_put_((rows[:, None], columns), tokens)
        counts[:, PROPOSED] = torch.where(goes_on, offered, 0)
        num_drafts.index_copy_(0, rows, counts[:, PROPOSED])

    ops.store_drafts.kernels = ()
    ops.store_drafts.reference = store
