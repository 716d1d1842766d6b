"""EAGLE-1 and EAGLE-3 draft heads, from checkpoints in their original format or in that of the speculators library.

EAGLE-1 joins the embedding of a token with the target's last hidden state and runs one Llama layer on it. EAGLE-3 joins
several of the target's residual streams, feeds embedding and hidden state side by side to its first layer's attention,
and may have a reduced vocabulary."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from outrider.formats import WeightSlot
from outrider.kernels import ops
from outrider.layers import Angles, FusedLinear, Linear, Module, RMSNorm, Rotary, StepContext, copy_stream
from outrider.mixers import AttentionLayer, WantedRows
from outrider.models.base import Hidden, Model
from outrider.models.block_config import is_block_config
from outrider.models.config import (
    FULL,
    SLIDING,
    ConfigError,
    ConfigReader,
    Sizes,
    layer_windows,
    read_rope,
    refuse_unsupported,
)
from outrider.models.file_head import OTHER_HEAD, OTHER_SIZE, FileHead
from outrider.models.head import SlotHead, SlotRotary
from outrider.models.llama import LlamaLayer

# Other forms of the names used here: the original EAGLE-3, the speculators form of EAGLE-1, a whole model's prefix.
RENAMED = ((r"^model\.", ""), (r"^midlayer\.", "layers.0."), (r"^fusion_fc\.", "fc."), (r"^transformer\.", "layers.0."))
KINDS = {"eagle": "EAGLE-1", "eagle3": "EAGLE-3"}


@dataclass(frozen=True)
class HeadConfig:
    """A head's config in either format. `top` is the whole file; `layer` describes its transformer layers."""

    top: ConfigReader
    layer: ConfigReader
    is_speculators: bool

    @classmethod
    def read(cls, config: ConfigReader) -> HeadConfig:
        is_speculators = config.has("speculators_model_type")
        layer = config.section("transformer_layer_config") if is_speculators else config
        refuse_unsupported(layer)
        return cls(config, layer, is_speculators)

    @property
    def method(self) -> str:
        if self.is_speculators:
            return self.top.must_equal("speculators_model_type", *KINDS)
        architectures = self.top.get("architectures", list, [])
        return "eagle3" if any("Eagle3" in str(name) for name in architectures) else "eagle"

    @property
    def made_for(self) -> int | None:
        """Return the number of drafts per step for which the head was trained. None if the config does not have this
        number."""
        settings = self.top.get("speculators_config", dict, {})
        counts = [m.get("speculative_tokens") for m in settings.get("proposal_methods") or []]
        return max((count for count in counts if isinstance(count, int)), default=None)

    def option(self, key: str) -> ConfigReader:
        """Return the reader of the dict that has the key: some EAGLE-3 heads have it under `eagle_config`."""
        nested = self.top.section_or_empty("eagle_config")
        return nested if nested.has(key) else self.top


def build_eagle(config: ConfigReader, method: str, target: Model, *, first_layer: int, max_len: int, dtype: torch.dtype,
                device: torch.device) -> EagleHead:
    """Build a head without its weights. Its layers are numbered from `first_layer` on, after the target's."""
    if is_block_config(config):
        raise ConfigError(f"{config.source} describes a block drafter and the method is {method!r}: use method 'block'")
    head = HeadConfig.read(config)
    if head.method != method:
        raise ConfigError(f"{config.source} describes an {KINDS[head.method]} head and the method is {method!r}: use "
                          f"method {head.method!r}")
    head_class = Eagle3Head if method == "eagle3" else Eagle1Head
    made = head_class(head, target, first_layer=first_layer, max_len=max_len, dtype=dtype, device=device)
    config.refuse_unread()
    return made


