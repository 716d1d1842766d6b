"""GLM5-Next (GLM-5.3-Flash): KDA layers, every fourth a latent attention layer without positions and with an indexer
that chooses blocks of the context; several residual streams that mix; limited activations; experts beside a shared one.

Only text is served: from a checkpoint with a vision tower only the language model is read. A multi-token-prediction
module with one residual stream follows the last layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from outrider.kernels.activations import limited_silu
from outrider.kernels.streams import StreamRule, mean_streams
from outrider.kernels.token_blocks import TokenBlocks
from outrider.layers import (
    DecoderLayer,
    KDANames,
    KDAShape,
    LatentShape,
    PreNormLayer,
    Rotary,
    StepContext,
    TokenMixer,
    Unrotated,
)
from outrider.layers.hyper_connections import HyperConnection, HyperLayer
from outrider.layers.latent_attention import POOL_GATE
from outrider.mixers import AttendsTo, LatentLayer, PooledPositions, SharedPositions
from outrider.models.base import DecoderNames
from outrider.models.config import FULL, ConfigReader
from outrider.models.deepseek_v3 import PREDICTED, SHARED_INDEX, read_index_kinds
from outrider.models.hybrid import LINEAR
from outrider.models.kimi_linear import LINEAR_SECTION, KimiLinear
from outrider.models.sources.quantization import KEY

INDEXED = "indexed_attention"
TEXT = "text_config"
LOWER_BOUND = -5.0  # of the logarithms of KDA's decays, in configs that name none
# Values of keys that a file may leave out, as the makers' own code has them.
DEFAULTS: dict[str, Any] = {"rms_norm_eps": 1e-5, "routed_scaling_factor": 2.5, "first_k_dense_replace": 3}


class Glm5Next(KimiLinear):
    """The language model of Glm5NextForConditionalGeneration. In text-only files the config has no section for the
    language model, and tensor names are shorter."""

    kda_names = KDANames(decay_axes=(0, 0))
    experts_name = "mlp"
    expert_names = ("gate_proj", "up_proj", "down_proj")

    def __init__(
        self, config: ConfigReader, *, dtype: torch.dtype, device: torch.device, max_len: int | None = None
    ) -> None:
        if config.has(TEXT):
            self.names = DecoderNames.below("model.language_model")
            text = config.section(TEXT)
            values: dict[str, Any] = {"tie_word_embeddings": config.get("tie_word_embeddings", bool, False)}
            config.passes_over("image_start_token_id", "image_end_token_id", "video_start_token_id",
                               "video_end_token_id")
            if config.has(KEY):
                values[KEY] = config.get(KEY, dict, {})
            config = text.with_values(values)
        super().__init__(config, dtype=dtype, device=device, max_len=max_len)

    def in_common_words(self, config: ConfigReader) -> ConfigReader:
        for key, only in (("scoring_func", "sigmoid"), ("topk_method", "noaux_tc"), ("moe_layer_freq", 1),
                          ("tie_word_embeddings", False), ("mhc", True), ("index_kpool_compress", True),
                          ("index_kpool_always_select_tail", True), ("attention_bias", False)):
            config.must_equal(key, only, default=only)
        config.must_equal("index_key_dtype", "auto", default="auto")  # keys of blocks have no fp8 form
        if config.get("qk_rope_head_dim", int, 0):
            raise config.refusal("qk_rope_head_dim", "it must be 0 in this family")
        # Nothing rotates, and the heads of both kinds of layers have sizes of their own.
        config.passes_over("rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor", "head_dim",
                           "indexer_rope_interleave", "first_k_dense_replace")
        missing = {key: value for key, value in DEFAULTS.items() if not config.has(key)}
        config = config.with_values({"head_dim": None, **missing})
        limit = config.get("swiglu_limit", float, 10.0)
        if not limit > 0:
            raise config.refusal("swiglu_limit", "it must be greater than 0")
        self.activation = limited_silu(limit)
        self.rule = StreamRule(config.get("hc_mult", int, 4, least=2), config.get("rms_norm_eps", float, 1e-5),
                               config.get("hc_eps", float, 1e-6, least=0), post_factor=2.0,
                               num_rounds=config.get("hc_sinkhorn_iters", int, 20, least=1))
        self.index_kinds = _read_index_kinds(config)
        return config

    def read_rotary(self, max_len: int | None) -> Rotary:
        return Unrotated(0, dtype=self.dtype, device=self.device)

    def read_latent_shape(self) -> LatentShape:
        config, num_heads = self.config, self.sizes.num_heads
        config.must_equal("num_key_value_heads", num_heads, default=num_heads)
        nope_dim = config.required("qk_nope_head_dim", int)
        config.must_equal("qk_head_dim", nope_dim, default=nope_dim)
        return LatentShape(self.hidden_size, config.required("q_lora_rank", int), nope_dim,
                           config.required("v_head_dim", int), has_bias=False, index_rotates_pairs=False,
                           norm_eps=self.sizes.eps)

    def read_kda_shape(self) -> KDAShape:
        """Read the sizes of KDA layers, from a separate section or else from beside the other keys."""
        config, own = self.config, self.config.section_or_empty(LINEAR_SECTION)
        own.passes_over("full_attn_layers")
        bound: float | None = LOWER_BOUND
        if "linear_lower_bound" in config.values:  # null says that there is none
            bound = config.optional("linear_lower_bound", float, most=0.0)
        bound = own.optional("gate_lower_bound", float, most=0.0) or bound
        if own.get("safe_gate", bool, bool(own.values)) and bound is None:
            bound = LOWER_BOUND
        return KDAShape(
            own.get("num_heads", int, config.get("linear_num_heads", int, 64, least=1), least=1),
            own.get("head_dim", int, config.get("linear_head_dim", int, 128, least=1), least=1),
            own.get("short_conv_kernel_size", int, config.get("linear_conv_kernel_dim", int, 4, least=1), least=1),
            bound,
        )

    def read_kinds(self) -> list[str]:
        return read_kinds(self.config, self.num_layers)

    # Latent layers

    def latent_layer(self, index: int) -> LatentLayer:
        attends_to: AttendsTo = self.pooled_positions(anchor=0)
        if self.index_kinds[index] == SHARED_INDEX:
            attends_to = SharedPositions()
        return self._latent_layer(index, attends_to)

    def _latent_layer(self, index: int, attends_to: AttendsTo) -> LatentLayer:
        return LatentLayer(index, self.sizes.num_heads, self.config.required("kv_lora_rank", int), 0,
                           self.shape.nope_dim**-0.5, attends_to)

    def pooled_positions(self, anchor: int) -> PooledPositions:
        """Return the rule by which the indexer chooses blocks. anchor: the position at which the first block begins."""
        config = self.config
        size, budget = config.get("index_kpool", int, 16, least=1), config.required("index_topk", int)
        if size & (size - 1):
            raise config.refusal("index_kpool", "it must be a power of two")
        if budget % size:
            raise config.refusal("index_topk", f"it must be a multiple of index_kpool ({size})")
        return PooledPositions(config.required("index_n_heads", int), config.required("index_head_dim", int),
                               budget // size, blocks=TokenBlocks(size, anchor))

    # Layers

    def layer(self, index: int, mixer: TokenMixer, is_sparse: bool) -> DecoderLayer:
        names = [(f"hc_{half}_fn", f"hc_{half}_base", f"hc_{half}_scale") for half in ("attn", "ffn")]
        mixer_streams, mlp_streams = (HyperConnection(self.hidden_size, self.rule, own, dtype=self.dtype,
                                                      device=self.device, keeps_float32=True) for own in names)
        mlp = self.make_experts(index) if is_sparse else self.make_mlp(self.sizes.intermediate_size)
        return HyperLayer(mixer_streams, self.make_norm(), mixer, mlp_streams, self.make_norm(), mlp)

    def predicting_layer(self, index: int, lasts: bool) -> tuple[DecoderLayer, LatentLayer]:
        """Return the layer of a prediction module, with one residual stream. The module's first token has position 1,
        so its blocks begin there. lasts: whether later drafting passes keep the blocks that the first pass chose."""
        latent = self._latent_layer(index, replace(self.pooled_positions(anchor=1), lasts_for_drafting=lasts))
        layer = PreNormLayer(self.make_norm(), self.attention(latent), self.make_norm(), self.make_experts(index))
        return layer, latent

    # Files

    def slot_name(self, name: str) -> str:
        """Return the slot for a tensor's name. Files store the gates' matrix without ".weight" in its name;
        transformers' modules have it as a module with a weight."""
        name = name.replace(".self_attn.forget_gate.", ".self_attn.")
        return f"{name}.weight" if name.endswith(POOL_GATE) else name

    def ignores(self, name: str) -> bool:
        """Ignore the layers after the last one: they are the multi-token-prediction modules."""
        count = max(1, self.config.get(PREDICTED, int, 1))
        modules = tuple(f"{self.names.layers}.{self.num_layers + i}." for i in range(count))
        return super().ignores(name) or name.startswith(("model.visual.", *modules)) or ".hc_head" in name

    # Streams

    def begin(self, embedded: torch.Tensor) -> torch.Tensor:
        return embedded.repeat(1, self.rule.num_streams)

    def aux_state(self, delta: Any, residual: torch.Tensor) -> torch.Tensor:
        """Return the auxiliary state: the mean of the streams."""
        return mean_streams(residual, self.rule.num_streams)

    def end(self, delta: Any, residual: torch.Tensor, context: StepContext) -> tuple[torch.Tensor, torch.Tensor]:
        return self.norm(self.aux_state(delta, residual)), residual


