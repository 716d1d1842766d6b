"""Kimi-Linear: KDA layers, some latent attention layers without positions, and experts beside a shared one.

Bailing-hybrid's class derives from this one."""

from __future__ import annotations

from typing import Any

import torch

from outrider.layers import (
    KDA,
    DecoderLayer,
    Experts,
    FeedForward,
    KDANames,
    KDAShape,
    LatentAttention,
    LatentShape,
    LayerNames,
    MoE,
    PreNormLayer,
    Rotary,
    Router,
    TokenMixer,
    Unrotated,
)
from outrider.mixers import EveryPosition, LatentLayer
from outrider.models.config import FULL, ConfigReader, Sizes, refuse_unsupported
from outrider.models.deepseek_v3 import read_sparse_layers
from outrider.models.hybrid import LINEAR, HybridDecoder
from outrider.models.nemotron_h import read_rule

LINEAR_SECTION = "linear_attn_config"  # in the makers' own files; transformers writes its keys beside the others
# Values of keys that a file may leave out.
DEFAULTS: dict[str, Any] = {"rms_norm_eps": 1e-5, "routed_scaling_factor": 2.446, "first_k_dense_replace": 1}
# Names of keys in the files of these families, by the names that others use.
OTHER_NAMES = {
    "max_position_embeddings": "model_max_length",
    "norm_topk_prob": "moe_renormalize",
    "n_group": "num_expert_group",
    "num_experts_per_tok": "num_experts_per_token",
    "n_shared_experts": "num_shared_experts",
}


