"""Module: an object with weights, and with parts that are modules too. Also the base classes of layers and models.

A module declares its parts once. Tensor names, finalization and searches follow from this declaration.
"""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

import torch

from outrider.cache.groups import LayerCache
from outrider.core.ranks import ShardSize, rank_refusal
from outrider.formats import (
    FormatChoice,
    InputShard,
    LinearFormat,
    OutputShard,
    RankGroup,
    TensorShard,
    WeightFormat,
    WeightSlot,
    build_format,
    join_names,
)
from outrider.layers.context import StepContext
from outrider.layers.rotary import Angles
from outrider.mixers import WantedRows

if TYPE_CHECKING:
    from outrider.formats import ExpertsFormat

Format = TypeVar("Format", bound=WeightFormat[Any])


class Module:
    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        for old, name in (("cut", "shard"), ("cut_sizes", "shard_sizes")):  # as version 0.1 called them
            if old in vars(cls):
                raise TypeError(f"{cls.__name__}.{old}: the method is called {name} now. Rename it.")

    def parts(self) -> Sequence[tuple[str, Module]]:
        """Return the modules inside this one, each with the name that its tensors have below this module's prefix (""
        for none)."""
        return ()

    def weights(self, prefix: str = "") -> dict[str, WeightSlot]:
        """Return the slots of this module: one for every tensor that a checkpoint must contain, by the tensor's
        name."""
        slots: dict[str, WeightSlot] = {}
        for name, part in self.parts():
            slots |= part.weights(join_names(prefix, name))
        return slots

    def declare_formats(self, choice: FormatChoice, prefix: str = "") -> None:
        """Choose the format of every weight by the form in which the source stores it, before any weight is allocated.
        prefix: the module's name in the checkpoint."""
        for name, part in self.parts():
            part.declare_formats(choice, join_names(prefix, name))

    def shard(self, group: RankGroup) -> None:
        """Keep this rank's part of every sharded weight; called before formats are declared and weights allocated. By
        default every rank holds the whole module. Blocks with heads or inner features override this."""
        for _, part in self.parts():
            part.shard(group)

    def shard_sizes(self) -> Sequence[ShardSize]:
        """Return the sizes of this module, not of its parts, that `shard` divides by the number of ranks."""
        return ()

    def finalize(self) -> None:
        """Compute tensors that are derived from weights. Called after loading and before the first forward, and again
        whenever the weights are loaded again."""
        for _, part in self.parts():
            part.finalize()

    def set_exact(self, exact: bool) -> None:
        """Choose exact or ordinary operations. Called for every module before models are prepared. In exact mode the
        result of a token row is the same, bit for bit, in every batch."""


class HeldRows(NamedTuple):
    """The rows of a checkpoint's tensor that this rank holds. The whole tensor has `size` rows."""

    size: int
    held: tuple[range, ...]
    axis: int = 0  # of the tensor, on which the rows lie


class Parameter(Module):
    """A tensor of the checkpoint that a layer uses directly, without a weight format. `rows`: the rows that this rank
    holds, if not all."""

    def __init__(self, tensor: torch.Tensor, rows: HeldRows | None = None) -> None:
        self.tensor, self.rows = tensor, rows

    def weights(self, prefix: str = "") -> dict[str, WeightSlot]:
        rows = self.rows
        if rows is None:
            return {prefix: WeightSlot(self.tensor)}
        shape = (*self.tensor.shape[: rows.axis], rows.size, *self.tensor.shape[rows.axis + 1 :])
        return {prefix: WeightSlot(self.tensor, shard=TensorShard(shape, rows.axis, rows.held))}


