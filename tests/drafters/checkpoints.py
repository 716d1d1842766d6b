"""Random drafters for the tiny targets, written as checkpoint folders in every form that is read."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from outrider.layers.base import DecoderLayer
from outrider.mixers.paged.backend import AttentionLayer
from outrider.models.gemma3 import Gemma3
from outrider.models.llama import LlamaLayer
from outrider.models.mtp import MTPDescription, register_mtp
from tests.engine.harness import CONFIGS, VOCAB, save_folder

HIDDEN, INTERMEDIATE, HEADS, KV_HEADS, DRAFT_VOCAB = 32, 64, 4, 2, 100
EPS, THETA = 1e-6, 5000.0
LAYER: dict[str, Any] = {
    "model_type": "llama", "hidden_size": HIDDEN, "intermediate_size": INTERMEDIATE, "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS, "num_hidden_layers": 1, "vocab_size": VOCAB, "max_position_embeddings": 256,
    "rms_norm_eps": EPS, "rope_theta": THETA, "hidden_act": "silu",
}
Tensors = dict[str, torch.Tensor]
Shapes = dict[str, tuple[int, ...]]


@dataclass(frozen=True)
class Drafter:
    """A checkpoint folder and what lies in it, for engine and reference alike."""

    method: str
    folder: Path
    config: dict[str, Any]
    tensors: Tensors  # float32, by the names in the file

    def speculative(self, k: int) -> dict[str, Any]:
        return {"method": self.method, "model": str(self.folder), "num_speculative_tokens": k, "auto": False}


# Every kind that the drafts are compared for; the two EAGLE-3 forms differ in all their switches. The layers of
# "eagle" have another geometry than the target's, so that they get pages of their own; the others share a group.
KINDS = ("eagle", "eagle_speculators", "eagle3", "eagle3_speculators", "mtp", "draft_model")


def make_drafter(kind: str, family: str, folder: Path, **changes: Any) -> Drafter:
    if kind == "draft_model":
        save_folder(folder, CONFIGS[family], seed=77)
        return Drafter(kind, folder, CONFIGS[family], {})
    method = kind.removesuffix("_speculators")
    head_dim = CONFIGS[family].get("head_dim", HIDDEN // HEADS)
    config, shapes = CHECKPOINTS[kind](2 * head_dim if kind == "eagle" else head_dim)
    tensors = random_tensors(shapes)
    if kind.startswith("eagle3"):
        ids = torch.randperm(VOCAB, generator=torch.Generator().manual_seed(9))[:DRAFT_VOCAB].sort().values
        tensors["d2t"] = ids - torch.arange(DRAFT_VOCAB)
        tensors["t2d"] = torch.isin(torch.arange(VOCAB), ids)
    return write(method, folder, config | changes, tensors)


def write(method: str, folder: Path, config: dict[str, Any], tensors: Tensors) -> Drafter:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
    return Drafter(method, folder, config, tensors)


def random_tensors(shapes: Shapes, seed: int = 5) -> Tensors:
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.empty(shape).normal_(1.0 if "norm" in name else 0.0, 0.25, generator=generator)
        for name, shape in shapes.items()
    }


def layer_shapes(prefix: str, head_dim: int, attention_in: int = HIDDEN) -> Shapes:
    q, kv = HEADS * head_dim, KV_HEADS * head_dim
    return {
        f"{prefix}.post_attention_layernorm.weight": (HIDDEN,),
        f"{prefix}.self_attn.q_proj.weight": (q, attention_in),
        f"{prefix}.self_attn.k_proj.weight": (kv, attention_in),
        f"{prefix}.self_attn.v_proj.weight": (kv, attention_in),
        f"{prefix}.self_attn.o_proj.weight": (HIDDEN, q),
        f"{prefix}.mlp.gate_proj.weight": (INTERMEDIATE, HIDDEN),
        f"{prefix}.mlp.up_proj.weight": (INTERMEDIATE, HIDDEN),
        f"{prefix}.mlp.down_proj.weight": (HIDDEN, INTERMEDIATE),
    }


def eagle(head_dim: int) -> tuple[dict[str, Any], Shapes]:
    """As published: the target's embedding repeated in the file, a bias, no norms around the layer."""
    config = LAYER | {"architectures": ["LlamaForCausalLM"], "bias": True, "head_dim": head_dim}
    shapes = {"embed_tokens.weight": (VOCAB, HIDDEN), "fc.weight": (HIDDEN, 2 * HIDDEN), "fc.bias": (HIDDEN,)}
    return config, shapes | layer_shapes("layers.0", head_dim)


