"""Prepare loaded models to run: formats choose their products, and fused layers replace plain ones.

A fused layer is built from a loaded plain layer with the right device, dtype, formats and shape; a table lists the
fused layers to try. Code outside the package adds its own with `register_fused_layer`.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from outrider.kernels import cpu
from outrider.kernels.cpu import BoundLayer, LayerWeights
from outrider.kernels.vendor_products import MANY_ROWS
from outrider.layers.base import DecoderLayer, FormatModule, LayeredModule, Module, find_modules
from outrider.layers.context import AuxRecord, RowDeltas, StepContext
from outrider.layers.decoder import AttentionMLPLayer
from outrider.layers.linear import Linear
from outrider.layers.mlp import ACTIVATIONS, GatedMLP
from outrider.layers.rotary import Angles
from outrider.mixers import PagedLayer, WantedRows
from outrider.mixers.paged.backend import KeyValueCache
from outrider.mixers.paged.native_backend import NativeBackend

if TYPE_CHECKING:
    from outrider.kernels.delta_tables import TargetRange


class FusedLayer(DecoderLayer):
    """A layer that replaces a loaded plain layer. It uses the plain layer's weights, and calls the plain layer for
    batches that it does not serve."""

    def __init__(self, plain: DecoderLayer) -> None:
        self.plain = plain
        self.rotary = plain.rotary

    def parts(self) -> Sequence[tuple[str, Module]]:
        return (("", self.plain),)

    def for_rows(self, rows: WantedRows, *args: Any) -> tuple[Any, torch.Tensor]:
        return self.plain.for_rows(rows, *args)


class NativeRun(NamedTuple):
    """Consecutive layers that one native call computes, with their caches."""

    cache: Callable[[], KeyValueCache | None]  # the first layer's, while it lives: which pool the run is bound to
    following: Sequence[DecoderLayer]  # asked for behind the first layer
    joined: BoundLayer | None  # those that one native call does together; None if the first must be done in parts


class NativeDecoderLayer(FusedLayer):
    """A decoder layer as one native call on the CPU. Its results are the same, bit for bit, as those of the parts
    computed one by one."""

    def __init__(self, plain: AttentionMLPLayer, weights: LayerWeights) -> None:
        super().__init__(plain)
        self.index, self.native_weights = plain.attention.layer.index, weights
        self.head_norms = plain.attention.norms
        self.linears = _linears(plain)
        self._cache: Callable[[], KeyValueCache | None] = lambda: None  # the cache that `_bound` is made for, while it
        self._bound: BoundLayer | None = None  # lives
        self._run: NativeRun | None = None  # this layer and those behind it, as they were last called
        self._targets: tuple[Mapping[int, TargetRange], bytes] | None = None  # of row deltas, and of the run's layers

    @classmethod
    def try_build(cls, plain: DecoderLayer) -> NativeDecoderLayer | None:
        """Build the layer; None if the plain layer has another shape, or if a format has no native product for this
        device and dtype."""
        if not isinstance(plain, AttentionMLPLayer):
            return None
        mlp = plain.mlp
        if mlp.activation not in ACTIVATIONS:
            return None
        linears = _linears(plain)
        products = [product for linear in linears if (product := linear.format.native_product()) is not None]
        if len(products) < len(linears) or plain.input_norm.eps != plain.mlp_norm.eps:
            return None
        weights = LayerWeights(plain.input_norm.scale, plain.mlp_norm.scale, plain.input_norm.eps,
                               *(product.matrix for product in products), gelu=mlp.activation != "silu",
                               max_tokens=min(product.max_rows for product in products))
        return cls(plain, weights)

    def __call__(
        self, delta: torch.Tensor | None, residual: torch.Tensor, angles: Angles, context: StepContext
    ) -> tuple[torch.Tensor | None, torch.Tensor]:
        return self.with_next((), delta, residual, angles, context)[1:]

    def with_next(
        self, following: Sequence[DecoderLayer], delta: torch.Tensor | None, residual: torch.Tensor, angles: Angles,
        context: StepContext,
    ) -> tuple[int, torch.Tensor | None, torch.Tensor]:
        paged: PagedLayer = context.attend.mixer(self.index)
        run = self._run
        if run is None or run.cache() is not paged.cache or run.following != following:
            run = self._run = NativeRun(weakref.ref(paged.cache), following, self._join(following, context))
            self._targets = None
        deltas = None if context.deltas is None else self._deltas(run, context.deltas)
        if run.joined is not None and (deltas is None) == (context.deltas is None):
            assert isinstance(paged.backend, NativeBackend)
            aux_states = between(context.aux_record, run.joined.count, residual)
            first = 0 if context.aux_record is None else context.aux_record.first
            kept = {layer - first: stream for layer, stream in aux_states.items()}
            added = paged.backend.decoder_layer(run.joined, paged.plan, delta, residual, angles, deltas, kept)
            if added is not None:
                if context.aux_record is not None:
                    context.aux_record.seen.update(aux_states)
                return run.joined.count, added, residual
        return 1, *self.plain(delta, residual, angles, context)

    def _deltas(self, run: NativeRun, deltas: RowDeltas) -> cpu.LayerDeltas | None:
        """Return the tables of a step's row deltas for the layers of a run. None if the tables cannot express the
        deltas, so that plain layers must run."""
        factors = deltas.factors()
        if factors is None or run.joined is None:
            return None
        if self._targets is None or self._targets[0] is not factors.targets:
            layers = (self, *run.following[: run.joined.count - 1])
            packed = [cpu.pack_layer_targets([factors.targets.get(id(linear)) for linear in layer.linears])
                      for layer in layers if isinstance(layer, NativeDecoderLayer)]
            self._targets = factors.targets, b"".join(packed)
        return cpu.LayerDeltas.build(factors.rows, factors.tables, self._targets[1])

    def _join(self, following: Sequence[DecoderLayer], context: StepContext) -> BoundLayer | None:
        """Return this layer joined with the following layers that the same native call can compute. None if this layer
        must be computed part by part. The answer depends on layers and caches, not on the step."""
        paged: PagedLayer = context.attend.mixer(self.index)
        bound = self._bind(paged)
        if bound is None:
            return None
        run = [bound]
        for layer in following:
            if not isinstance(layer, NativeDecoderLayer) or layer.rotary != self.rotary:
                break
            beside: PagedLayer = context.attend.mixer(layer.index)
            if beside.plan is not paged.plan or (also := layer._bind(beside)) is None:
                break
            if also.max_tokens != bound.max_tokens:
                break
            run.append(also)
        return BoundLayer.joined(run)

    def _bind(self, paged: PagedLayer) -> BoundLayer | None:
        """Return this layer with its cache for the native call. None if the layer must be computed part by part."""
        if self._cache() is not paged.cache:
            self._cache, self._bound = weakref.ref(paged.cache), None
            if isinstance(paged.backend, NativeBackend):
                self._bound = paged.backend.bind_layer(paged, self.native_weights, self.head_norms)
        return self._bound


def _linears(layer: AttentionMLPLayer) -> tuple[Linear, Linear, Linear, Linear]:
    """Return the layer's linear layers, in the order of `LayerWeights`."""
    return layer.attention.qkv, layer.attention.out, layer.mlp.gate_up, layer.mlp.down


