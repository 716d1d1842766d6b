"""Tiny Gemma 4 checkpoints saved by transformers: targets of every shape and assistants for them.

Other tests import `TARGETS`, `save_target`, `save_assistant` and `candidates` from here.
"""

from __future__ import annotations

import zlib
from pathlib import Path
from typing import Any

import torch

from tests.models.oracle import hf_model

VOCAB, WINDOW = 256, 16
SLIDING, FULL = "sliding_attention", "full_attention"
_BASE: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    "max_position_embeddings": 512, "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "global_head_dim": 32, "num_global_key_value_heads": 1,
    "attention_k_eq_v": True, "hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0,
    "sliding_window": WINDOW, "layer_types": [SLIDING, SLIDING, SLIDING, FULL],
}
TARGETS: dict[str, dict[str, Any]] = {
    "dense": _BASE | {"final_logit_softcapping": 30.0},
    "shared": _BASE | {
        "num_hidden_layers": 6, "num_key_value_heads": 1, "num_global_key_value_heads": None, "attention_k_eq_v": False,
        "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": VOCAB, "num_kv_shared_layers": 2,
        "use_double_wide_mlp": True, "layer_types": [SLIDING, SLIDING, SLIDING, FULL, SLIDING, FULL],
    },
    "moe": _BASE | {
        "intermediate_size": 64, "enable_moe_block": True, "num_experts": 4, "top_k_experts": 2,
        "moe_intermediate_size": 32,
    },
}
NOT_UNIFIED = ("hidden_size_per_layer_input", "vocab_size_per_layer_input")  # keys that unified configs lack


def spread(model: Any, seed: str) -> None:
    """Weights drawn so that greedy text varies: layers must outweigh the scaled embedding. The same on every call."""
    generator = torch.Generator().manual_seed(zlib.crc32(seed.encode()))
    for name, value in sorted(model.state_dict().items()):
        if not value.is_floating_point():
            continue
        value.normal_(mean_of(name), 0.2, generator=generator)


def mean_of(name: str) -> float:
    if "norm" in name or name.endswith(("scale", "scalar")):
        return 6.0 if "layernorm" in name and "post_" in name else 1.0
    return 0.0


def text_config(values: dict[str, Any], unified: bool) -> Any:
    import transformers

    if unified:
        return transformers.Gemma4UnifiedTextConfig(**{k: v for k, v in values.items() if k not in NOT_UNIFIED})
    return transformers.Gemma4TextConfig(**values)


def save_target(name: str, path: Path, *, unified: bool = False) -> Path:
    import transformers

    model_class = transformers.Gemma4UnifiedForCausalLM if unified else transformers.Gemma4ForCausalLM
    model = model_class(text_config(TARGETS[name], unified))
    spread(model, name)
    model.save_pretrained(path)
    return path


def save_assistant(name: str, path: Path, *, centroids: bool = False, unified: bool = False) -> Path:
    """An assistant for the target of that name: three layers, two of them sliding, narrower than the target."""
    import transformers

    target = TARGETS[name]
    text = {key: target[key] for key in ("num_key_value_heads", "num_global_key_value_heads", "attention_k_eq_v")}
    text = _BASE | text | {"hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 3,
                           "layer_types": [SLIDING, FULL, FULL], "num_attention_heads": 2, "num_kv_shared_layers": 3}
    kind = "Gemma4UnifiedAssistant" if unified else "Gemma4Assistant"
    config = getattr(transformers, f"{kind}Config")(
        text_config=text_config(text, unified), backbone_hidden_size=target["hidden_size"],
        use_ordered_embeddings=centroids, num_centroids=16, centroid_intermediate_top_k=3,
    )
    model = getattr(transformers, f"{kind}ForCausalLM")(config)
    spread(model, f"assistant {name}")
    if centroids:
        order = torch.randperm(VOCAB, generator=torch.Generator().manual_seed(3))
        model.masked_embedding.token_ordering.copy_(order)
    model.save_pretrained(path)
    return path


class Candidates:
    """transformers' own candidate generator, asked as its generation loop asks it after a step of one token.

    Then the target's cache holds what ours does: every computed token in full layers, and in sliding ones the window of
    the last one. In other steps transformers' sliding layers show one key more, and after a rejection also keys of
    rejected tokens, so that its drafts depend on how it came there."""

    def __init__(self, target: Path, assistant: Path, num_drafts: int) -> None:
        from transformers.generation.candidate_generator import SinglePositionMultiTokenCandidateGenerator as Generator

        self.target, self.assistant = hf_model(target), hf_model(assistant)
        self.assistant.generation_config.num_assistant_tokens = num_drafts
        config = self.target.generation_config
        config.max_length, config.eos_token_id = 10_000, None
        self.assistant.generation_config.eos_token_id = None
        # By name: releases differ in the arguments that they take, and newer ones pass over those they do not know.
        self.generator = Generator(input_ids=torch.zeros(1, 1, dtype=torch.int64), assistant_model=self.assistant,
                                   target_model_input_embeddings=self.target.get_input_embeddings(),
                                   generation_config=config, model_kwargs={})

    @torch.no_grad()
    def after(self, known: tuple[int, ...]) -> list[int]:
        """Drafts that follow `known`, of which all but the last are computed."""
        import transformers

        ids, cache = torch.tensor([known]), transformers.DynamicCache(config=self.target.config)
        if len(known) > 2:
            self.target(ids[:, :-2], past_key_values=cache)
        outputs = self.target(ids[:, -2:-1], past_key_values=cache, output_hidden_states=True,
                              return_shared_kv_states=True)
        found, _ = self.generator.get_candidates(ids, {}, outputs, is_first_iteration=False, n_last_matches=0)
        return found[0, len(known) :].tolist()
