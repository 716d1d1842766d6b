"""Model: the interface of models to the engine and to draft heads. Decoder: the forward that decoders share.

A model defines weights and computations. It does not depend on pages, batches or sampling. Token rows of different
requests interact only in attention, which is called through `context.attend`."""

from __future__ import annotations

import logging
import warnings
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

from outrider.core.class_head import ClassHead
from outrider.formats import DenseLinear, RankGroup, VocabularyShard
from outrider.kernels import ops
from outrider.kernels.fp8_cache import ScaleNumbers
from outrider.layers import (
    AuxRecord,
    Embedding,
    GatedMLP,
    LayeredModule,
    Linear,
    Module,
    RMSNorm,
    RopeParams,
    Rotary,
    ShardSize,
    StepContext,
    TiedLinear,
    copy_stream,
)
from outrider.mixers import AttentionLayer, RecurrentMixer, WantedRows
from outrider.models.config import ConfigReader, Sizes

log = logging.getLogger("outrider")
COMPARED_ROWS = 64  # of an output in the files that is not used, with the embedding


@dataclass(frozen=True)
class Hidden:
    """The hidden states that a forward pass returns. Each tensor is [tokens, hidden]."""

    final: torch.Tensor  # after the final norm: what `logits` takes
    before_norm: torch.Tensor
    aux_states: tuple[torch.Tensor, ...]  # the residual stream after the layers asked for, in the order asked
    context: StepContext  # of all token rows of the forward

    @property
    def taps(self) -> tuple[torch.Tensor, ...]:
        warnings.warn("hidden.taps is called hidden.aux_states now", FutureWarning, stacklevel=2)
        return self.aux_states

    def final_of(self, token_rows: torch.Tensor) -> torch.Tensor:
        """Return the final hidden states of the token rows that make logits."""
        return self.final[token_rows]

    def last_final(self, token_rows: torch.Tensor, logit_rows: torch.Tensor) -> torch.Tensor:
        """Return the final hidden states of some tokens. token_rows: their indices among all token rows; logit_rows:
        their indices among the rows that make logits. A subclass that keeps only the latter rows uses logit_rows."""
        return self.final[token_rows]


@dataclass(frozen=True)
class WantedHidden(Hidden):
    """Hidden states of a forward that computed only the token rows that make logits: `final` and `before_norm` are
    [wanted rows, hidden]. Auxiliary states have all token rows."""

    token_rows: torch.Tensor  # the wanted ones

    def final_of(self, token_rows: torch.Tensor) -> torch.Tensor:
        assert token_rows is self.token_rows, "other token rows were asked for"
        return self.final

    def last_final(self, token_rows: torch.Tensor, logit_rows: torch.Tensor) -> torch.Tensor:
        # A token without a logit row gets another token's state, which is never read.
        return self.final[logit_rows.clamp(0, len(self.final) - 1)]


class Model(LayeredModule, ABC):
    """The base class of models. The constructor takes (config: ConfigReader, *, dtype, device, max_len). The loader
    fills the weights, by the names in `parts`."""

    vocab_size: int
    hidden_size: int
    num_layers: int
    max_positions: int  # positions of the config; max_len of an engine may be less
    device: torch.device
    embed_tokens: Embedding
    lm_head: Linear
    recurrent_layers: Mapping[int, RecurrentMixer] = MappingProxyType({})  # by layer index
    cache_scales: Mapping[int, ScaleNumbers] = MappingProxyType({})  # of a cache in fp8, by layer index
    file_values: Mapping[str, Any] = MappingProxyType({})  # the values of the config file, if it was built from one
    file_name: str = ""  # of that file
    has_component_ropes: bool = False  # positions of three components rotate some layers (`StepContext`)
    placeholders: tuple[int, ...] = ()  # tokens that stand for images or sound in prompts; no lookup drafts them
    may_see: bool = False  # whether the family takes the features of its checkpoints' vision towers
    sees: bool = False  # whether this model does: its checkpoint has a tower
    reads_history: bool = False  # layers read the ids before a token's own: contexts must have a history
    classes: ClassHead | None = None  # a head that scores classes; the model generates no text then
    reads_device: bool = False  # whether its forward waits for values of tensors, so that no step can be captured

    @abstractmethod
    def forward(
        self, tokens: torch.Tensor, context: StepContext, aux_layers: tuple[int, ...] = (),
        rows: WantedRows | None = None,
    ) -> Hidden:
        """Compute hidden states. tokens: [tokens] int64. aux_layers: the auxiliary states to return, where i is the
        residual stream after i layers (0: the embedding). rows: the token rows for which `final` and `before_norm` are
        computed, in their order; by default all."""

    @abstractmethod
    def logits(self, hidden: torch.Tensor, context: StepContext) -> torch.Tensor:
        """The logits [n, vocabulary] in float32 (float64 in a float64 model). hidden: [n, hidden] after the final norm,
        for the token rows of the context."""

    def class_scores(self, hidden: torch.Tensor, context: StepContext) -> torch.Tensor:
        """The scores [n, classes] of a model with classes. hidden: see `logits`."""
        raise NotImplementedError


