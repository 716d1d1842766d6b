"""Mixer: the base class that computes all layers of one kind, such as full attention, for a batch with its cache."""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from outrider.core import Limits
from outrider.mixers.batch import BatchView
from outrider.mixers.pool import DevicePool

EVERY_LENGTH = sys.maxsize  # tokens: more than any context has


class Mixer(ABC):
    """All layers of one kind in a model, with their views of the page pool and their backend."""

    whole_len: int = EVERY_LENGTH  # tokens of the longest context with which the layers do less than with longer ones

    @abstractmethod
    def __init__(self, layers: Sequence[Any], pool: DevicePool, backend: Any) -> None: ...

    @staticmethod
    def is_capturable(spec: Any) -> bool:
        """Whether steps over layers with this cache spec can be captured; otherwise they run eagerly."""
        return True

    def set_exact(self, exact: bool) -> None:
        """Switch to arithmetic in which the bits of a token row do not depend on other token rows. Raises an error if
        the mixer has no such arithmetic."""
        raise ValueError(f"exact=True: {type(self).__name__} has no exact form, because it lacks a method set_exact: "
                         "leave exact out")

    @abstractmethod
    def bind(self, view: BatchView) -> Mapping[int, Any]:
        """Bind every layer to a step over this view. `Attend.mixer` returns the values, by layer."""

    def bind_rows(self, view: BatchView) -> Mapping[int, Any]:
        """Bind layers to a view of each request's last tokens. Layers that cannot read the cache entries of all tokens
        of the step are left out."""
        return {}

    def carry(self, earlier: Mapping[int, Any], later: Mapping[int, Any], token_rows: torch.Tensor) -> None:
        """Let layers of a later drafting pass reuse the choices of an earlier pass for `token_rows`."""

    def prepare_capture(self, device: torch.device, limits: Limits) -> None:
        """Allocate the buffers that captured steps share. Called once, before any capture."""
