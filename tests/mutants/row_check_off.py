"""Attention takes tables, lengths and query starts of different batches without a word."""

from __future__ import annotations

from outrider.mixers import batch
from outrider.mixers.paged import torch_backend

NAME = "wrapper row check off"
TESTS = ["tests/engine/test_padding.py"]


def apply() -> None:
    def anything_goes(view: object, group: object) -> None: ...

    batch.check_rows = anything_goes  # type: ignore[assignment]
    torch_backend.check_rows = anything_goes  # type: ignore[assignment]
