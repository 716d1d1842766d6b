"""F4: a rejected draft is folded like an accepted one, so that the next step begins from the wrong state."""

from __future__ import annotations

import torch

from outrider.mixers.recurrent.base import RecurrentStep
from outrider.mixers.recurrent.rows import RecurrentRows

NAME = "f4: rejected drafts are folded"
TESTS = ["tests/engine/test_f4_states.py", "-k", "accepted_count or padded or ended or reused or skip"]


def apply() -> None:
    commit = RecurrentRows.commit

    def commit_all(self: RecurrentRows, step: RecurrentStep | None, num_accepted: torch.Tensor) -> torch.Tensor | None:
        return commit(self, step, num_accepted if step is None else step.counts.num_drafts)

    RecurrentRows.commit = commit_all  # type: ignore[method-assign]
