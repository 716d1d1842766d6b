"""Bailing-hybrid (Ling and Ring 3): KDA layers, every sixth a latent attention layer with a rope and a gate for each
head, and experts in groups. A multi-token-prediction module follows the last layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from outrider.formats import OutputShard, RankGroup, Ranks
from outrider.kernels import ops
from outrider.layers import (
    DecoderLayer,
    KDANames,
    KDAShape,
    LatentAttention,
    LatentShape,
    Linear,
    Module,
    Rotary,
    StepContext,
    yarn_mscale,
)
from outrider.mixers import LatentLayer
from outrider.models.base import DecoderNames
from outrider.models.config import FULL, ConfigReader, read_rope
from outrider.models.deepseek_v3 import PREDICTED
from outrider.models.hybrid import LINEAR
from outrider.models.kimi_linear import KimiLinear, with_common_names

# Values of keys that a file may leave out.
DEFAULTS: dict[str, Any] = {"routed_scaling_factor": 2.5, "n_group": 8, "topk_group": 4, "first_k_dense_replace": 2}


class GatedLatentAttention(LatentAttention):
    """Latent attention with values scaled by a sigmoid for each head."""

    out_name = "dense"

    def __init__(self, layer: LatentLayer, shape: LatentShape, *, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(layer, shape, dtype=dtype, device=device)
        self.gate = Linear(shape.hidden_size, layer.num_heads, bias=False, dtype=dtype, device=device)

    def parts(self) -> Sequence[tuple[str, Module]]:
        return [*super().parts(), ("g_proj", self.gate)]

    def shard(self, group: RankGroup) -> None:
        super().shard(group)
        self.gate.declare_shard(OutputShard(Ranks.from_group(group)))

    def leave(self, values: torch.Tensor, x: torch.Tensor, context: StepContext) -> torch.Tensor:
        heads = values.unflatten(1, (self.layer.num_heads, -1))
        scaled = ops.sigmoid_scale(heads.flatten(0, 1), self.gate(x, context).flatten()[:, None])
        return super().leave(scaled.view(values.shape), x, context)


# Parts of tensors' names, by those in transformers' modules.
PUBLISHED_NAMES = {"model.embed_tokens.": "model.word_embeddings.", ".self_attn.o_proj.": ".attention.dense.",
                   ".self_attn.": ".attention."}


class BailingHybrid(KimiLinear):
    """Model class for BailingHybridForCausalLM."""

    names = DecoderNames(embedding="model.word_embeddings")
    kda_names = KDANames(decay=("f_proj",), gate=("g_proj",), out="dense", decay_axes=(0, 0))
    mixer_name = "attention"
    experts_name = "mlp"
    expert_names = ("gate_proj", "up_proj", "down_proj")
    bias_name = "expert_bias"

    def in_common_words(self, config: ConfigReader) -> ConfigReader:
        for key, only in (("q_lora_rank", None), ("tie_word_embeddings", False)):
            config.must_equal(key, only, default=only)
        config.passes_over("mtp_loss_scaling_factor")  # of training
        # The makers' files have the size of KDA heads as `head_dim`; transformers writes it under a name of its own.
        own: dict[str, Any] = {"head_dim": None, "partial_rotary_factor": None}
        if not config.has("linear_head_dim"):
            own["linear_head_dim"] = config.required("head_dim", int)
        config = with_common_names(config).with_values(own)
        return config.with_values({key: value for key, value in DEFAULTS.items() if not config.has(key)})

    def read_rotary(self, max_len: int | None) -> Rotary:
        dim = self.config.required("qk_rope_head_dim", int)
        # Files may give the share of a head that rotates, which the size of the rotating part says already.
        self.config.passes_over("partial_rotary_factor", "head_dim", "rotary_dim", "linear_conv_kernel_dim")
        self._rope = read_rope(self.config, dim)
        return self.make_rotary(self._rope, max_len)

    def read_kda_shape(self) -> KDAShape:
        config = self.config
        is_safe = config.get("kda_safe_gate", bool, True)
        bound = config.get("kda_lower_bound", float, -5.0, most=0.0)
        return KDAShape(config.get("linear_num_heads", int, self.sizes.num_heads, least=1),
                        config.required("linear_head_dim", int),
                        config.get("short_conv_kernel_size", int, 4, least=1), bound if is_safe else None)

    def read_kinds(self) -> list[str]:
        """Read the kind of each layer from `layer_types`. By default the last of every `layer_group_size` layers has
        attention, and the others are KDA layers."""
        config, num_layers = self.config, self.num_layers
        size = config.get("layer_group_size", int, 6, least=1)
        default = [LINEAR if (index + 1) % size else FULL for index in range(num_layers)]
        kinds = config.get("layer_types", list[str], default)
        if len(kinds) != num_layers or set(kinds) - {LINEAR, FULL}:
            raise config.refusal("layer_types", f"it must list the kind of each of the {num_layers} layers: "
                                                f"{LINEAR} or {FULL}")
        return kinds

    def latent_layer(self, index: int) -> LatentLayer:
        """Return the base class's latent layer, with the attention scale that yarn increases."""
        layer, rope = super().latent_layer(index), self._rope
        factor = yarn_mscale(rope.factor, rope.mscale_all_dim) ** 2 if rope.mscale_all_dim else 1.0
        return LatentLayer(layer.index, layer.num_heads, layer.latent_dim, layer.rope_dim, layer.scale * factor,
                           layer.attends_to)

    def attention(self, layer: LatentLayer) -> LatentAttention:
        return GatedLatentAttention(layer, self.shape, dtype=self.dtype, device=self.device)

    def predicting_layer(self, index: int) -> tuple[DecoderLayer, LatentLayer]:
        """Return the layer of a multi-token-prediction module, with latent attention and experts."""
        latent = self.latent_layer(index)
        return self.layer(index, self.attention(latent), is_sparse=True), latent

    def slot_name(self, name: str) -> str:
        for theirs, own in PUBLISHED_NAMES.items():
            name = name.replace(theirs, own)
        return super().slot_name(name)

    def ignores(self, name: str) -> bool:
        """Ignore the layers after the last one: they are the multi-token-prediction modules."""
        count = max(1, self.config.get(PREDICTED, int, 1))
        modules = tuple(f"{self.names.layers}.{self.num_layers + i}." for i in range(count))
        return super().ignores(name) or name.startswith(modules)