def between(record: AuxRecord | None, count: int, residual: torch.Tensor) -> dict[int, torch.Tensor]:
    """Return the buffers for auxiliary hidden states between the `count` layers of one call. The key is the number of
    the layer after the state."""
    if record is None:
        return {}
    return {layer: torch.empty_like(residual) for layer in record.wanted if record.first < layer < record.first + count}


class InPlaceLayer(FusedLayer):
    """A layer in which the last kernel of attention, and of the MLP, adds its result to the residual stream. On a GPU a
    single token row takes little more time than reading the weights, so every saved small kernel counts. With many
    rows, norms read and write half as much."""

    plain: AttentionMLPLayer

    @classmethod
    def try_build(cls, plain: DecoderLayer) -> InPlaceLayer | None:
        """Build the layer; None if the last product of attention or MLP cannot add to the residual stream in its
        kernel."""
        if not isinstance(plain, AttentionMLPLayer):
            return None
        can_add = plain.attention.out.format.adds_single_row and plain.mlp.down.format.adds_single_row
        return cls(plain) if can_add else None

    def __call__(
        self, delta: torch.Tensor | None, residual: torch.Tensor, angles: Angles, context: StepContext
    ) -> tuple[torch.Tensor | None, torch.Tensor]:
        plain = self.plain
        if delta is not None or 1 < residual.shape[0] < MANY_ROWS or context.deltas is not None:
            return plain(delta, residual, angles, context)
        plain.attention.add_to(residual, plain.input_norm(residual), angles, context)
        plain.mlp.add_to(residual, plain.mlp_norm(residual), context)
        return None, residual


