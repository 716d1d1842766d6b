"""What lies in a page beyond the request's length is gathered as it is, and only its weight is zero."""

from __future__ import annotations

import torch

from outrider.mixers.paged import torch_backend

NAME = "tail mask off"
TESTS = ["tests/engine/test_poison.py"]


def apply() -> None:
    def tail_as_it_is(gathered: torch.Tensor, exists: torch.Tensor) -> torch.Tensor:
        return gathered

    torch_backend.tail_zeroed = tail_as_it_is