def read_kinds(config: ConfigReader, num_layers: int) -> list[str]:
    """Read the kind of each layer from `layer_types` or from the list of KDA layers (counted from 0). By default every
    fourth layer has attention, and the others are KDA layers."""
    own = config.section_or_empty(LINEAR_SECTION)
    numbers = own.get("kda_layers", list[int], [i for i in range(num_layers) if i % 4 != 3])
    default = [LINEAR if index in numbers else FULL for index in range(num_layers)]
    given = config.get("layer_types", list[str], default)
    kinds = [FULL if kind == INDEXED else kind for kind in given]
    if len(kinds) != num_layers or set(kinds) - {LINEAR, FULL}:
        raise config.refusal("layer_types", f"it must list the kind of each of the {num_layers} layers: {LINEAR} "
                                            f"or {INDEXED}")
    if own.has("kda_layers") and kinds != default:
        raise own.refusal("kda_layers", "it contradicts layer_types")
    return kinds


def _read_index_kinds(config: ConfigReader) -> Sequence[str]:
    """Return, for each layer, whether it chooses blocks itself or reuses the choice of the layer before it. The entries
    of KDA layers have no meaning."""
    kinds, index_kinds = read_kinds(config, config.required("num_hidden_layers", int)), read_index_kinds(config)
    for index, kind in enumerate(kinds):
        if kind == FULL and index_kinds[index] == SHARED_INDEX and kinds[index - 1] == LINEAR:
            raise config.refusal("indexer_types", f"layer {index} would reuse the positions that the layer before it "
                                                  f"chose, so that layer must be of type {INDEXED}")
    return index_kinds