class DecoderNames(NamedTuple):
    """The names of a decoder's parts in the checkpoint."""

    embedding: str = "model.embed_tokens"
    norm: str = "model.norm"
    layers: str = "model.layers"
    output: str = "lm_head"

    @classmethod
    def below(cls, prefix: str) -> DecoderNames:
        return cls(f"{prefix}.embed_tokens", f"{prefix}.norm", f"{prefix}.layers")


class Decoder(Model):
    """A model that consists of an embedding, layers, a norm and a head. A family's constructor sets `layers`,
    `rotaries` and `attention_layers`."""

    names = DecoderNames()
    activation = "silu"  # activation of MLPs and experts
    norm_offset = False  # norms scale by 1 + weight
    has_output = True  # the checkpoint has a head over the vocabulary, its own or the embedding
    _unused_output: torch.Tensor | None = None  # some rows of an output in the files that a tied head does not use
    rotaries: list[Rotary]
    softcap: float | None = None  # soft limit of the logits
    logit_scale: float | None = None  # the logits are multiplied by it

    def __init__(
        self,
        config: ConfigReader,
        sizes: Sizes,
        *,
        dtype: torch.dtype,
        device: torch.device,
        embedding_scale: float | None = None,
    ) -> None:
        self.config = config
        self.sizes = sizes = sizes if self.has_output else replace(sizes, is_tied=True)
        self.vocab_size = sizes.vocab_size
        self.hidden_size = sizes.hidden_size
        self.num_layers = sizes.num_layers
        self.max_positions = sizes.max_positions
        self.dtype = dtype
        self.device = device
        self.embed_tokens = Embedding(
            sizes.vocab_size, sizes.hidden_size, dtype=dtype, device=device, scale=embedding_scale
        )
        if sizes.is_tied:
            self.lm_head = TiedLinear(self.embed_tokens)
        else:
            self.lm_head = Linear(sizes.hidden_size, sizes.vocab_size, bias=False, dtype=dtype, device=device)
        self.norm = self.make_norm()

    def make_norm(self) -> RMSNorm:
        sizes = self.sizes
        return RMSNorm(sizes.hidden_size, sizes.eps, dtype=self.dtype, device=self.device, offset=self.norm_offset)

    def make_mlp(self, width: int, *, bias: bool = False, is_packed: bool = False) -> GatedMLP:
        return GatedMLP(self.hidden_size, width, activation=self.activation, bias=bias, is_packed=is_packed,
                        dtype=self.dtype, device=self.device)

    def make_rotary(self, rope: RopeParams, max_len: int | None) -> Rotary:
        return Rotary(rope, max_len=max_len or self.max_positions, dtype=self.dtype, device=self.device)

    def attention_layer(self, index: int, window: int | None = None) -> AttentionLayer:
        sizes, scale = self.sizes, self.sizes.head_dim**-0.5
        return AttentionLayer(index, sizes.num_heads, sizes.num_kv_heads, sizes.head_dim, scale, window)

    def shard(self, group: RankGroup) -> None:
        super().shard(group)
        shard = VocabularyShard.from_group(group)
        self.embed_tokens.declare_shard(shard)
        self.lm_head.declare_shard(shard)

    def config_name(self, size: ShardSize) -> str:
        values = self.config.values
        key = next((key for key in size.keys if values.get(key) == size.size), size.keys[0])
        return f"{self.config.source}: {key}"

    def parts(self) -> Sequence[tuple[str, Module]]:
        names = self.names
        return [
            (names.embedding, self.embed_tokens),
            (names.norm, self.norm),
            *((f"{names.layers}.{index}", layer) for index, layer in enumerate(self.layers)),
            # A tied head has the embedding's tensor.
            (names.embedding if self.sizes.is_tied else names.output, self.lm_head),
        ]

    def ignores(self, name: str) -> bool:
        return super().ignores(name) or (self.sizes.is_tied and name == f"{self.names.output}.weight")

    def check_ignored(self, name: str, tensor: torch.Tensor) -> None:
        if self.has_output and name == f"{self.names.output}.weight" and isinstance(tensor, torch.Tensor):
            self._unused_output = tensor[:: max(1, len(tensor) // COMPARED_ROWS)].clone()

    def finalize(self) -> None:
        super().finalize()
        unused, self._unused_output = self._unused_output, None
        is_plain = isinstance(self.embed_tokens.format, DenseLinear)  # else its rows may be rounded
        if unused is None or not is_plain or self.group is not None or self.device.type == "meta":
            return
        step = max(1, self.vocab_size // COMPARED_ROWS)
        rows = self.embed_tokens.format.look_up(torch.arange(0, self.vocab_size, step, device=self.device))
        if rows.shape != unused.shape or not torch.equal(rows, unused.to(rows)):
            log.warning("%s: the files hold another %s.weight than the embedding, and tie_word_embeddings is true: the "
                        "embedding makes the logits. To use that tensor, set "
                        "hf_overrides={'tie_word_embeddings': False}", self.config.source, self.names.output)

    def forward(
        self, tokens: torch.Tensor, context: StepContext, aux_layers: tuple[int, ...] = (),
        rows: WantedRows | None = None,
    ) -> Hidden:
        assert rows is None or self.num_layers not in aux_layers, "an auxiliary state has all token rows"
        assert all(0 <= each <= self.num_layers for each in aux_layers), f"{aux_layers} of {self.num_layers} layers"
        angles = [rotary.of_step(context.rope_positions, context.rope_components) for rotary in self.rotaries]
        residual, own = self.embed_tokens(tokens, context), context  # `own`: of the rows that `residual` has
        own_inputs = self.layer_inputs(tokens, residual, context)
        residual = self.begin(residual)
        delta: Any = None
        record = AuxRecord(aux_layers)
        seen = record.seen
        cut = None if rows is None else self._cut(rows, aux_layers)
        is_usual = type(self).aux_state is Decoder.aux_state  # then layers that are one call record between them
        context.aux_record = record if is_usual else None
        added = 0 if context.given_rows is None else len(context.given_rows.added)  # layers with something to add after
        usual_stops = () if is_usual else aux_layers
        stops = {*range(1, added + 1), *usual_stops, self.num_layers if cut is None else cut, self.num_layers}
        index = 0
        while index < self.num_layers:
            layer = self.layers[index]
            if index in aux_layers:
                seen[index] = self.aux_state(delta, residual)
            record.first = index
            args = (delta, residual, angles[layer.rotary], own, *own_inputs[index])
            if index != cut:
                end = index + 1 if own_inputs[index] else min(stop for stop in stops if stop > index)
                done, delta, residual = layer.with_next(self.layers[index + 1 : end], *args)
            else:
                assert rows is not None
                done = 1
                delta, residual = layer.for_rows(rows, *args)
                angles, own = [every.of_rows(rows.token_rows) for every in angles], context.of_rows(rows)
                own_inputs = [tuple(each[rows.token_rows] for each in inputs) for inputs in own_inputs]
            index += done
            if index <= added and context.given_rows is not None:
                context.given_rows.add_after(index - 1, residual)
        final, before_norm = self.end(delta, residual, own)
        if self.num_layers in aux_layers:
            seen[self.num_layers] = self.aux_state(None, before_norm)
        states = (final, before_norm, tuple(seen[each] for each in aux_layers), context)
        return Hidden(*states) if rows is None else WantedHidden(*states, rows.token_rows)

    # The residual stream outside of layers. Models with several streams override all three.

    def begin(self, embedded: torch.Tensor) -> torch.Tensor:
        """Return the residual stream before the first layer."""
        return embedded

    def aux_state(self, delta: Any, residual: torch.Tensor) -> torch.Tensor:
        """Return the residual stream for drafters, [tokens, hidden]: a copy, because layers change the stream in
        place."""
        return copy_stream(delta, residual)

    def end(self, delta: Any, residual: torch.Tensor, context: StepContext) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (the final state, the residual stream before the final norm)."""
        return self.norm.add_norm(delta, residual)

    def _cut(self, rows: WantedRows, aux_layers: tuple[int, ...]) -> int:
        """Return the index of the first layer that is computed only for the wanted rows. This is the last layer, or the
        last one that writes a cache, if all layers after it can attend for these rows alone. Layers before a wanted
        auxiliary state are computed for all token rows."""
        last = self.num_layers - 1
        if self.last_writer == last or any(index not in rows.layers for index in range(self.last_writer + 1, last + 1)):
            return last
        return max(self.last_writer, *aux_layers, 0)

    def layer_inputs(self, tokens: torch.Tensor, embedded: torch.Tensor,
                     context: StepContext) -> Sequence[tuple[torch.Tensor, ...]]:
        """Return the extra input tensors of each layer, besides the residual stream. Most models have none."""
        return [()] * self.num_layers

    def logits(self, hidden: torch.Tensor, context: StepContext) -> torch.Tensor:
        return self.limited(self.lm_head.wide(hidden, context))

    def limited(self, logits: torch.Tensor) -> torch.Tensor:
        """Apply the logit scale and the soft cap to the output layer's logits, perhaps in place."""
        if self.logit_scale is not None:
            logits = logits.mul_(self.logit_scale)
        return logits if self.softcap is None else ops.cap_logits(logits, self.softcap)
