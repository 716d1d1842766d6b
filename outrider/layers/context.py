"""StepContext: what a layer knows of the token rows that it is called with, beside their hidden states.

A model hands one context to every layer, feed-forward and product. A layer that computes some of its token rows alone
calls its parts with the context of those rows (`of_rows`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Never, Protocol

import torch

from outrider.mixers import Attend, WantedRows


@dataclass(frozen=True)
class StandIns:
    """Embeddings that stand in for token ids at some token rows. `values` are what the embedding would return: with the
    model's scale, in its dtype."""

    token_rows: torch.Tensor  # [n] int64
    values: torch.Tensor  # [n, hidden]

    def put_into(self, embedded: torch.Tensor) -> torch.Tensor:
        """The embeddings of a step's ids [tokens, hidden], with these in the place of some."""
        return embedded.index_copy(0, self.token_rows, self.values.to(embedded.dtype))


class LinearLayer(Protocol):
    """A linear layer as adapters see it: they tell layers apart by identity (`is`), and read its sizes."""

    @property
    def in_features(self) -> int: ...

    @property
    def out_features(self) -> int: ...


class RowAdapters(Protocol):
    """Adapters of the requests in a step: what each adds to the products of its own token rows."""

    def of_rows(self, token_rows: torch.Tensor) -> RowAdapters:
        """The adapters of some of the token rows."""

    def add_to(self, out: torch.Tensor, linear: LinearLayer, x: torch.Tensor, first: int) -> None:
        """Add to out [tokens, features], the output features of `linear` from `first` on for x [tokens, inputs], what
        the adapter of each token row adds. A layer that no adapter changes is left alone."""


class LoadedAdapters(Protocol):
    """The adapters that an engine has loaded. It keeps on the device which row has which."""

    def admit(self, names: Mapping[int, str | None]) -> None:
        """Rows that were just admitted, with the name of the request's adapter; None for the model itself."""

    def of_step(self, rows: torch.Tensor, request_of: torch.Tensor) -> RowAdapters:
        """The adapters of a step's token rows. rows: [requests], the row of each request; request_of: [tokens]. Needs
        nothing that only the host knows."""


class NothingAttends:
    """The `attend` of token rows behind the last layer, which make logits."""

    def mixer(self, layer: int) -> Never:
        raise AssertionError(f"layer {layer} is behind the last layer")


class StepContext:
    """positions: [tokens] int64, each token's place in its request, which says what it may attend to. rope_positions:
    the places that ropes turn by, the same unless given."""

    def __init__(self, attend: Attend, positions: torch.Tensor, *, rope_positions: torch.Tensor | None = None,
                 stand_ins: StandIns | None = None, adapters: RowAdapters | None = None) -> None:
        self.attend = attend
        self.positions = positions
        self.rope_positions = positions if rope_positions is None else rope_positions
        self.stand_ins = stand_ins
        self.adapters = adapters

    def of_rows(self, rows: WantedRows) -> StepContext:
        """The context of some token rows, in the order of `rows`, which bind the layers that attend for them alone."""
        return _RowsContext(self, rows)


class _RowsContext(StepContext):
    """Gathers positions when they are first read: most layers behind a choice of rows read none."""

    def __init__(self, whole: StepContext, rows: WantedRows) -> None:
        self._whole, self._rows = whole, rows.token_rows
        self.attend = rows
        self.stand_ins = None  # the embedding lies before every choice of rows
        self.adapters = None if whole.adapters is None else whole.adapters.of_rows(rows.token_rows)

    @cached_property
    def positions(self) -> torch.Tensor:
        return self._whole.positions[self._rows]

    @cached_property
    def rope_positions(self) -> torch.Tensor:
        whole = self._whole
        return self.positions if whole.rope_positions is whole.positions else whole.rope_positions[self._rows]
