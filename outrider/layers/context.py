"""StepContext: the data that a layer needs about its token rows in addition to their hidden states.

A model passes one context to every layer, feed-forward and product. The context holds

- the caches of the layers, bound to the step (`attend`);
- each token's position in its request (`positions`), and its position for rope (`rope_positions`), of which some
  models read three components (`rope_components`);
- vectors that replace the embeddings of token ids at some rows (`given_rows`);
- changes to the matrix products of some rows, such as low-rank ones (`deltas`).

A layer that computes only some of the rows passes on the context of these rows (`of_rows`), so a product always knows
its rows. Draft heads and prediction modules are called in the same way. A layer that is one native call applies deltas
itself, from tables (`RowDeltas.factors`). If deltas have no such tables, plain layers are used, which ask for the delta
of each product."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Never, Protocol

import torch

from outrider.core import StepPart
from outrider.core.step_messages import DeltaReach
from outrider.formats import activate
from outrider.mixers import Attend, WantedRows

if TYPE_CHECKING:
    from outrider.kernels.delta_tables import DeltaTables, RowSlots, TargetRange
    from outrider.kernels.moe import Routed
    from outrider.layers.given_rows import GivenRows


@dataclass(frozen=True)
class TokenHistory:
    """The token ids of all requests so far, and the positions of the step's token rows in them. Drafts are not stored
    in the history yet, so ids of the step's own tokens are read from the step."""

    tokens: torch.Tensor  # [ROWS, LENGTH]
    row_of: torch.Tensor  # [tokens] row of the token's request
    offsets: torch.Tensor  # [tokens] how many tokens of its request a token has before it in this step

    def with_before(self, ids: torch.Tensor, positions: torch.Tensor, count: int) -> torch.Tensor:
        """Return the ids of the step with the `count` ids before each: [tokens, 1 + count], the token's own id first,
        then backwards; -1 before the start of a text."""
        index, found = torch.arange(len(ids), device=ids.device), [ids]
        for distance in range(1, count + 1):
            known = self.tokens[self.row_of, (positions - distance).clamp_min(0)]
            own = torch.where(self.offsets >= distance, ids[(index - distance).clamp_min(0)], known)
            found.append(torch.where(positions >= distance, own, -1))
        return torch.stack(found, dim=1)


class LinearLayer(Protocol):
    """The interface of a linear layer for row deltas, which need its identity (`is`) and its sizes."""

    @property
    def in_features(self) -> int: ...

    @property
    def out_features(self) -> int: ...


@dataclass(frozen=True)
class StepFactors:
    """The low-rank factors of a step's row deltas, as tables for a kernel that computes a whole layer."""

    rows: RowSlots
    tables: DeltaTables
    targets: Mapping[int, TargetRange]  # of each linear layer that deltas may change, by its id


class RowDeltas(ABC):
    """Row deltas: changes that each request of a step makes to the matrix products of its token rows. Modules and token
    rows without deltas have the same results, bit for bit, as in a step without any."""

    @abstractmethod
    def of_rows(self, token_rows: torch.Tensor) -> RowDeltas:
        """Return these deltas for some of the token rows."""

    def within(self, reach: DeltaReach) -> RowDeltas:
        """Return these deltas for a step that changes only the kinds of products in `reach`."""
        return self

    @abstractmethod
    def add_to(self, out: torch.Tensor, linear: LinearLayer, x: torch.Tensor, first: int) -> None:
        """Add the delta of each token row. out [tokens, features]: the output features of `linear` from
        `first` on; x: [tokens, inputs]."""

    def begin(self, linear: LinearLayer, x: torch.Tensor, first: int = 0, stop: int | None = None) -> ProductChange:
        """Compute the deltas of output features [first, stop) of `linear` for x [tokens, inputs]. Layers call
        this before the product and add the result right after it, so a part of the work may run beside the product."""
        return ProductChange(self, linear, x, first)

    def factors(self) -> StepFactors | None:
        """Return the factors that `begin` would apply, for layers that run as one kernel. None if the deltas have no
        factors; layers must then call `begin` for every product."""
        return None

    def change(self, module: object) -> bool:
        """Whether deltas of this step may change an embedding, experts or a latent expansion. If not, the methods below
        are not called for the module."""
        return False

    def add_embeddings(self, out: torch.Tensor, embedding: object, tokens: torch.Tensor, scale: float) -> None:
        """Add to the embeddings of these ids, out [tokens, hidden], `scale` times their deltas."""
        raise NotImplementedError

    def mix(self, out: torch.Tensor, experts: object, x: torch.Tensor, routed: Routed,
            added: torch.Tensor | None) -> None:
        """Replace rows of out [tokens, hidden] whose experts have deltas. out: the experts' weighted sums for x, plus
        `added`."""
        raise NotImplementedError

    def add_to_latents(self, out: torch.Tensor, expansion: object, queries: torch.Tensor) -> None:
        """Add the deltas of queries [tokens, heads, key] in the latent space, to out [tokens, heads, latent]."""
        raise NotImplementedError

    def add_to_values(self, out: torch.Tensor, expansion: object, latents: torch.Tensor) -> None:
        """Add the deltas of the values of latents [tokens, heads, latent], to out [tokens, heads, value]."""
        raise NotImplementedError