class EagleHead(FileHead, SlotHead):
    """The base class of both kinds of heads. It holds their sizes, rope and tensor names."""

    renamed = RENAMED
    first: LlamaLayer  # its parts are called one by one; `layers` are those after it

    def __init__(self, head: HeadConfig, target: Model, *, first_layer: int, max_len: int, dtype: torch.dtype,
                 device: torch.device) -> None:
        self.config = head
        sizes = Sizes.read(head.layer, head_dim=128 if self.has_head_norm else None)
        super().__init__(head.top.source, head.layer, sizes, target, dtype=dtype, device=device)
        self.made_for = head.made_for
        rope = read_rope(head.layer, sizes.head_dim)
        self.rotary = SlotRotary(Rotary(rope, max_len=max_len, dtype=dtype, device=device))
        kinds = head.layer.get("layer_types", list, [FULL] * sizes.num_layers)
        if SLIDING not in kinds:
            head.layer.must_equal("use_sliding_window", False, default=False)
            head.layer.passes_over("sliding_window", "max_window_layers")
        self.attention_layers = [
            AttentionLayer(first_layer + index, sizes.num_heads, sizes.num_kv_heads, sizes.head_dim,
                           scale=sizes.head_dim**-0.5, window=window)
            for index, window in enumerate(layer_windows(head.layer, kinds))
        ]

    @property
    def has_head_norm(self) -> bool:
        return self.config.layer.raw("model_type") == "qwen3"

    def _layers_from(self, x: torch.Tensor, residual: torch.Tensor, angles: Angles, context: StepContext,
                     rows: WantedRows | None) -> tuple[torch.Tensor, torch.Tensor]:
        """Run all layers. x: the input of the first layer's attention; residual: the residual stream before that
        layer."""
        first, *others = self.first, *self.layers
        if rows is not None and not others:
            mixed, residual = first.attention.for_rows(x, angles, context, rows), residual[rows.token_rows]
        else:
            mixed = first.attention(x, angles, context)
        y, residual = first.mlp_norm.add_norm(mixed, residual)
        delta = first.mlp(y, context if rows is None or others else context.of_rows(rows))
        for layer in others:
            if rows is not None and layer is others[-1]:
                delta, residual = layer.for_rows(rows, delta, residual, angles, context)
            else:
                delta, residual = layer(delta, residual, angles, context)
        return delta, residual

    def layer_parts(self) -> list[tuple[str, Module]]:
        layers: list[tuple[str, Module]]
        layers = [(f"layers.{index}", layer) for index, layer in enumerate((self.first, *self.layers))]
        return [*layers, *([] if self.own_output is None else [("lm_head", self.own_output)])]

    def _layer(self, layer: AttentionLayer) -> LlamaLayer:
        attention_bias = self.config.layer.get("attention_bias", bool, False)
        return LlamaLayer(
            layer, self.sizes, qkv_bias=attention_bias, out_bias=attention_bias,
            mlp_bias=self.config.layer.get("mlp_bias", bool, False), has_head_norm=self.has_head_norm,
            dtype=self.dtype, device=self.device,
        )


