"""StepContext: what a layer knows of the token rows that it is called with, beside their hidden states.

A model hands one context to every layer, feed-forward and product. A layer that computes some of its token rows alone
calls its parts with the context of those rows (`of_rows`).

Every layer, feed-forward part and product is called with a `StepContext` (`layers/context.py`) beside its input. It
says
which token rows the input has: the caches of the layers, bound to the step (`attend`), each token's place in its
request
(`positions`) and the place that ropes turn by (`rope_positions`), embeddings that stand in for token ids at some rows
(`stand_ins`), and what adapters add to the products of some rows (`adapters`). A part that computes only some of the
rows gets the context of those (`of_rows`), so a product never has to guess whose rows it sees. Draft heads and
prediction modules are called in the same way. Layers that are one native call read the tables of a step's adapters
by themselves (`RowAdapters.factors`); adapters that have no such tables are asked product by product, by the plain
layers.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Never, Protocol

import torch

from outrider.core.step_messages import AdapterPlacement, AdapterReach
from outrider.formats import activate
from outrider.kernels.adapter_tables import AdapterTables, RowSlots, TargetRange
from outrider.kernels.moe import Routed
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


@dataclass(frozen=True)
class TokenHistory:
    """The known tokens of all rows, and where the token rows of a step lie in them. Drafts are known to the step alone,
    so ids within the step are taken from the step."""

    tokens: torch.Tensor  # [ROWS, LENGTH]
    row_of: torch.Tensor  # [tokens] row of the token's request
    offsets: torch.Tensor  # [tokens] how many tokens of its request a token has before it in this step

    def with_before(self, ids: torch.Tensor, positions: torch.Tensor, count: int) -> torch.Tensor:
        """ids [tokens] of the step and the `count` ids before each, nearest first: [tokens, 1 + count], -1 where a text
        has none."""
        index, found = torch.arange(len(ids), device=ids.device), [ids]
        for distance in range(1, count + 1):
            known = self.tokens[self.row_of, (positions - distance).clamp_min(0)]
            own = torch.where(self.offsets >= distance, ids[(index - distance).clamp_min(0)], known)
            found.append(torch.where(positions >= distance, own, -1))
        return torch.stack(found, dim=1)


class LinearLayer(Protocol):
    """A linear layer as adapters see it: they tell layers apart by identity (`is`), and read its sizes."""

    @property
    def in_features(self) -> int: ...

    @property
    def out_features(self) -> int: ...


@dataclass(frozen=True)
class StepFactors:
    """The factors of a step's adapters as tables, which a kernel of a whole layer reads by itself."""

    rows: RowSlots
    tables: AdapterTables
    targets: Mapping[int, TargetRange]  # of each linear layer that adapters may change, by its id


class RowAdapters(ABC):
    """Adapters of the requests in a step: what each adds to the products of its own token rows. A module that no
    adapter changes is left alone, and so are the bits of token rows without an adapter."""

    @abstractmethod
    def of_rows(self, token_rows: torch.Tensor) -> RowAdapters:
        """The adapters of some of the token rows."""

    def within(self, reach: AdapterReach) -> RowAdapters:
        """These adapters in a step that computes no more than the changes of this reach."""
        return self

    @abstractmethod
    def add_to(self, out: torch.Tensor, linear: LinearLayer, x: torch.Tensor, first: int) -> None:
        """Add to out [tokens, features], the output features of `linear` from `first` on for x [tokens, inputs], what
        the adapter of each token row adds."""

    def begin(self, linear: LinearLayer, x: torch.Tensor, first: int = 0, stop: int | None = None) -> ProductChange:
        """Computes what adapters add to output features [first, stop) of `linear` for x [tokens, inputs]. Layers call
        this before they compute the product, and add the change directly behind it: a part of the work may then be done
        beside the product."""
        return ProductChange(self, linear, x, first)

    def factors(self) -> StepFactors | None:
        """The factors of what `begin` adds, for layers that are one kernel; None if it is not made of factors, so
        that layers must call `begin` for every product."""
        return None

    def change(self, module: object) -> bool:
        """Whether an adapter of this step may change an embedding, experts or a latent expansion. Where it is False,
        the methods below are not called for the module."""
        return False

    def add_embeddings(self, out: torch.Tensor, embedding: object, tokens: torch.Tensor, scale: float) -> None:
        """Add to out [tokens, hidden], the embeddings of these ids, `scale` times what adapters add."""
        raise NotImplementedError

    def mix(self, out: torch.Tensor, experts: object, x: torch.Tensor, routed: Routed,
            added: torch.Tensor | None) -> None:
        """Replace in out [tokens, hidden], the weighted sums of experts for x plus `added`, those of token rows whose
        adapter changes the experts."""
        raise NotImplementedError

    def add_to_latents(self, out: torch.Tensor, expansion: object, queries: torch.Tensor) -> None:
        """Add to out [tokens, heads, latent] what adapters add to queries [tokens, heads, key] in the latent space."""
        raise NotImplementedError

    def add_to_values(self, out: torch.Tensor, expansion: object, latents: torch.Tensor) -> None:
        """Add to out [tokens, heads, value] what adapters add to the values of latents [tokens, heads, latent]."""
        raise NotImplementedError