class FormatModule(Module, Generic[Format]):
    """A module with a weight that a format owns. The format is built, and the weight allocated, at the first access.
    Before that, `declare_formats` may choose the format."""

    format_base: type[Format]  # what the module needs of a format
    is_product = False  # the format multiplies token rows, and is prepared before it does

    def __init__(self, declared: Any, make_dense: Callable[[Any], Format]) -> None:
        self.declared = declared
        self._make = make_dense

    @cached_property
    def format(self) -> Format:
        made: Format = build_format(self.declared, self._make)
        return made

    def declare_shard(self, shard: OutputShard | InputShard) -> None:
        """Keep this rank's part of the weight."""
        assert "format" not in self.__dict__, "the weight is allocated already"
        self.declared = replace(self.declared, shard=shard)

    def declare_cut(self, cut: OutputShard | InputShard) -> None:
        warnings.warn("declare_cut is called declare_shard now: rename it", FutureWarning, stacklevel=2)
        self.declare_shard(cut)

    def declare_formats(self, choice: FormatChoice, prefix: str = "") -> None:
        assert "format" not in self.__dict__, "the weight is allocated already"
        names = (join_names(prefix, name) for name in self.declared.matrices())
        self._make = choice.kept(self.format_base, self.declared, names) or self._make

    def weights(self, prefix: str = "") -> dict[str, WeightSlot]:
        return self.format.slots(prefix)

    def finalize(self) -> None:
        self.format.finalize()

    def set_exact(self, exact: bool) -> None:
        self.format.set_exact(exact)


Kind = TypeVar("Kind")


def find_modules(roots: Iterable[Module], kind: type[Kind]) -> list[Kind]:
    """Find every module of a kind among the roots and their parts, each once, in the order of the parts."""
    found: dict[int, Kind] = {}

    def search(module: Module) -> None:
        if isinstance(module, kind):
            found.setdefault(id(module), module)
        for _, part in module.parts():
            search(part)

    for root in roots:
        search(root)
    return list(found.values())


class FeedForward(Module, ABC):
    """The part of a layer that treats every token row separately: an MLP, or a mixture of experts."""

    def readers(self) -> Sequence[LinearFormat | ExpertsFormat]:
        """Return the formats of all weights that are multiplied with this part's input. Empty if other code reads the
        input too."""
        return ()

    @abstractmethod
    def __call__(self, x: torch.Tensor, context: StepContext) -> torch.Tensor:
        """Compute the part's result for x: [tokens, hidden], the token rows of the context."""


class TokenMixer(Module, ABC):
    """The part of a layer in which token rows of a request exchange information: attention, or a recurrence."""

    layer: Any = None  # the mixers' description of this rank's part, if it is attention

    def readers(self) -> Sequence[LinearFormat]:
        """The formats of all weights that are multiplied with this part's input: see `FeedForward.readers`."""
        return ()

    @abstractmethod
    def __call__(self, x: torch.Tensor, angles: Angles, context: StepContext) -> torch.Tensor:
        """Compute the part's result for x: [tokens, hidden], the token rows of the context."""

    def for_rows(self, x: torch.Tensor, angles: Angles, context: StepContext, rows: WantedRows) -> torch.Tensor:
        """Return the results for `rows` only. Keys and values, or states, of all of x are still written to the
        caches."""
        return self(x, angles, context)[rows.token_rows]


class DecoderLayer(Module):
    """A layer that adds to the residual stream. It does not make its last addition but returns it as `delta`. The next
    layer's first norm adds it, so that sum and norm are one operation."""

    rotary: int = 0  # index of the model's rope that the layer uses

    # (delta, residual, angles, context, *further inputs of this layer) -> (delta of this layer, or None if it is added
    # already; the residual stream before it). A delta is a `layers.norm.Delta`; only layers of one family and
    # `RMSNorm.add_norm` must understand it.
    __call__: Callable[..., tuple[Any, torch.Tensor]]

    def prepare(self) -> None:
        """Prepare the layer for steps; called when the formats of its weights are prepared."""

    def with_next(self, following: Sequence[DecoderLayer], *args: Any) -> tuple[int, Any, torch.Tensor]:
        """Call this layer, together with as many of the `following` layers as one call can compute. Return the number
        of layers that ran, and delta and residual stream after the last of them. args: the arguments of `__call__`,
        with which all these layers are called."""
        return 1, *self(*args)

    def for_rows(self, rows: WantedRows, *args: Any) -> tuple[Any, torch.Tensor]:
        """A layer that changes nothing. It replaces layers whose kernels an earlier layer has compiled already."""
        delta, residual = self(*args)
        if delta is not None:
            delta = delta[rows.token_rows] if isinstance(delta, torch.Tensor) else delta.for_rows(rows.token_rows)
        return delta, residual[rows.token_rows]