class Eagle1Head(EagleHead):
    """An EAGLE-1 head, which runs its layers on fc([embedding, hidden]). The first layer does not norm its input, and
    no norm follows the last layer."""

    def __init__(self, head: HeadConfig, target: Model, *, first_layer: int, max_len: int, dtype: torch.dtype,
                 device: torch.device) -> None:
        super().__init__(head, target, first_layer=first_layer, max_len=max_len, dtype=dtype, device=device)
        head.top.must_equal("layernorms", False, default=False)
        head.top.must_equal("transformer_layer_architecture", "LlamaDecoderLayer", default="LlamaDecoderLayer")
        if self.hidden_size != target.hidden_size:
            raise head.layer.refusal("hidden_size", OTHER_SIZE.format(target.hidden_size), OTHER_HEAD)
        bias = head.top.get("fusion_bias" if head.is_speculators else "bias", bool, False)
        self.fc = Linear(2 * self.hidden_size, self.hidden_size, bias=bias, dtype=dtype, device=device)
        first, *others = (self._layer(layer) for layer in self.attention_layers)
        self.first, self.layers = first, others

    def parts(self) -> Sequence[tuple[str, Module]]:
        return [("fc", self.fc), *self.layer_parts()]

    def weights(self, prefix: str = "") -> dict[str, WeightSlot]:
        unused = self.first.input_norm.weights("layers.0.input_layernorm")
        return {name: slot for name, slot in super().weights(prefix).items() if name not in unused}

    def consume(self, hidden: Hidden) -> torch.Tensor:
        return hidden.final

    def forward(self, tokens: torch.Tensor, hidden: torch.Tensor, context: StepContext,
                rows: WantedRows | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        angles = self.rotary.at(context.rope_positions)
        ids, table, _ = self._table(tokens, None, context)
        x = self.fc(ops.join_embedding(ids, table, hidden)[0], context)
        output = copy_stream(*self._layers_from(x, x, angles, context, rows))
        return output, output


class Eagle3Head(EagleHead):
    """An EAGLE-3 head: fc(residual streams) is the hidden state, and the first layer's attention reads
    [norm(embedding), norm(hidden)]."""

    def __init__(self, head: HeadConfig, target: Model, *, first_layer: int, max_len: int, dtype: torch.dtype,
                 device: torch.device) -> None:
        super().__init__(head, target, first_layer=first_layer, max_len=max_len, dtype=dtype, device=device)
        for key in ("use_aux_hidden_state", "use_input_layernorm_in_first_layer", "use_last_layernorm"):
            head.option(key).must_equal(key, True, default=True)
        self.aux_layers = read_aux_layers(head, target)
        wide = self.read_target_size(head.top, head.layer)
        self.read_vocabulary(head.top)
        self.norm_before_residual = head.top.get("norm_before_residual", bool, head.is_speculators)
        self.feeds_back_normed = head.top.get("norm_output", bool, False)
        self._build(wide, dtype, device)

    def _build(self, wide: int, dtype: torch.dtype, device: torch.device) -> None:
        def norm(size: int) -> RMSNorm:
            return RMSNorm(size, self.sizes.eps, dtype=dtype, device=device)

        count, head = len(self.aux_layers), self.config
        joint = head.option("norm_before_fc").get("norm_before_fc", bool, False)
        each = head.option("fc_norm").get("fc_norm", bool, False)
        self.input_norm = norm(count * wide) if joint else None
        self.aux_norms = [norm(wide) for _ in range(count if each else 0)]
        self.fc = Linear(count * wide, self.hidden_size, bias=False, dtype=dtype, device=device)
        first, *others = (self._layer(layer) for layer in self.attention_layers)
        # The one difference of shape to a Llama layer: embedding and hidden state side by side.
        qkv = first.attention.qkv
        has_bias = head.layer.get("attention_bias", bool, False)
        first.attention.qkv = FusedLinear(2 * self.hidden_size, qkv.stored, bias=has_bias, dtype=dtype, device=device)
        self.first, self.layers = first, others
        self.hidden_norm, self.norm = norm(self.hidden_size), norm(self.hidden_size)

    def parts(self) -> Sequence[tuple[str, Module]]:
        first, *others = self.layer_parts()
        return [
            ("fc", self.fc),
            first,
            ("norm", self.norm),
            ("layers.0.hidden_norm", self.hidden_norm),
            *([] if self.input_norm is None else [("input_norm", self.input_norm)]),
            *((f"fc_norm.{index}", norm) for index, norm in enumerate(self.aux_norms)),
            *others,
        ]

    def consume(self, hidden: Hidden) -> torch.Tensor:
        states = list(hidden.aux_states)
        if self.input_norm is not None:
            states = list(self.input_norm(torch.cat(states, dim=-1)).chunk(len(states), dim=-1))
        if self.aux_norms:
            states = [norm(state) for norm, state in zip(self.aux_norms, states, strict=True)]
        return self.fc(torch.cat(states, dim=-1), hidden.context)

    def forward(self, tokens: torch.Tensor, hidden: torch.Tensor, context: StepContext,
                rows: WantedRows | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        angles = self.rotary.at(context.rope_positions)
        ids, table, _ = self._table(tokens, None, context)
        gains = (self.first.input_norm.scale, self.hidden_norm.scale)
        x, normed = ops.join_embedding(ids, table, hidden, gains=gains, eps=self.sizes.eps)
        residual = normed if self.norm_before_residual else hidden
        delta, residual = self._layers_from(x, residual, angles, context, rows)
        output, before_norm = self.norm.add_norm(delta, residual)
        return output, output if self.feeds_back_normed else before_norm


def read_aux_layers(head: HeadConfig, target: Model) -> tuple[int, ...]:
    """Return the numbers of the residual streams that the head reads: i is the stream after i layers of the target."""
    key = "eagle_aux_hidden_state_layer_ids"
    reader = head.option(key)
    count = target.num_layers
    aux_layers = reader.get(key, list, [2, count // 2, count - 3])
    if not aux_layers or not all(isinstance(each, int) and 0 <= each <= count for each in aux_layers):
        raise ConfigError(
            f"{reader.source}: {key}={aux_layers!r} is not supported: the target has {count} layers, so ids are 0 "
            f"(the embedding) to {count}; use a head that was made for this target, or set {key}"
        )
    return tuple(aux_layers)
