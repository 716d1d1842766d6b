"""What must not count is multiplied by zero: NaN in a row of nobody reaches the others."""

from __future__ import annotations

import torch

from outrider.mixers.recurrent import torch_backend

NAME = "f4: masked by multiplying"
TESTS = ["tests/engine/test_f4_states.py", "-k", "accepted_count or padded or ended or reused or skip"]


def apply() -> None:
    def weighed(mask: torch.Tensor, new: torch.Tensor, old: torch.Tensor) -> torch.Tensor:
        weight = mask.view(-1, *[1] * (new.dim() - 1)).to(new.dtype)
        return weight * new + (1 - weight) * old

    torch_backend.selected = weighed
