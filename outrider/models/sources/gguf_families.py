"""The table of GGUF architectures: the meaning of each one's metadata, and the place of its tensors in the model.

`gguf_configs.py` reads the metadata, `gguf_places.py` places the tensors."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from outrider.models.sources.gguf_configs import (
    deepseek_config,
    deepseek_indexed_config,
    gemma3_config,
    gemma4_config,
    lfm2_config,
    llama_config,
    nemotron_h_config,
    plain_config,
    qwen3_moe_config,
    qwen_hybrid_config,
    seed_oss_config,
    text_config,
    text_moe_config,
)
from outrider.models.sources.gguf_metadata import Metadata
from outrider.models.sources.gguf_places import (
    ATTENTION,
    BIASES,
    DEEPSEEK,
    DEEPSEEK_INDEXED,
    EXPERTS,
    GEMMA4,
    GEMMA_NORMS,
    HEAD_NORMS,
    LFM2,
    MLP,
    NEMOTRON_H,
    QWEN3_5,
    QWEN3_NEXT,
    REORDERED,
    SANDWICHED,
    SEED_NORMS,
    TWO_NORMS,
    Change,
    Places,
    TensorPlace,
    subtract_one,
)
from outrider.models.sources.gguf_rope import ROPE_FACTORS


class TopNames(NamedTuple):
    """The names of the tensors outside the layers."""

    embedding: str = "model.embed_tokens"
    norm: str = "model.norm"
    layers: str = "model.layers"


@dataclass(frozen=True)
class Family:
    architecture: str  # in a config's `architectures`
    model_type: str
    layer: Places
    config: Callable[[Metadata], dict[str, Any]] = plain_config  # keys beside those of all families
    norm: Change | None = None  # of the last norm
    names: TopNames = TopNames()
    top: Mapping[str, str] = field(default_factory=dict)  # further tensors around the layers

    def places(self, name: str, num_layers: int) -> tuple[TensorPlace, ...] | None:
        """Return the place of a file's tensor in the model. None if the family has no such name, and () for a tensor
        that is not read. Layers after the model's last one predict further tokens and are not read."""
        found = re.fullmatch(r"blk\.(\d+)\.(.+)", name)
        if found is not None:
            held = () if int(found[1]) >= num_layers else self.layer.get(found[2])
            return held and tuple(place._replace(name=f"{self.names.layers}.{found[1]}.{place.name}") for place in held)
        match name:
            case "output_norm.weight":
                return (TensorPlace(f"{self.names.norm}.weight", change=self.norm),)
            case "token_embd.weight":
                return (TensorPlace(f"{self.names.embedding}.weight"),)
            case "output.weight":
                return (TensorPlace("lm_head.weight"),)
            case _ if name == ROPE_FACTORS:
                return ()
        return (TensorPlace(self.top[name]),) if name in self.top else None


GEMMA4_TOP = {"per_layer_token_embd.weight": "model.embed_tokens_per_layer.weight",
              "per_layer_model_proj.weight": "model.per_layer_model_projection.weight",
              "per_layer_proj_norm.weight": "model.per_layer_projection_norm.weight"}
_BACKBONE = TopNames("backbone.embeddings", "backbone.norm_f", "backbone.layers")
_NEMOTRON_H = Family("NemotronHForCausalLM", "nemotron_h", NEMOTRON_H, nemotron_h_config, names=_BACKBONE)
_QWEN2 = ATTENTION | BIASES | MLP | TWO_NORMS
_QWEN3 = ATTENTION | HEAD_NORMS | MLP | TWO_NORMS
_QWEN3_MOE = ATTENTION | HEAD_NORMS | EXPERTS | TWO_NORMS
_EMBEDDING_NORM = TopNames(norm="model.embedding_norm")
_LFM2_TOP = {"token_embd_norm.weight": "model.embedding_norm.weight"}
FAMILIES = {
    "llama": Family("LlamaForCausalLM", "llama", ATTENTION | REORDERED | MLP | TWO_NORMS, llama_config),
    "qwen2": Family("Qwen2ForCausalLM", "qwen2", _QWEN2),
    "qwen2vl": Family("Qwen2ForCausalLM", "qwen2", _QWEN2, text_config),
    "qwen3": Family("Qwen3ForCausalLM", "qwen3", _QWEN3),
    "qwen3vl": Family("Qwen3ForCausalLM", "qwen3", _QWEN3, text_config),
    "qwen3moe": Family("Qwen3MoeForCausalLM", "qwen3_moe", _QWEN3_MOE, qwen3_moe_config),
    "qwen3vlmoe": Family("Qwen3MoeForCausalLM", "qwen3_moe", _QWEN3_MOE, text_moe_config),
    "seed_oss": Family("SeedOssForCausalLM", "seed_oss", ATTENTION | BIASES | MLP | SEED_NORMS, seed_oss_config),
    "olmo2": Family("Olmo2ForCausalLM", "olmo2", ATTENTION | HEAD_NORMS | MLP | SANDWICHED),
    "lfm2": Family("Lfm2ForCausalLM", "lfm2", LFM2, lfm2_config, names=_EMBEDDING_NORM, top=_LFM2_TOP),
    "lfm2moe": Family("Lfm2MoeForCausalLM", "lfm2_moe", LFM2, lfm2_config, names=_EMBEDDING_NORM, top=_LFM2_TOP),
    # Files of Qwen3-Next have the projections of their gated delta layers apart, as checkpoints of Qwen3.5 have them.
    "qwen3next": Family("Qwen3_5MoeForCausalLM", "qwen3_5_moe_text", QWEN3_NEXT, qwen_hybrid_config, subtract_one),
    "qwen35": Family("Qwen3_5ForCausalLM", "qwen3_5_text", QWEN3_5, qwen_hybrid_config, subtract_one),
    "qwen35moe": Family("Qwen3_5MoeForCausalLM", "qwen3_5_moe_text", QWEN3_5, qwen_hybrid_config, subtract_one),
    "gemma3": Family("Gemma3ForCausalLM", "gemma3_text", ATTENTION | MLP | GEMMA_NORMS, gemma3_config, subtract_one),
    "gemma4": Family("Gemma4ForCausalLM", "gemma4_text", GEMMA4, gemma4_config, top=GEMMA4_TOP),
    "nemotron_h": _NEMOTRON_H,
    "nemotron_h_moe": _NEMOTRON_H,
    "deepseek2": Family("DeepseekV3ForCausalLM", "deepseek_v3", DEEPSEEK, deepseek_config),
    "deepseek32": Family("DeepseekV32ForCausalLM", "deepseek_v32", DEEPSEEK_INDEXED, deepseek_indexed_config),
    "glm-dsa": Family("GlmMoeDsaForCausalLM", "glm_moe_dsa", DEEPSEEK_INDEXED, deepseek_indexed_config),
}
