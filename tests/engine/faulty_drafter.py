"""FaultyDrafter: a drafter of a user's own class that misbehaves in chosen calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from outrider.core import Admission
from outrider.drafters.base import Drafter, Drafts, Step
from outrider.drafters.view_of import ViewOf

K = 3
Edit = Callable[[Step, torch.Tensor, torch.Tensor], Any]  # what propose returns, of a step and good drafts of it


class FaultyDrafter(Drafter):
    """Drafts the last token again, and misbehaves in the calls of `method` whose numbers are in `at`."""

    name = "faulty"

    def __init__(self, edit: Edit | None = None, method: str = "propose", at: range = range(10**6)) -> None:
        self.max_drafts = K
        self._edit, self._method, self._at, self._calls = edit, method, at, 0

    def _strikes(self, method: str) -> bool:
        self._calls += method == self._method
        return method == self._method and self._calls - 1 in self._at

    def _maybe_raise(self, method: str) -> None:
        if self._strikes(method):
            raise ArithmeticError(f"no {method} today")

    def admit(self, admissions: list[Admission]) -> None:
        self._maybe_raise("admit")

    def reset(self) -> None:
        self._maybe_raise("reset")

    def skip(self, step: Step) -> None:
        self._maybe_raise("skip")

    def fill_slots(self, view_of: ViewOf, *, is_cold: bool) -> None:
        self._maybe_raise("fill_slots")

    def propose(self, step: Step) -> Drafts:
        rows = step.batch.padded.rows
        last = step.tokens[rows, (step.known[rows] - 1).clamp_min(0)]
        tokens = last[:, None].repeat(1, step.num_wanted)
        counts = torch.full_like(rows, step.num_wanted)
        if self._edit is None:
            self._maybe_raise("propose")
        elif self._strikes("propose"):
            return self._edit(step, tokens, counts)  # type: ignore[no-any-return]
        return Drafts(tokens, counts)


class NegativeCounts(FaultyDrafter):
    """Named by its import path, as a user's drafter is."""

    name = "negative"

    def __init__(self, num_speculative_tokens: int, target: object) -> None:
        super().__init__(lambda step, tokens, counts: Drafts(tokens, counts * 0 - 47))
        self.max_drafts = num_speculative_tokens


class ReadsTheDevice(NegativeCounts):
    """Returns good drafts, but waits for the device in `propose`, which no captured step may do."""

    name = "reads"

    def propose(self, step: Step) -> Drafts:
        int(step.known.sum().item())
        self._at = range(0)
        return super().propose(step)


class WritesRows(NegativeCounts):
    """Writes to the rows' known tokens."""

    name = "writes"

    def propose(self, step: Step) -> Drafts:
        step.tokens.zero_()
        self._at = range(0)
        return super().propose(step)


class ForeignTokens(NegativeCounts):
    """Returns token ids that no vocabulary has."""

    name = "foreign"

    def propose(self, step: Step) -> Drafts:
        self._at = range(0)
        drafts = super().propose(step)
        return Drafts(drafts.tokens + 10**9, drafts.counts)
