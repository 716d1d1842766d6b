"""DeepSeek-V3, DeepSeek-V3.2 and GLM-MoE-DSA: latent attention; a dense MLP in the first layers, then routed and shared
experts.

V3 attends to everything. In V3.2 an indexer in every layer chooses the positions that the layer attends to. In
GLM-MoE-DSA some layers reuse the choice of the layer before them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch

from outrider.config import INDEX_KEY_DTYPES
from outrider.layers import (
    DecoderLayer,
    Experts,
    FeedForward,
    LatentAttention,
    LatentShape,
    MoE,
    PreNormLayer,
    RopeParams,
    Router,
    yarn_mscale,
)
from outrider.mixers import AttendsTo, EveryPosition, IndexedPositions, LatentLayer, SharedPositions
from outrider.models.base import Decoder
from outrider.models.config import FULL, ConfigReader, Sizes, read_rope, refuse_unsupported
from outrider.models.nemotron_h import read_rule

PREDICTED = "num_nextn_predict_layers"
DENSE, SPARSE = "dense", "sparse"
FULL_INDEX, SHARED_INDEX = "full", "shared"
# Keys that say nothing about a model without experts.
EXPERT_KEYS = ("n_routed_experts", "num_experts_per_tok", "moe_intermediate_size", "n_shared_experts", "n_group",
               "topk_group", "norm_topk_prob", "routed_scaling_factor")


class DeepseekV3(Decoder):
    """Model class for DeepseekV3ForCausalLM, and the base class of models with indexers."""

    index_rotates_pairs = False
    layer_types: tuple[str, ...] = (FULL,)  # names of the type that every layer has, in configs that name the types
    # Keys that may have one value only.
    fixed: tuple[tuple[str, Any], ...] = (("scoring_func", "sigmoid"), ("topk_method", "noaux_tc"),
                                          ("moe_layer_freq", 1), ("rope_interleave", True), ("mlp_bias", False))
    # For configs without the keys; those of transformers' config classes.
    defaults: ClassVar[Mapping[str, Any]] = {"n_group": 8, "topk_group": 4, "n_shared_experts": 1,
                                             "first_k_dense_replace": 3, "q_lora_rank": 1536}
    default_eps = 1e-6  # of norms, for configs without one
    default_routed_scale = 2.5  # of the sum of a token's experts, for configs without one
    expert_activation: str | None = None  # of routed experts; None: that of the other MLPs

    def __init__(
        self, config: ConfigReader, *, dtype: torch.dtype, device: torch.device, max_len: int | None = None
    ) -> None:
        refuse_unsupported(config)
        config = config.with_defaults(self.defaults)
        for key, only in self.fixed:
            config.must_equal(key, only, default=only)
        if set(config.get("layer_types", list[str], [])) - {*self.layer_types}:
            raise config.refusal("layer_types", f"all layers must be {' or '.join(self.layer_types)}")
        sizes = Sizes.read(config, eps=self.default_eps)
        super().__init__(config, sizes, dtype=dtype, device=device)
        rope = read_rope(config, config.required("qk_rope_head_dim", int))
        self.rotaries = [self.make_rotary(rope, max_len)]
        self.shape = self._read_shape()
        self._scale = (self.shape.nope_dim + rope.rotary_dim) ** -0.5 * _sharpening(rope)
        self.is_sparse = read_sparse_layers(config)
        self.attention_layers = [self.latent_layer(index, self.attends_to(index)) for index in range(sizes.num_layers)]
        self.layers = [self.layer(attention, is_sparse)
                       for attention, is_sparse in zip(self.attention_layers, self.is_sparse, strict=True)]

    def attends_to(self, index: int) -> AttendsTo:
        return EveryPosition()

    @property
    def num_shared(self) -> int:
        """Return the number of shared experts, which process every token."""
        return self.config.get("n_shared_experts", int, 0)

    @property
    def num_predicted(self) -> int:
        """Return the number of multi-token-prediction modules in the checkpoint."""
        return self.config.get(PREDICTED, int, 1)

    def ignores(self, name: str) -> bool:
        """Ignore the layers after the last one, which are the multi-token-prediction modules, and the empty matrices
        that transformers saves for models without shared experts."""
        modules = (f"{self.names.layers}.{self.num_layers + i}." for i in range(max(1, self.num_predicted)))
        is_empty = not self.num_shared and ".mlp.shared_experts." in name
        return super().ignores(name) or is_empty or name.startswith(tuple(modules))

    def latent_layer(self, index: int, attends_to: AttendsTo) -> LatentLayer:
        return LatentLayer(index, self.sizes.num_heads, self.config.required("kv_lora_rank", int),
                           self.config.required("qk_rope_head_dim", int), self._scale, attends_to)

    def layer(self, attention: LatentLayer, is_sparse: bool) -> DecoderLayer:
        mixer = LatentAttention(attention, self.shape, dtype=self.dtype, device=self.device)
        return PreNormLayer(self.make_norm(), mixer, self.make_norm(), self.feed_forward(attention.index, is_sparse))

    def feed_forward(self, index: int, is_sparse: bool) -> FeedForward:
        return self._experts(index) if is_sparse else self.make_mlp(self.sizes.intermediate_size)

    def _read_shape(self) -> LatentShape:
        config = self.config
        nope_dim = config.required("qk_nope_head_dim", int)
        whole_dim = nope_dim + config.required("qk_rope_head_dim", int)
        config.must_equal("qk_head_dim", whole_dim, default=whole_dim)
        return LatentShape(
            hidden_size=self.sizes.hidden_size,
            q_rank=config.optional("q_lora_rank", int, least=1),
            nope_dim=nope_dim,
            value_dim=config.required("v_head_dim", int),
            has_bias=config.get("attention_bias", bool, False),
            index_rotates_pairs=config.get("indexer_rope_interleave", bool, self.index_rotates_pairs),
        )

    def router(self, index: int) -> Router:
        rule = read_rule(self.config, self.default_routed_scale)
        return Router(index, self.hidden_size, rule, has_bias=True, dtype=self.dtype, device=self.device)

    def _experts(self, index: int) -> MoE:
        hidden_size, router = self.sizes.hidden_size, self.router(index)
        width = self.config.required("moe_intermediate_size", int)
        return MoE(
            router,
            Experts(router.rule.num_experts, hidden_size, width, activation=self.expert_activation or self.activation,
                    dtype=self.dtype, device=self.device),
            shared=self.make_mlp(self.num_shared * width) if self.num_shared else None,
        )


class DeepseekV32(DeepseekV3):
    """Model class for DeepseekV32ForCausalLM."""

    layer_types = ("deepseek_sparse_attention", "indexed_attention")  # the second since transformers 5.22

    def __init__(
        self, config: ConfigReader, *, dtype: torch.dtype, device: torch.device, max_len: int | None = None
    ) -> None:
        config.required("q_lora_rank", int)  # the indexer's queries come from it
        self.index_kinds = read_index_kinds(config)
        super().__init__(config, dtype=dtype, device=device, max_len=max_len)

    def attends_to(self, index: int) -> AttendsTo:
        return SharedPositions() if self.index_kinds[index] == SHARED_INDEX else self.indexed_positions()

    def indexed_positions(self) -> IndexedPositions:
        config = self.config
        head_dim, rope_dim = config.required("index_head_dim", int), config.required("qk_rope_head_dim", int)
        if head_dim < rope_dim:
            raise config.refusal("index_head_dim", f"it must be at least qk_rope_head_dim ({rope_dim})")
        has_fp8_keys = config.must_equal("index_key_dtype", *INDEX_KEY_DTYPES, default="auto") == "fp8"
        return IndexedPositions(config.required("index_n_heads", int), head_dim, config.required("index_topk", int),
                                has_fp8_keys=has_fp8_keys)


class GlmMoeDsa(DeepseekV32):
    """Model class for GlmMoeDsaForCausalLM."""

    index_rotates_pairs = True
    defaults: ClassVar[Mapping[str, Any]] = {"n_group": 1, "topk_group": 1, "n_shared_experts": 1,
                                             "first_k_dense_replace": 3}
    default_eps = 1e-5


def read_sparse_layers(config: ConfigReader) -> list[bool]:
    """Return, for each layer, whether it has experts. The config names the kinds in `mlp_layer_types`; otherwise all
    layers from `first_k_dense_replace` on have experts."""
    num_layers = config.required("num_hidden_layers", int)
    num_dense = config.get("first_k_dense_replace", int, 0)
    kinds = config.get("mlp_layer_types", list, [DENSE if i < num_dense else SPARSE for i in range(num_layers)])
    if len(kinds) != num_layers or not all(kind in (DENSE, SPARSE) for kind in kinds):
        raise config.refusal("mlp_layer_types", f"it must list the kind of each of the {num_layers} layers: "
                                                f"{DENSE} or {SPARSE}")
    if SPARSE not in kinds:
        config.passes_over(*EXPERT_KEYS)
    return [kind == SPARSE for kind in kinds]


def read_index_kinds(config: ConfigReader) -> list[str]:
    """Return, for each layer, whether it chooses positions itself (full) or reuses the choice of the layer before it
    (shared). The config names the kinds, has a pattern of F and S, or makes every n-th layer full."""
    num_layers = config.required("num_hidden_layers", int)
    key = "indexer_types" if config.has("indexer_types") else "index_topk_pattern"
    config.passes_over("index_topk_pattern")  # the other key wins
    frequency, offset = max(1, config.get("index_topk_freq", int, 1)), config.get("index_skip_topk_offset", int, 2)
    scheduled = [SHARED_INDEX if max(i - offset + 1, 0) % frequency else FULL_INDEX for i in range(num_layers)]
    named = {"F": FULL_INDEX, "S": SHARED_INDEX}
    given = config.raw(key) or scheduled
    kinds = [named.get(str(kind), str(kind)) for kind in given] if isinstance(given, (list, str)) else []
    if len(kinds) != num_layers or set(kinds) - set(named.values()) or kinds[0] != FULL_INDEX:
        raise config.refusal(key, f"it must list the kind of each of the {num_layers} layers, full or shared, and the "
                                  "first must be full")
    return kinds


def _sharpening(rope: RopeParams) -> float:
    """Return the factor by which yarn multiplies the attention's scale."""
    return yarn_mscale(rope.factor, rope.mscale_all_dim) ** 2 if rope.mscale_all_dim else 1.0
