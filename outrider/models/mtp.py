"""The multi-token-prediction module: norms of embedding and hidden state, a projection of both, decoder layers.

Families differ in the decoder layers (one or several), in the names of tensors and in a few switches. An
`MTPDescription` contains these differences; a function for each family makes it for a target. Embedding and output are
the target's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch

from outrider.kernels import ops
from outrider.layers import DecoderLayer, Linear, Module, RMSNorm, StepContext, StreamEnd, Unrotated
from outrider.mixers import AttendsTo, AttentionLayer, EveryPosition, LatentLayer, WantedRows
from outrider.models.bailing_hybrid import BailingHybrid
from outrider.models.base import Decoder, Hidden, Model
from outrider.models.config import FULL, ConfigError
from outrider.models.deepseek_v2 import DeepseekV2
from outrider.models.deepseek_v3 import PREDICTED, DeepseekV3, DeepseekV32
from outrider.models.glm4_moe import Glm4Moe
from outrider.models.glm5_next import Glm5Next
from outrider.models.head import SlotHead, SlotRotary
from outrider.models.hy_v4 import HYV4, MODULES
from outrider.models.hybrid import LINEAR
from outrider.models.llama import Llama
from outrider.models.nemotron_h import MOE, NemotronH, kinds_under
from outrider.models.qwen3_next import Qwen3Next
from outrider.models.qwen4_exp import Qwen4Exp

SHARED_CHOICE = "index_share_for_mtp_iteration"
# (index of the first attention layer) -> the decoder layers, and their attention layers.
LayerFactory = Callable[[int], tuple[list[DecoderLayer], Sequence[AttentionLayer | LatentLayer]]]


@dataclass(frozen=True)
class MTPNames:
    """The names of the module's parts in the checkpoint. Any other tensor under `prefix` is an error."""

    prefix: str = "mtp."
    embedding_norm: str = "mtp.pre_fc_norm_embedding"
    hidden_norm: str = "mtp.pre_fc_norm_hidden"
    projection: str = "mtp.fc"
    layers: str = "mtp.layers"
    first_layer: int = 0  # the number of the first one below `layers`
    norm: str = "mtp.norm"
    shared: tuple[str, ...] = ()  # copies of the target's tensors, which are not read


@dataclass(frozen=True)
class MTPDescription:
    """The properties of one family's prediction module in which families differ."""

    layers: LayerFactory
    eps: float
    names: MTPNames = MTPNames()
    norm_offset: bool = False  # norms scale by 1 + weight
    hidden: Literal["final", "before_norm"] = "final"  # which hidden state it consumes, the target's or its own
    embedding_first: bool = True  # whether the embedding comes first in the concatenation
    zeroes_first_embedding: bool = False  # DeepSeek: the embedding at position 0 is 0
    last_writer: int = 0  # index of the last layer that attends: layers behind it need no other tokens
    num_predicted: int | None = 1  # drafts per step that the module was trained for; None if any number
    head_class: type[MTPHead] | None = None  # None: `MTPHead` itself
    following: tuple[MTPDescription, ...] = ()  # modules for later drafts, each of which consumes the one before it