class KimiLinear(HybridDecoder):
    """Model class for KimiLinearForCausalLM."""

    kda_names = KDANames()
    mixer_name = "self_attn"
    experts_name = "block_sparse_moe"  # in layers with experts; a dense MLP is `mlp`
    expert_names = ("w1", "w3", "w2")
    bias_name = "e_score_correction_bias"

    def __init__(
        self, config: ConfigReader, *, dtype: torch.dtype, device: torch.device, max_len: int | None = None
    ) -> None:
        refuse_unsupported(config)
        config = self.in_common_words(config)
        sizes = Sizes.read(config)
        super().__init__(config, sizes, dtype=dtype, device=device)
        self.shape = self.read_latent_shape()
        self.rotaries = [self.read_rotary(max_len)]
        self.kda_shape = self.read_kda_shape()
        kinds = self.read_kinds()
        if FULL not in kinds:
            config.passes_over("kv_lora_rank")  # a size of latents alone
        self.is_sparse = read_sparse_layers(config)
        self.attention_layers = [self.latent_layer(index) for index, kind in enumerate(kinds) if kind == FULL]
        mixers = [self._kda(index) if kind == LINEAR else self.attention(self.latent_layer(index))
                  for index, kind in enumerate(kinds)]
        self.recurrent_layers = {m.index: m.mixer for m in mixers if isinstance(m, KDA)}
        self.layers = [self.layer(index, mixer, is_sparse)
                       for index, (mixer, is_sparse) in enumerate(zip(mixers, self.is_sparse, strict=True))]

    def in_common_words(self, config: ConfigReader) -> ConfigReader:
        for key, only in (("moe_router_activation_func", "sigmoid"), ("moe_layer_freq", 1), ("mla_use_nope", True),
                          ("use_grouped_topk", True), ("tie_word_embeddings", False)):
            config.must_equal(key, only, default=only)
        # Nothing rotates, and the heads of both kinds of layers have sizes of their own.
        config.passes_over("rope_theta", "rope_scaling", "rope_parameters", "head_dim")
        missing = {key: value for key, value in DEFAULTS.items() if not config.has(key)}
        return with_common_names(config).with_values({"head_dim": None, **missing})

    def read_rotary(self, max_len: int | None) -> Rotary:
        """Return the rope of the latent layers' shared dimensions, which rotates nothing. Their number must be even."""
        dim = self.config.required("qk_rope_head_dim", int)
        if dim % 2:
            raise self.config.refusal("qk_rope_head_dim", "it must be even")
        return Unrotated(dim, dtype=self.dtype, device=self.device)

    def read_kda_shape(self) -> KDAShape:
        config = self.config
        if not config.has(LINEAR_SECTION):
            return KDAShape(config.required("linear_num_heads", int), config.required("linear_head_dim", int),
                            config.get("linear_conv_kernel_dim", int, 4, least=1))
        own = config.section(LINEAR_SECTION)
        return KDAShape(own.required("num_heads", int), own.required("head_dim", int),
                        own.get("short_conv_kernel_size", int, 4, least=1))

    def read_kinds(self) -> list[str]:
        """Read the kind of each layer: `layer_types`, or lists of layer numbers that count from 1."""
        config, num_layers = self.config, self.num_layers
        if config.has("layer_types") or not config.has(LINEAR_SECTION):
            kinds = config.required("layer_types", list[str])
        else:
            own = config.section(LINEAR_SECTION)
            numbers = {LINEAR: own.required("kda_layers", list[int]), FULL: own.required("full_attn_layers", list[int])}
            kind_of = {number: kind for kind, listed in numbers.items() for number in listed}
            kinds = [kind_of.get(number) for number in range(1, num_layers + 1)]
            if len(kind_of) != sum(map(len, numbers.values())) or set(kind_of) != set(range(1, num_layers + 1)):
                raise own.refusal("kda_layers", "together with full_attn_layers it must name each layer from 1 to "
                                                f"{num_layers} once")
        if len(kinds) != num_layers or set(kinds) - {LINEAR, FULL}:
            raise config.refusal("layer_types", f"it must list the kind of each of the {num_layers} layers: "
                                                f"{LINEAR} or {FULL}")
        return kinds

    def latent_layer(self, index: int) -> LatentLayer:
        config = self.config
        scale = config.required("qk_nope_head_dim", int) + config.required("qk_rope_head_dim", int)
        return LatentLayer(index, self.sizes.num_heads, config.required("kv_lora_rank", int),
                           config.required("qk_rope_head_dim", int), scale**-0.5, EveryPosition())

    def attention(self, layer: LatentLayer) -> LatentAttention:
        return LatentAttention(layer, self.shape, dtype=self.dtype, device=self.device)

    def layer(self, index: int, mixer: TokenMixer, is_sparse: bool) -> DecoderLayer:
        feed_forward: FeedForward = self.make_mlp(self.sizes.intermediate_size)
        if is_sparse:
            feed_forward = self.make_experts(index)
        names = LayerNames(mixer=self.mixer_name, mlp=self.experts_name if is_sparse else "mlp")
        return PreNormLayer(self.make_norm(), mixer, self.make_norm(), feed_forward, names)

    def slot_name(self, name: str) -> str:
        """Return the slot for a tensor's name. In files from transformers a dense MLP has the name that the publisher's
        files use only for experts. This model's modules have one name for both."""
        name = name.replace(".forget_gate.", ".")
        prefix, found, rest = name.replace(f".{self.experts_name}.", ".mlp.").partition(".mlp.")
        index = prefix.removeprefix(f"{self.names.layers}.")
        if not found or not index.isdecimal() or int(index) >= self.num_layers:
            return name
        return f"{prefix}.{self.experts_name if self.is_sparse[int(index)] else 'mlp'}.{rest}"

    def ignores(self, name: str) -> bool:
        """Ignore the empty matrices that transformers saves for models without shared experts."""
        return super().ignores(name) or not self.num_shared and ".shared_experts." in name

    @property
    def num_shared(self) -> int:
        """Return the number of shared experts, which process every token."""
        return self.config.get("n_shared_experts", int, 1)

    def read_latent_shape(self) -> LatentShape:
        config = self.config
        config.must_equal("num_key_value_heads", self.sizes.num_heads, default=self.sizes.num_heads)
        nope_dim = config.required("qk_nope_head_dim", int)
        whole_dim = nope_dim + config.required("qk_rope_head_dim", int)
        config.must_equal("qk_head_dim", whole_dim, default=whole_dim)
        return LatentShape(
            hidden_size=self.sizes.hidden_size,
            q_rank=config.optional("q_lora_rank", int, least=1),
            nope_dim=nope_dim,
            value_dim=config.required("v_head_dim", int),
            has_bias=config.get("attention_bias", bool, False),
            index_rotates_pairs=False,
        )

    def _kda(self, index: int) -> KDA:
        return KDA(index, self.sizes.hidden_size, self.kda_shape, self.sizes.eps, names=self.kda_names,
                   dtype=self.dtype, device=self.device)

    def make_experts(self, index: int) -> MoE:
        hidden_size, rule, dtype, device = self.sizes.hidden_size, read_rule(self.config), self.dtype, self.device
        width = self.config.required("moe_intermediate_size", int)
        return MoE(
            Router(index, hidden_size, rule, has_bias=True, bias_name=self.bias_name, dtype=dtype, device=device),
            Experts(rule.num_experts, hidden_size, width, activation=self.activation, names=self.expert_names,
                    dtype=dtype, device=device),
            shared=self.make_mlp(self.num_shared * width) if self.num_shared else None,
        )


def with_common_names(config: ConfigReader) -> ConfigReader:
    """Return a reader of the config that also finds keys under the names that other families use."""
    experts = "num_local_experts" if config.has("num_local_experts") else "num_experts"  # transformers' name wins
    return config.with_names(OTHER_NAMES | {"n_routed_experts": experts})
