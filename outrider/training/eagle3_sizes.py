"""HeadSizes: the shape of an EAGLE-3 head for a target, and the configs that describe it to serving engines."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

from outrider.models.base import Decoder, Model
from outrider.trainable.eagle3_network import LAYER, HeadForm
from outrider.trainable.named_layers import rotate
from outrider.training.settings import TrainingSettings

AUX_LAYERS_KEY = "eagle_aux_hidden_state_layer_ids"


@dataclass(frozen=True)
class HeadSizes:
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_positions: int
    eps: float
    rope_theta: float
    aux_layers: tuple[int, ...]
    has_usual_layers: bool
    is_classic: bool  # no norms of auxiliary states and of fed-back states

    @classmethod
    def for_target(cls, target: Model, settings: TrainingSettings) -> HeadSizes:
        return cls.for_layers(target, read_aux_layers(target, settings), settings)

    @classmethod
    def for_layers(cls, target: Model, aux_layers: tuple[int, ...], settings: TrainingSettings) -> HeadSizes:
        """The sizes of a draft head's layer: the sizes of the target's layers if these are ordinary layers, otherwise
        the usual proportions. Experts would be too narrow, and heads of latent attention too wide."""
        hidden = target.hidden_size
        sizes = target.sizes if isinstance(target, Decoder) else None
        own_heads = 0 if sizes is None or sizes.head_dim % 2 else sizes.num_heads * sizes.head_dim
        if sizes is not None and hidden // 2 <= own_heads <= 2 * hidden:
            num_heads, num_kv_heads, head_dim = sizes.num_heads, sizes.num_kv_heads, sizes.head_dim
        else:
            head_dim = next(dim for dim in (128, 64, 32, 16, 8, 4, 2) if hidden % dim == 0 and hidden // dim >= 8)
            num_heads = hidden // head_dim
            num_kv_heads = next(count for count in (num_heads // 4, num_heads) if count and num_heads % count == 0)
        own_width = 0 if sizes is None else sizes.intermediate_size
        width = settings.intermediate_size or (own_width if 2 * hidden <= own_width <= 8 * hidden else 3 * hidden)
        return cls(hidden, width, num_heads, num_kv_heads, head_dim, target.vocab_size, target.max_positions,
                   sizes.eps if sizes is not None and sizes.eps > 0 else 1e-6, _rope_theta(target), aux_layers,
                   has_usual_layers=aux_layers == usual_aux_layers(target), is_classic=settings.classic)

    @property
    def form(self) -> HeadForm:
        """The properties of the head that its forward pass depends on."""
        return HeadForm(self.head_dim, self.eps, partial(rotate, theta=self.rope_theta),
                        norms_aux=not self.is_classic, feeds_back_normed=not self.is_classic)

    def layer_config(self) -> dict[str, Any]:
        return {
            "model_type": "llama", "hidden_size": self.hidden_size, "intermediate_size": self.intermediate_size,
            "num_hidden_layers": 1, "num_attention_heads": self.num_heads, "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim, "vocab_size": self.vocab_size, "max_position_embeddings": self.max_positions,
            "rms_norm_eps": self.eps, "rope_theta": self.rope_theta, "hidden_act": "silu", "attention_bias": False,
            "mlp_bias": False, "tie_word_embeddings": False,
        }

    def norm_config(self) -> dict[str, Any]:
        return {} if self.is_classic else {"fc_norm": True, "norm_output": True}

    def hf_config(self, draft_vocab_size: int) -> dict[str, Any]:
        """The config in the form of the original EAGLE-3 checkpoints. Engines number layers differently in the key of
        the auxiliary layers, so the key is left out for the usual layers, which every engine assumes without it."""
        config = {"architectures": ["LlamaForCausalLMEagle3"], **self.layer_config(),
                  "draft_vocab_size": draft_vocab_size, "dtype": "bfloat16", **self.norm_config()}
        return config if self.has_usual_layers else config | {"eagle_config": {AUX_LAYERS_KEY: list(self.aux_layers)}}

    def speculators_config(self, draft_vocab_size: int, num_drafts: int, target_name: str) -> dict[str, Any]:
        """The config in the form of the speculators library."""
        config = {
            "architectures": ["Eagle3Speculator"], "speculators_model_type": "eagle3",
            "transformer_layer_config": self.layer_config(), "draft_vocab_size": draft_vocab_size,
            "norm_before_residual": False, "dtype": "bfloat16", **self.norm_config(),
            "speculators_config": {
                "algorithm": "eagle3", "default_proposal_method": "greedy",
                "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": num_drafts}],
                "verifier": {"name_or_path": target_name, "architectures": []},
            },
        }
        return config if self.has_usual_layers else config | {AUX_LAYERS_KEY: list(self.aux_layers)}


def weight_shapes(sizes: HeadSizes, draft_vocab_size: int) -> dict[str, tuple[int, ...]]:
    """The shape of every weight of the exported file, by name."""
    hidden, width = sizes.hidden_size, sizes.intermediate_size
    queries, others = sizes.num_heads * sizes.head_dim, sizes.num_kv_heads * sizes.head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (hidden, len(sizes.aux_layers) * hidden),
        f"{LAYER}.input_layernorm.weight": (hidden,),
        f"{LAYER}.hidden_norm.weight": (hidden,),
        f"{LAYER}.post_attention_layernorm.weight": (hidden,),
        f"{LAYER}.self_attn.q_proj.weight": (queries, 2 * hidden),
        f"{LAYER}.self_attn.k_proj.weight": (others, 2 * hidden),
        f"{LAYER}.self_attn.v_proj.weight": (others, 2 * hidden),
        f"{LAYER}.self_attn.o_proj.weight": (hidden, queries),
        f"{LAYER}.mlp.gate_proj.weight": (width, hidden),
        f"{LAYER}.mlp.up_proj.weight": (width, hidden),
        f"{LAYER}.mlp.down_proj.weight": (hidden, width),
        "norm.weight": (hidden,),
        "lm_head.weight": (draft_vocab_size, hidden),
    }
    if not sizes.is_classic:
        shapes |= {f"fc_norm.{index}.weight": (hidden,) for index in range(len(sizes.aux_layers))}
    return shapes


def usual_aux_layers(target: Model) -> tuple[int, ...]:
    count = target.num_layers
    return (2, count // 2, count - 3)


def read_aux_layers(target: Model, settings: TrainingSettings) -> tuple[int, ...]:
    """The layers after which the head reads the target's residual stream (auxiliary states). Raises ValueError if the
    target does not have them."""
    count, aux_layers = target.num_layers, usual_aux_layers(target)
    if settings.taps:
        return check_aux_layers(settings.taps, count)
    if all(0 <= each <= count for each in aux_layers):
        return aux_layers
    raise ValueError(f"the target has {count} layers and not the three residual streams that EAGLE-3 reads by default: "
                     f"name others with --taps, from 0 (the embedding) to {count}")


def check_aux_layers(aux_layers: tuple[int, ...], count: int) -> tuple[int, ...]:
    """Return the layers of the settings. Raises ValueError if a target of `count` layers does not have them."""
    if not all(0 <= each <= count for each in aux_layers):
        raise ValueError(f"taps={list(aux_layers)}: the target has {count} layers, so taps must be from 0 (the "
                         f"embedding) to {count}")
    return aux_layers


def _rope_theta(target: Model) -> float:
    """The base of the target's rope, if all layers have the same one."""
    values = target.config.values if isinstance(target, Decoder) else {}
    for section in (values, values.get("rope_parameters") or {}, values.get("rope_scaling") or {}):
        if isinstance(section.get("rope_theta"), int | float):
            return float(section["rope_theta"])
    return 10000.0