class MTPHead(SlotHead):
    def __init__(self, description: MTPDescription, target: Model, *, first_layer: int, dtype: torch.dtype,
                 device: torch.device) -> None:
        super().__init__(target, target.hidden_size, dtype=dtype, device=device)
        if not isinstance(target, Decoder):
            raise ConfigError(f"method 'mtp': {type(target).__name__} cannot have this drafter: use another method")

        self.description = description
        self.made_for = description.num_predicted
        self.embedding_norm, self.hidden_norm, self.norm = (
            RMSNorm(target.hidden_size, description.eps, dtype=dtype, device=device, offset=description.norm_offset)
            for _ in range(3))
        self.projection = Linear(2 * target.hidden_size, target.hidden_size, bias=False, dtype=dtype, device=device)
        self.layers, attention_layers = description.layers(first_layer)
        self.attention_layers = list(attention_layers)
        rotary = target.rotaries[self.layers[0].rotary]
        self.follows_components = target.has_component_ropes
        self.rotary = rotary if isinstance(rotary, Unrotated) else SlotRotary(rotary)

    def parts(self) -> Sequence[tuple[str, Module]]:
        names = self.description.names
        return [
            (names.embedding_norm, self.embedding_norm),
            (names.hidden_norm, self.hidden_norm),
            (names.projection, self.projection),
            *((f"{names.layers}.{number}", layer) for number, layer in enumerate(self.layers, names.first_layer)),
            (names.norm, self.norm),
        ]

    def arrivals(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the module's tensors among all tensors of the files. The files may be the target's and then contain the
        target's tensors too."""
        names = self.description.names
        return ((name, t) for name, t in tensors if name.startswith(names.prefix) and name not in names.shared)

    def consume(self, hidden: Hidden) -> torch.Tensor:
        return hidden.final if self.description.hidden == "final" else hidden.before_norm

    def slot_name(self, name: str) -> str:
        """Return the slot for a tensor's name. The module's tensors are named like the target's."""
        return self.target.slot_name(name)

    @property
    def last_writer(self) -> int:
        return self.description.last_writer

    def forward(self, tokens: torch.Tensor, hidden: torch.Tensor, context: StepContext,
                rows: WantedRows | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        residual = self.enter(tokens, hidden, context)
        angles = self.rotary.of_step(context.rope_positions, context.rope_components)
        own = context  # of the rows that `residual` has
        delta: Any = None
        for index, layer in enumerate(self.layers):
            if rows is not None and index == self.last_writer:
                delta, residual = layer.for_rows(rows, delta, residual, angles, context)
                own = context.of_rows(rows)
            else:  # behind the last writer nothing depends on positions
                delta, residual = layer(delta, residual, angles, own)
        output, before_norm = self.end(delta, residual, own)
        return output, output if self.description.hidden == "final" else before_norm

    def enter(self, tokens: torch.Tensor, hidden: torch.Tensor, context: StepContext) -> torch.Tensor:
        """Return the residual stream before the first layer."""
        return self.projection(self._joined(tokens, hidden, context), context)

    def end(self, delta: Any, residual: torch.Tensor, context: StepContext) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (the input of `logits`, the residual stream before the final norm)."""
        return self.norm.add_norm(delta, residual)

    def _joined(self, tokens: torch.Tensor, hidden: torch.Tensor, context: StepContext) -> torch.Tensor:
        """Return the normed embedding and the normed hidden state, concatenated: [tokens, 2 x hidden]."""
        description = self.description
        ids, table, scale = self._table(tokens, self.embedding.scale, context)
        gains = (self.embedding_norm.scale, self.hidden_norm.scale)
        return ops.join_embedding(ids, table, hidden, scale=scale, gains=gains,
                                  eps=description.eps, hidden_first=not description.embedding_first,
                                  positions=context.positions if description.zeroes_first_embedding else None)[0]


class StreamMTPHead(MTPHead):
    """A module that continues the target's residual streams. Before its layer, each stream is the sum of two
    projections: that of the normed embedding and that of the normed stream. A gate replaces the final norm."""

    norm: StreamEnd  # type: ignore[assignment]

    def __init__(self, description: MTPDescription, target: Qwen4Exp, *, first_layer: int, dtype: torch.dtype,
                 device: torch.device) -> None:
        size, num_streams = target.hidden_size, target.num_streams
        SlotHead.__init__(self, target, num_streams * size, dtype=dtype, device=device)
        self.description, self.made_for, self.num_streams = description, description.num_predicted, num_streams
        self.embedding_norm, self.hidden_norm = (
            RMSNorm(width, description.eps, dtype=dtype, device=device, offset=True)
            for width in (size, num_streams * size))
        self.embedding_product, self.hidden_product = (Linear(size, size, bias=False, dtype=dtype, device=device)
                                                       for _ in range(2))
        self.norm = target.make_norm()
        self.layers, attention_layers = description.layers(first_layer)
        self.attention_layers = list(attention_layers)
        self.rotary = SlotRotary(target.rotaries[0])

    def parts(self) -> Sequence[tuple[str, Module]]:
        names = self.description.names
        return [
            (names.embedding_norm, self.embedding_norm),
            (names.hidden_norm, self.hidden_norm),
            (f"{names.projection}_embedding", self.embedding_product),
            (f"{names.projection}_hidden", self.hidden_product),
            (f"{names.layers}.0", self.layers[0]),
            (names.norm, self.norm),
        ]

    def enter(self, tokens: torch.Tensor, hidden: torch.Tensor, context: StepContext) -> torch.Tensor:
        embedded = self.embedding_product(self.embedding_norm(self.embedding(tokens, context)), context)
        size = embedded.shape[1]
        streams = self.hidden_product(self.hidden_norm(hidden).view(-1, size), context).view(-1, self.num_streams, size)
        return (streams + embedded[:, None]).flatten(1)

    def end(self, delta: Any, residual: torch.Tensor, context: StepContext) -> tuple[torch.Tensor, torch.Tensor]:
        return self.norm.end(delta, residual, context)


_FAMILIES: dict[type[Model], Callable[..., MTPDescription]] = {}


def register_mtp(model_class: type[Model], describe: Callable[..., MTPDescription]) -> None:
    """Use `describe(target)` for targets of this class and of its subclasses."""
    _FAMILIES[model_class] = describe


def build_mtp_modules(target: Model, *, first_layer: int, dtype: torch.dtype, device: torch.device) -> list[MTPHead]:
    """Build all modules of the target, in the order of the drafts that they make."""
    first = describe_mtp(target)
    made: list[MTPHead] = []
    for description in (first, *first.following):
        make = description.head_class or MTPHead
        made.append(make(description, target, first_layer=first_layer, dtype=dtype, device=device))
        first_layer += len(made[-1].attention_layers)
    return made


def no_module(where: str) -> ConfigError:
    """Return the error for a checkpoint without a module. `where`: the file or key that shows it."""
    return ConfigError(f"{where}: the checkpoint has no multi-token-prediction module. Choose another method than "
                       "'mtp' in speculative_config (ngram and suffix need no files), or a checkpoint with a module")


def describe_mtp(target: Model) -> MTPDescription:
    if isinstance(target, Decoder):
        for key in (PREDICTED, "mtp_num_hidden_layers"):
            if target.config.get(key, int, 1) == 0:
                raise no_module(f"{target.config.source}: {key}=0")
    for model_class in type(target).__mro__:
        if model_class in _FAMILIES:
            return _FAMILIES[model_class](target)
    known = ", ".join(sorted(c.__name__ for c in _FAMILIES))
    raise ConfigError(f"method 'mtp': {type(target).__name__} has no multi-token-prediction module: use another method "
                      f"(models with such a module: {known})")


def has_own_module(model_class: type[Model]) -> bool:
    """Whether published checkpoints of this class contain a prediction module. (A module can also be trained for any
    model like Llama.)"""
    describe = next((_FAMILIES[each] for each in model_class.__mro__ if each in _FAMILIES), _describe_nothing)
    return describe not in (_describe_llama, _describe_nothing)


def llama_layer(target: Llama, index: int) -> tuple[list[DecoderLayer], list[AttentionLayer]]:
    """Return one more layer like the target's, with full attention."""
    attention = target.attention_layer(index)
    return [target.make_layer(attention)], [attention]


def _describe_llama(target: Llama) -> MTPDescription:
    return MTPDescription(lambda index: llama_layer(target, index), target.sizes.eps,
                          num_predicted=target.config.get(PREDICTED, int, 1))


def _describe_qwen(target: Qwen3Next) -> MTPDescription:
    target.config.must_equal("mtp_use_dedicated_embeddings", False, default=False)
    for key in (PREDICTED, "mtp_num_hidden_layers"):
        target.config.must_equal(key, 1, default=1)
    return MTPDescription(target.full_layers, target.sizes.eps, norm_offset=True, num_predicted=None)


def _describe_nemotron_h(target: NemotronH) -> MTPDescription:
    config = target.config
    config.must_equal(PREDICTED, 1, default=1)  # more would be modules of their own
    kinds = kinds_under(config, "mtp_layers_block_type", "mtp_hybrid_override_pattern")
    if not kinds and not config.has("n_routed_experts"):
        raise no_module(f"{config.source}: mtp_hybrid_override_pattern is missing")
    kinds = kinds or [FULL, MOE]
    if FULL not in kinds or LINEAR in kinds:
        raise config.refusal("mtp_hybrid_override_pattern", "the module must have an attention layer and no recurrent "
                                                            "layers")
    first, last = "mtp.layers.0", f"mtp.layers.{len(kinds) - 1}"
    names = MTPNames(embedding_norm=f"{first}.enorm", hidden_norm=f"{first}.hnorm", projection=f"{first}.eh_proj",
                     norm=f"{last}.final_layernorm")

    def layers(index: int) -> tuple[list[DecoderLayer], list[AttentionLayer]]:
        numbers = [index + kinds[:i].count(FULL) for i in range(len(kinds))]
        made: list[DecoderLayer] = [target.layer(n, kind) for n, kind in zip(numbers, kinds, strict=True)]
        return made, [target.attention_layer(index + i) for i in range(kinds.count(FULL))]

    last_writer = max(i for i, kind in enumerate(kinds) if kind == FULL)
    return MTPDescription(layers, target.sizes.eps, names, last_writer=last_writer, num_predicted=None)


def _describe_deepseek(target: DeepseekV3) -> MTPDescription:
    """Describe DeepSeek's module: one more layer with experts, and with an indexer if the target has indexers. The
    config says whether later drafting passes keep the positions that the first pass chose."""
    config, count = target.config, target.num_predicted
    if count > 1:
        config.must_equal(SHARED_CHOICE, False, default=False)  # no checkpoint says whose choice later modules keep
    first, *later = (_deepseek_module(target, target.num_layers + i) for i in range(count))
    return replace(first, num_predicted=count, following=tuple(later))


def _names_behind(target: Decoder, number: int) -> MTPNames:
    """Return the names of a module that the checkpoint stores as one more layer with this number."""
    module = f"{target.names.layers}.{number}"
    return MTPNames(prefix=f"{module}.", embedding_norm=f"{module}.enorm", hidden_norm=f"{module}.hnorm",
                    projection=f"{module}.eh_proj", layers=target.names.layers, first_layer=number,
                    norm=f"{module}.shared_head.norm",
                    shared=(f"{module}.embed_tokens.weight", f"{module}.shared_head.head.weight"))


def _deepseek_module(target: DeepseekV3, number: int) -> MTPDescription:
    def layers(index: int) -> tuple[list[DecoderLayer], list[LatentLayer]]:
        attends_to: AttendsTo = EveryPosition()
        if isinstance(target, DeepseekV32):
            lasts = target.config.get(SHARED_CHOICE, bool, False)
            attends_to = replace(target.indexed_positions(), lasts_for_drafting=lasts)
        attention = target.latent_layer(index, attends_to)
        return [target.layer(attention, is_sparse=True)], [attention]

    return MTPDescription(layers, target.sizes.eps, _names_behind(target, number), zeroes_first_embedding=True)


def _describe_hy_v4(target: HYV4) -> MTPDescription:
    """Describe HY-V4's module: a layer with experts and an indexer. It reads the target's final state and has one
    residual stream. The config says whether later drafting passes keep the positions that the first pass chose. The
    publisher lets one module make three drafts."""
    config, count = target.config, target.num_predicted
    if count > 1:
        config.must_equal(SHARED_CHOICE, False, default=False)  # no checkpoint says whose choice later modules keep
    lasts = config.get(SHARED_CHOICE, bool, False)

    def layers(index: int) -> tuple[list[DecoderLayer], list[LatentLayer]]:
        layer, latent = target.predicting_layer(index, lasts)
        return [layer], [latent]

    def module(number: int) -> MTPDescription:
        prefix = f"{MODULES}.{number}"
        names = MTPNames(prefix=f"{prefix}.", embedding_norm=f"{prefix}.enorm", hidden_norm=f"{prefix}.hnorm",
                         projection=f"{prefix}.eh_proj", layers=MODULES, first_layer=number,
                         norm=f"{prefix}.final_layernorm",
                         shared=(f"{prefix}.embed_tokens.weight", f"{prefix}.shared_head.head.weight"))
        return MTPDescription(layers, target.sizes.eps, names, zeroes_first_embedding=True)

    first, *later = map(module, range(count))
    return replace(first, num_predicted=None if count == 1 else count, following=tuple(later))


def _describe_glm(target: Glm4Moe) -> MTPDescription:
    """Describe GLM's module: one more layer with experts."""
    first, *later = (MTPDescription(lambda index: llama_layer(target, index), target.sizes.eps,
                                    _names_behind(target, target.num_layers + i), zeroes_first_embedding=True)
                     for i in range(target.num_predicted))
    return replace(first, num_predicted=target.num_predicted, following=tuple(later))


def _describe_nothing(target: Decoder) -> MTPDescription:
    raise no_module(target.config.source)


def _describe_bailing(target: BailingHybrid) -> MTPDescription:
    """Describe Bailing's module: one more layer with latent attention and experts."""
    target.config.must_equal(PREDICTED, 1, default=1)  # how several would follow each other no checkpoint says
    module = f"{target.names.layers}.{target.num_layers}"
    names = MTPNames(prefix=f"{module}.", embedding_norm=f"{module}.enorm", hidden_norm=f"{module}.hnorm",
                     projection=f"{module}.eh_proj", layers=target.names.layers, first_layer=target.num_layers,
                     norm=f"{module}.final_layernorm",
                     shared=(f"{module}.word_embeddings.weight", f"{module}.shared_head.head.weight"))

    def layers(index: int) -> tuple[list[DecoderLayer], list[LatentLayer]]:
        layer, latent = target.predicting_layer(index)
        return [layer], [latent]

    return MTPDescription(layers, target.sizes.eps, names)


def _describe_glm5_next(target: Glm5Next) -> MTPDescription:
    """Describe GLM5-Next's module: one more layer with latent attention to blocks and with experts, over the target's
    final state. The config says whether later drafting passes keep the blocks that the first pass chose. The publisher
    lets one module make several drafts."""
    target.config.must_equal(PREDICTED, 1, default=1)  # how several would follow each other no checkpoint says
    lasts = target.config.get(SHARED_CHOICE, bool, False)

    def layers(index: int) -> tuple[list[DecoderLayer], list[LatentLayer]]:
        layer, latent = target.predicting_layer(index, lasts)
        return [layer], [latent]

    return MTPDescription(layers, target.sizes.eps, _names_behind(target, target.num_layers), num_predicted=None)


def _describe_qwen4(target: Qwen4Exp) -> MTPDescription:
    """Describe Qwen4-Exp's module: one more layer that attends to chosen blocks, over the target's streams. Every
    drafting pass chooses blocks again, even if the checkpoint says that later passes keep the first choice, because a
    new choice can include the newest tokens."""
    target.config.must_equal("mtp_use_dedicated_embeddings", False, default=False)
    for key in (PREDICTED, "mtp_num_hidden_layers"):
        target.config.must_equal(key, 1, default=1)

    def layers(index: int) -> tuple[list[DecoderLayer], list[AttentionLayer | LatentLayer]]:
        layer, attention = target.predicting_layer(index)
        return [layer], [attention]

    names = MTPNames(norm="mtp.hyper_connection_mixer")
    return MTPDescription(layers, target.sizes.eps, names, norm_offset=True, hidden="before_norm", num_predicted=None,
                          head_class=StreamMTPHead)


register_mtp(Llama, _describe_llama)
register_mtp(Glm4Moe, _describe_glm)
register_mtp(DeepseekV2, _describe_nothing)
register_mtp(BailingHybrid, _describe_bailing)
register_mtp(Glm5Next, _describe_glm5_next)
register_mtp(DeepseekV3, _describe_deepseek)
register_mtp(HYV4, _describe_hy_v4)
register_mtp(Qwen3Next, _describe_qwen)
register_mtp(Qwen4Exp, _describe_qwen4)
register_mtp(NemotronH, _describe_nemotron_h)