@dataclass(frozen=True)
class ProductChange:
    """The adapters' part of one product, added when the product is there."""

    adapters: RowAdapters
    linear: LinearLayer
    x: torch.Tensor
    first: int

    def add_to(self, out: torch.Tensor) -> None:
        """Add it to the product, in place."""
        self.adapters.add_to(out, self.linear, self.x, self.first)

    def activated(self, out: torch.Tensor, activation: str) -> torch.Tensor:
        """Add it to all output features, and return the activation of these. See `LinearFormat.activated`."""
        self.add_to(out)
        return activate(out, activation)


class LoadedAdapters(ABC):
    """The adapters that an engine has loaded. It keeps on the device which row has which."""

    @property
    def is_capturable(self) -> bool:
        """Whether a captured step may have adapters."""
        return False

    @property
    def reach(self) -> AdapterReach:
        """The parts of the model that the adapters on the device change now."""
        return AdapterReach.LINEARS

    @property
    def possible_reach(self) -> AdapterReach:
        """The parts of the model that adapters may change."""
        return AdapterReach.LINEARS

    @abstractmethod
    def admit(self, numbers: Mapping[int, int | None]) -> None:
        """Rows that were just admitted, with the number of the request's adapter; None for the model itself."""

    @abstractmethod
    def of_step(self, rows: torch.Tensor, request_of: torch.Tensor) -> RowAdapters:
        """The adapters of a step's token rows. rows: [requests], the row of each request; request_of: [tokens]. Needs
        nothing that only the host knows."""

    def place(self, placements: Sequence[AdapterPlacement]) -> None:
        """Copy adapters to the places that the scheduler has chosen, before rows are admitted with them."""

    def reset(self) -> None:
        """Forget all rows and places: what the device holds is not known after a failed step."""

    def close(self) -> None:
        """The worker ends."""


class NothingAttends:
    """The `attend` of token rows behind the last layer, which make logits."""

    def mixer(self, layer: int) -> Never:
        raise AssertionError(f"layer {layer} is behind the last layer")


class AuxRecord:
    """The residual stream before some layers, for drafters that read it. A model records it between calls of layers;
    layers that are one call record what lies between them."""

    def __init__(self, wanted: tuple[int, ...]) -> None:
        self.wanted = wanted  # numbers of layers
        self.first = 0  # number of the layer that is called next
        self.seen: dict[int, torch.Tensor] = {}  # [tokens, hidden] each


class StepContext:
    """positions: [tokens] int64, each token's place in its request, which says what it may attend to. rope_positions:
    the places that ropes turn by, the same unless given. history: for models that read ids before a token's own."""

    def __init__(self, attend: Attend, positions: torch.Tensor, *, rope_positions: torch.Tensor | None = None,
                 stand_ins: StandIns | None = None, adapters: RowAdapters | None = None,
                 history: TokenHistory | None = None) -> None:
        self.aux_record: AuxRecord | None = None  # of a model whose layers may record them
        self.attend = attend
        self.positions = positions
        self.rope_positions = positions if rope_positions is None else rope_positions
        self.stand_ins = stand_ins
        self.adapters = adapters
        self.history = history

    def of_rows(self, rows: WantedRows) -> StepContext:
        """The context of some token rows, in the order of `rows`, which bind the layers that attend for them alone."""
        return _RowsContext(self, rows)


class _RowsContext(StepContext):
    """Gathers positions when they are first read: most layers behind a choice of rows read none."""

    def __init__(self, whole: StepContext, rows: WantedRows) -> None:
        self._whole, self._rows = whole, rows.token_rows
        self.attend = rows
        self.stand_ins = self.history = None  # embeddings lie before every choice of rows
        self.aux_record = None  # an auxiliary state has all token rows
        self.adapters = None if whole.adapters is None else whole.adapters.of_rows(rows.token_rows)

    @cached_property
    def positions(self) -> torch.Tensor:
        return self._whole.positions[self._rows]

    @cached_property
    def rope_positions(self) -> torch.Tensor:
        whole = self._whole
        return self.positions if whole.rope_positions is whole.positions else whole.rope_positions[self._rows]
