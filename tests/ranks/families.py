"""Tiny models of every family with random weights, whole or one rank's part, and what they make of a text.

A tensor's numbers depend on its name alone, so every rank draws the same checkpoint and keeps its part.
"""

from __future__ import annotations

import zlib
from typing import Any

import torch

from outrider.formats import RankGroup
from outrider.layers import LayeredModule, StepContext
from outrider.mixers import LatentLayer
from outrider.models.base import Hidden, Model
from outrider.models.registry import build_model
from tests.models import gemma4, oracle
from tests.models.paged import PagedModel, Piece

# Sizes that four ranks can share, where the families' own cannot.
CHANGES: dict[str, dict[str, Any]] = {
    "qwen3_next": {"linear_num_key_heads": 4, "linear_num_value_heads": 8},
    "qwen3_5": {"linear_num_key_heads": 4},
    "qwen3_5_moe": {"linear_num_key_heads": 4, "linear_num_value_heads": 8},
    "qwen4_exp": {"linear_num_key_heads": 4, "linear_num_value_heads": 8},
    "qwen4_exp_sigmoid": {"linear_num_key_heads": 4, "linear_num_value_heads": 8},
    "olmo_hybrid_rope": {"linear_num_key_heads": 4, "num_key_value_heads": 4},
    "glm4_moe": {"num_nextn_predict_layers": 1},
    "glm5_next_free": {"linear_num_heads": 4},
    "kimi_linear": {"mlp_layer_types": ["dense", *["sparse"] * 4]},
    "kimi_linear_groups": {"linear_num_heads": 4, "first_k_dense_replace": 1},
    "bailing_hybrid": {"linear_head_dim": 16},
    "bailing_hybrid_free": {"linear_head_dim": 16},
}


def config_of(family: str) -> dict[str, Any]:
    if family.startswith("gemma4_"):
        return gemma4.TARGETS[family.removeprefix("gemma4_")] | {"architectures": ["Gemma4ForCausalLM"]}
    name, values = oracle.ALL[family]
    kind = "ForConditionalGeneration" if family in oracle.CONDITIONAL else "ForCausalLM"
    config = oracle.BASE | values | CHANGES.get(family, {}) | {"architectures": [f"{name}{kind}"]}
    if name in ("KimiLinear", "BailingHybrid"):  # names that transformers translates when it writes a config
        other = {"num_local_experts": "num_experts", "num_experts_per_tok": "num_experts_per_token"}
        config = {other.get(key, key): value for key, value in config.items() if value is not None}
    if name == "NemotronH":
        del config["num_hidden_layers"]  # the pattern says it
    return config


def make_model(family: str, group: RankGroup | None, dtype: torch.dtype = torch.float64, **changes: Any) -> Model:
    config = config_of(family) | changes
    model = build_model(config, dtype=dtype, device="cpu")
    if group is not None:
        model.shard(group)
    fill(model, config["architectures"][0].removesuffix("ForCausalLM"))
    return model


def fill(model: LayeredModule, architecture: str) -> None:
    for name, slot in model.weights().items():
        generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        spread = 0.05 if name.endswith("bias") else 0.2
        mean = gemma4.mean_of(name) if architecture == "Gemma4" else oracle.mean_of(name, architecture)
        slot.store(torch.randn(slot.shape, generator=generator, dtype=torch.float64) * spread + mean)
    model.finalize()


class Text:
    """One request of a model, which is given its tokens in pieces."""

    def __init__(self, model: Model) -> None:
        self.model, self.length = model, 0
        is_latent = isinstance(model.attention_layers[0], LatentLayer) and not model.recurrent_layers
        self._paged = PagedModel(model) if is_latent else None
        self._dense = None if is_latent else oracle.DenseAttend(model)

    def add(self, tokens: list[int], aux_layers: tuple[int, ...] = ()) -> Hidden:
        positions = torch.arange(self.length, self.length + len(tokens))
        self.length += len(tokens)
        if self._paged is None:
            assert self._dense is not None
            context = StepContext(self._dense, positions, history=self._dense.history(torch.tensor(tokens)))
            return self.model.forward(torch.tensor(tokens), context, aux_layers)
        bound = self._paged.cached.bind(self._paged.view([Piece(0, tokens)]))
        self._paged.lengths[0] += len(tokens)
        return self.model.forward(torch.tensor(tokens), StepContext(bound, positions), aux_layers)

    def logits(self, hidden: Hidden) -> torch.Tensor:
        return self.model.logits(hidden.final, oracle.LOGIT_ROWS)


def states_of(model: Model, prompt: list[int], num_generated: int) -> dict[str, torch.Tensor]:
    """Everything that samplers and drafters read of a prompt, and the greedy text behind it."""
    text = Text(model)
    hidden = text.add(prompt, aux_layers=(0, 1, model.num_layers))
    states = {"final": hidden.final, "before_norm": hidden.before_norm, "logits": text.logits(hidden)}
    states |= {f"auxiliary {number}": state for number, state in enumerate(hidden.aux_states)}
    logits, tokens = states["logits"], list[int]()
    for _ in range(num_generated):
        tokens.append(int(logits[-1].argmax()))
        logits = text.logits(text.add(tokens[-1:]))
    return states | {"tokens": torch.tensor(tokens)}


def weight_bytes(model: LayeredModule) -> dict[str, int]:
    return {name: slot.nbytes for name, slot in model.weights().items()}


def run_family(group: RankGroup, family: str, prompt: list[int], num_generated: int) -> tuple[Any, ...]:
    """The task of one rank."""
    model = make_model(family, group)
    caches = [claim.spec for claim in model.cache_layers()]
    return states_of(model, prompt, num_generated), weight_bytes(model), caches