TryBuild = Callable[[DecoderLayer], DecoderLayer | None]  # a layer that replaces the plain one, or None

_REPLACEMENTS: list[TryBuild] = [NativeDecoderLayer.try_build, InPlaceLayer.try_build]


def register_fused_layer(try_build: TryBuild) -> None:
    """Register a fused layer, which is tried before the ones registered earlier."""
    _REPLACEMENTS.insert(0, try_build)


def prepare(models: Sequence[LayeredModule], allow_copies: bool, exact: bool = False) -> int:
    """Prepare loaded models. `allow_copies`: formats may hold a second, faster copy of weights. `exact`: the result of
    a token row must be the same, bit for bit, in every batch. Return how many bytes formats hold besides the weights'
    slots. A model may be prepared again."""
    for module in find_modules(models, Module):
        module.set_exact(exact)
    num_bytes = sum(module.format.prepare(allow_copies) for module in _find_products(models))
    for mlp in find_modules(models, GatedMLP):
        mlp.prepare()
    for layer in find_modules(models, DecoderLayer):
        layer.prepare()
    for model in models:
        model.layers = [fuse(layer) for layer in model.layers]
    return num_bytes


def _find_products(models: Sequence[LayeredModule]) -> list[FormatModule[Any]]:
    """Return all linear layers and experts of the models, whose formats must be prepared."""
    return [module for module in find_modules(models, FormatModule) if module.is_product]


def restore_order(models: Sequence[LayeredModule]) -> None:
    """Undo the reordering of weights by `prepare`, before some of them are overwritten."""
    for linear in find_modules(models, Linear):
        linear.format.restore_order()


def use_activation_bits(model: LayeredModule, bits: int) -> str:
    """Round token rows in products to 8 or 16 bits; 32 is as precise as float32. Return a log line with the number of
    weights whose products round, and their largest error."""
    held = _find_products([model])
    digits = min(bits, 24)
    errors = [error for module in held if (error := module.format.use_activation_bits(digits)) is not None]
    if bits == 8 and not errors:
        raise ValueError("activation_bits=8 finds no weights that it could be used with: it needs a CPU, dtype "
                         "float32, a C compiler, keep_quantized=True, and GGUF weights or integers or 4-bit floats in "
                         "groups of a multiple of 32 inputs. Leave activation_bits out")
    error = max(errors, default=0)
    return (f"activation_bits={bits}: {len(errors)} of {len(held)} weights multiply activations rounded to {digits} "
            f"bits; the largest error of a product on random activations is {error:.2g} of its largest result")


def fuse(layer: DecoderLayer) -> DecoderLayer:
    plain = layer.plain if isinstance(layer, FusedLayer) else layer
    return next((fused for try_build in _REPLACEMENTS if (fused := try_build(plain)) is not None), plain)
