"""RowText: a host copy of the tokens and drafts that the device keeps for a row, for features that need the generated
text on the host."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from outrider.kernels.buffers import to_device
from outrider.runner.row_state import RowState


class RowText(NamedTuple):
    """The end of a row's known tokens, and its drafts, copied from the device."""

    is_alive: bool
    known: int  # tokens
    last: list[int]  # the last known tokens, as many as a run can have
    drafts: list[int]


def read_later(state: RowState, rows: list[int], run: int) -> Callable[[], list[RowText]]:
    """Begin to copy the rows' texts in their state after all work queued so far. Returns a function that waits for the
    copies and returns the texts."""
    index = to_device(rows, torch.int64, state.device)
    known = state.known[index]
    columns = (known[:, None] - run + torch.arange(run, device=state.device)).clamp_min(0)
    packed = torch.cat([state.alive[index, None].to(torch.int64), known[:, None], state.num_drafts[index, None],
                        state.tokens[index[:, None], columns], state.drafts[index]], dim=1)
    done = None
    if state.device.type == "cuda":
        host = torch.empty(packed.shape, dtype=torch.int64, pin_memory=True)
        packed = host.copy_(packed, non_blocking=True)
        done = torch.cuda.Event()
        done.record()

    def read() -> list[RowText]:
        if done is not None:
            done.synchronize()
        return [RowText(bool(alive), known, rest[:run], rest[run : run + num_drafts])
                for alive, known, num_drafts, *rest in packed.tolist()]

    return read
