"""The lookup of n-grams as a drafter: which part of a row's text it reads."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from outrider.drafters.ngram import NgramDrafter


@pytest.mark.parametrize("row_len", [12, 7])
def test_the_token_that_the_step_has_just_yielded_is_looked_up(row_len: int) -> None:
    """The batch has computed 6 tokens, and the seventh came out of them. The row may end there."""
    text = [1, 2, 3, 9, 1, 2, 3]
    tokens = torch.full((2, row_len), 3)  # behind the text too
    tokens[1, : len(text)] = torch.tensor(text)
    view = SimpleNamespace(rows=torch.tensor([1]), max_length=SimpleNamespace(tokens=len(text) - 1))
    step: Any = SimpleNamespace(batch=SimpleNamespace(padded=view), tokens=tokens, num_wanted=3,
                                known=torch.tensor([0, len(text)]))
    drafts = NgramDrafter(3).propose(step)
    assert drafts.counts.tolist() == [3] and drafts.tokens.tolist() == [[9, 1, 2]]