@dataclass(frozen=True)
class ProductChange:
    """The change that deltas make to one product. It is added after the product is computed."""

    deltas: RowDeltas
    linear: LinearLayer
    x: torch.Tensor
    first: int

    def add_to(self, out: torch.Tensor) -> None:
        """Add the change to the product in place."""
        self.deltas.add_to(out, self.linear, self.x, self.first)

    def activated(self, out: torch.Tensor, activation: str) -> torch.Tensor:
        """Add the change to all output features and return their activation: see `LinearFormat.activated`."""
        self.add_to(out)
        return activate(out, activation)


class DeltaSource(StepPart):
    """The base class of a feature that changes the matrix products of single requests by row deltas, such as low-rank
    ones. It learns which deltas a request uses when the request is admitted to a row."""

    @property
    def is_capturable(self) -> bool:
        """Whether steps with deltas can be captured as CUDA graphs."""
        return False

    @property
    def reach(self) -> DeltaReach:
        """Return the kinds of products that are changed by the deltas that are on the device now."""
        return DeltaReach.LINEARS

    @property
    def possible_reach(self) -> DeltaReach:
        """Return the kinds of products that deltas for this model may change, loaded or not."""
        return DeltaReach.LINEARS

    @property
    def captured_reach(self) -> DeltaReach:
        """Return the kinds of products that deltas may change in a captured step: none, or every kind that a loaded
        delta changes."""
        return self.reach if self.is_capturable else DeltaReach.NOTHING

    @abstractmethod
    def serves(self, rows: Sequence[int]) -> bool:
        """Whether any of these rows has deltas."""

    @abstractmethod
    def of_step(self, rows: torch.Tensor, request_of: torch.Tensor) -> RowDeltas:
        """Return the deltas of a step's token rows. rows [requests]: the row of each request; request_of [tokens]: the
        request of each token. Must not read the device on the host."""


class NoDeltas(DeltaSource):
    """No row has deltas."""

    reach = possible_reach = DeltaReach.NOTHING

    def serves(self, rows: Sequence[int]) -> bool:
        return False

    def of_step(self, rows: torch.Tensor, request_of: torch.Tensor) -> Never:
        raise AssertionError("a step asks for low-rank deltas of weights, but no feature makes them: this is a bug")


NO_DELTAS = NoDeltas()


class NothingAttends:
    """Replaces `attend` in a context after the last layer, in which only logits are computed. Raises an error for every
    layer."""

    def mixer(self, layer: int) -> Never:
        raise AssertionError(f"layer {layer} reads the cache, and this context is for logits only, after the last "
                             "layer")


class AuxRecord:
    """Records the residual stream before some layers, for drafters that read it. A model records it between layers.
    Where several layers run as one call, that call records it."""

    def __init__(self, wanted: tuple[int, ...]) -> None:
        self.wanted = wanted  # numbers of layers
        self.first = 0  # number of the layer that is called next
        self.seen: dict[int, torch.Tensor] = {}  # [tokens, hidden] each


class StepContext:
    """The token rows of a call. positions: [tokens] int64, each token's place in its request, which decides what it may
    attend to. rope_positions: the positions by which ropes rotate, by default equal to `positions`. rope_components:
    [3, tokens] instead of these, for ropes of three components. history: the token ids before each token, for models
    that read them."""

    def __init__(self, attend: Attend, positions: torch.Tensor, *, rope_positions: torch.Tensor | None = None,
                 given_rows: GivenRows | None = None, deltas: RowDeltas | None = None,
                 history: TokenHistory | None = None, rope_components: torch.Tensor | None = None) -> None:
        self.aux_record: AuxRecord | None = None  # of a model whose layers may record them
        self.attend = attend
        self.positions = positions
        self.rope_positions = positions if rope_positions is None else rope_positions
        self.rope_components = rope_components
        self.given_rows = given_rows
        self.deltas = deltas
        self.history = history

    def of_rows(self, rows: WantedRows) -> StepContext:
        """Return the context of some token rows, in the order of `rows`. `attend`, if given, binds the layers that
        attend for these rows only."""
        return _RowsContext(self, rows)


class _RowsContext(StepContext):
    """The context of a selection of token rows. It gathers positions at their first use, because most layers after a
    selection use none."""

    def __init__(self, whole: StepContext, rows: WantedRows) -> None:
        self._whole, self._rows = whole, rows.token_rows
        self.attend = rows
        self.given_rows = self.history = None  # embeddings lie before every choice of rows
        self.rope_components = None  # as do angles
        self.aux_record = None  # an auxiliary state has all token rows
        self.deltas = None if whole.deltas is None else whole.deltas.of_rows(rows.token_rows)

    @cached_property
    def positions(self) -> torch.Tensor:
        return self._whole.positions[self._rows]

    @cached_property
    def rope_positions(self) -> torch.Tensor:
        whole = self._whole
        return self.positions if whole.rope_positions is whole.positions else whole.rope_positions[self._rows]