def eagle_speculators(head_dim: int) -> tuple[dict[str, Any], Shapes]:
    layer = LAYER | {"head_dim": head_dim}
    config = {"speculators_model_type": "eagle", "transformer_layer_config": layer, "fusion_bias": False}
    return config, {"fusion_fc.weight": (HIDDEN, 2 * HIDDEN)} | layer_shapes("transformer", head_dim)


def eagle3(head_dim: int) -> tuple[dict[str, Any], Shapes]:
    config = LAYER | {
        "architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": DRAFT_VOCAB, "head_dim": head_dim,
        "eagle_config": {"use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": [0, 2, 1]},
    }
    return config, eagle3_shapes("midlayer", 3, head_dim)


def eagle3_speculators(head_dim: int) -> tuple[dict[str, Any], Shapes]:
    """Both norms before the projection, normed residual and feedback, q and k norms, its own embedding."""
    layer = {k: v for k, v in LAYER.items() if k != "rope_theta"} | {
        "model_type": "qwen3", "head_dim": head_dim, "rope_parameters": {"rope_type": "default", "rope_theta": THETA},
    }
    config = {
        "architectures": ["Eagle3Speculator"], "speculators_model_type": "eagle3", "transformer_layer_config": layer,
        "draft_vocab_size": DRAFT_VOCAB, "norm_before_fc": True, "fc_norm": True, "norm_output": True,
        "target_hidden_size": None, "eagle_aux_hidden_state_layer_ids": [1, 2],
        "speculators_config": {"algorithm": "eagle3", "proposal_methods": [{"speculative_tokens": 7}]},
    }
    shapes = eagle3_shapes("layers.0", 2, head_dim) | {
        "input_norm.weight": (2 * HIDDEN,), "fc_norm.0.weight": (HIDDEN,), "fc_norm.1.weight": (HIDDEN,),
        "layers.0.self_attn.q_norm.weight": (head_dim,), "layers.0.self_attn.k_norm.weight": (head_dim,),
        "embed_tokens.weight": (VOCAB, HIDDEN),
    }
    return config, shapes


def eagle3_shapes(prefix: str, num_aux: int, head_dim: int) -> Shapes:
    return layer_shapes(prefix, head_dim, 2 * HIDDEN) | {
        "fc.weight": (HIDDEN, num_aux * HIDDEN), "norm.weight": (HIDDEN,), "lm_head.weight": (DRAFT_VOCAB, HIDDEN),
        f"{prefix}.input_layernorm.weight": (HIDDEN,), f"{prefix}.hidden_norm.weight": (HIDDEN,),
    }


def mtp(head_dim: int) -> tuple[dict[str, Any], Shapes]:
    """In a file that holds something of the target too."""
    shapes = {
        "mtp.fc.weight": (HIDDEN, 2 * HIDDEN), "mtp.norm.weight": (HIDDEN,), "mtp.pre_fc_norm_hidden.weight": (HIDDEN,),
        "mtp.pre_fc_norm_embedding.weight": (HIDDEN,), "mtp.layers.0.input_layernorm.weight": (HIDDEN,),
        "model.norm.weight": (HIDDEN,),
    }
    return {"architectures": ["LlamaForCausalLM"]}, shapes | layer_shapes("mtp.layers.0", head_dim)


CHECKPOINTS = {f.__name__: f for f in (eagle, eagle_speculators, eagle3, eagle3_speculators, mtp)}


def describe_gemma(target: Gemma3) -> MTPDescription:
    """A module that no published Gemma has, with a layer of another family and offset norms: what a family plugs in."""

    def layers(index: int) -> tuple[list[DecoderLayer], list[AttentionLayer]]:
        sizes = target.sizes
        attention = AttentionLayer(index, HEADS, KV_HEADS, sizes.head_dim, scale=sizes.head_dim**-0.5)
        layer = LlamaLayer(attention, sizes, qkv_bias=False, out_bias=False, mlp_bias=False, has_head_norm=False,
                           dtype=target.dtype, device=target.device)
        return [layer], [attention]

    return MTPDescription(layers, EPS, norm_offset=True, hidden="before_norm", embedding_first=False,
                          zeroes_first_embedding=True, num_predicted=7)


register_mtp(Gemma3, describe_gemma)