class PassingLayer(DecoderLayer):
    """A layer that adds nothing. While kernels are compiled, it replaces layers whose kernels another layer has
    compiled."""

    def __init__(self, rotary: int) -> None:
        self.rotary = rotary

    def __call__(self, delta: Any, residual: torch.Tensor, *_: Any) -> tuple[Any, torch.Tensor]:
        return delta, residual


class LayeredModule(Module):
    """A model or a draft head. Fused layers may replace elements of its `layers`."""

    layers: Sequence[DecoderLayer] = ()
    attention_layers: list[Any]  # the mixers' descriptions of layers: `AttentionLayer`, `LatentLayer`
    dtype: torch.dtype
    group: RankGroup | None = None  # the ranks that hold it together; None if it is held by one process
    _shortened: tuple[Sequence[DecoderLayer], Sequence[DecoderLayer]] = (), ()  # layers, and the first of each kind

    @property
    def last_writer(self) -> int:
        """Return the index of the last layer that writes a cache."""
        return len(self.layers) - 1

    def shard(self, group: RankGroup) -> None:
        """Keep this rank's part of every sharded weight. `attention_layers` then describe the heads that this rank
        holds."""
        check_ranks(self, group.count)
        super().shard(group)
        self.group = group
        held = {part.layer.index: part.layer for part in find_modules([self], Module)
                if isinstance(part, TokenMixer) and part.layer is not None}
        self.attention_layers = [held.get(layer.index, layer) for layer in self.attention_layers]

    def config_name(self, size: ShardSize) -> str:
        """Return the name that a size has in the module's config."""
        return size.keys[0]

    def cache_layers(self) -> list[LayerCache]:
        return [LayerCache(layer.index, layer.cache_spec(self.dtype.itemsize)) for layer in self.attention_layers]

    def follow_target(self) -> None:
        """Refresh a draft head's copies of its target's weights, because these weights may have changed."""

    def ignores(self, name: str) -> bool:
        """Whether a checkpoint may contain this tensor although the model does not use it."""
        return name.endswith("rotary_emb.inv_freq")

    def check_ignored(self, name: str, tensor: torch.Tensor) -> None:
        """Raise ValueError if a tensor that is about to be ignored shows that the checkpoint needs a computation that
        this module does not support."""

    def slot_name(self, name: str) -> str:
        """Return the module's name for a tensor of the checkpoint. Modules override this if files of one family have
        several names for the same tensor."""
        return name

    @contextmanager
    def one_layer_each(self) -> Iterator[None]:
        """Context manager: inside it only the first layer of each kind runs, which is enough to compile the kernels of
        all layers. The last layer that writes a cache runs too, because it may compute only some token rows."""
        layers = self.layers
        known, short = self._shortened
        if len(known) != len(layers) or any(one is not other for one, other in zip(known, layers, strict=True)):
            short = self._first_of_each_kind()
            self._shortened = [*layers], short  # start-up asks a hundred times, and weights of experts are many
        self.layers = short
        try:
            yield
        finally:
            self.layers = layers

    def _first_of_each_kind(self) -> Sequence[DecoderLayer]:
        short: list[DecoderLayer] = []
        kinds = set()
        for index, layer in enumerate(self.layers):
            shapes = tuple((name, slot.shape, slot.target.dtype, slot.kind)
                           for name, slot in layer.weights("").items())
            kind = (type(layer), layer.rotary, shapes)
            short.append(PassingLayer(layer.rotary) if kind in kinds and index != self.last_writer else layer)
            kinds.add(kind)
        return short


def check_ranks(module: LayeredModule, num_ranks: int) -> None:
    """Raise an error that names the first size of a model or a draft head that does not divide by the number of ranks.
    Called before anything is allocated."""
    sizes = [size for part in find_modules([module], Module) for size in part.shard_sizes()]
    refused = next((size for size in sizes if not size.fits(num_ranks)), None)
    if refused is not None:
        raise ValueError(rank_refusal(module.config_name(refused), refused, num_ranks, sizes))
