"""Tiny random models saved by transformers, and a dense attention to run ours without pages.

Other tests import `make_folder`, `hf_model`, `FAMILIES`, `MOE_FAMILIES`, `DenseAttend` and `greedy` from here.
"""

from __future__ import annotations

import zlib
from pathlib import Path
from typing import Any

import torch

from outrider.attention.base import AttentionLayer
from outrider.models import Model, load_model

VOCAB = 256

_BASE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_GEMMA: dict[str, Any] = {
    "head_dim": 16,
    "query_pre_attn_scalar": 24,
    "sliding_window": 16,
    "layer_types": ["sliding_attention", "sliding_attention", "sliding_attention", "full_attention"],
}
_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
_YARN_ROPE = {"rope_type": "yarn", "rope_theta": 500.0, "factor": 8.0, "original_max_position_embeddings": 64}

# name -> (transformers class without its suffix, config values beyond the base)
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama_bias": ("Llama", {"attention_bias": True, "mlp_bias": True, "num_key_value_heads": 4}),
    "llama_tied": ("Llama", {"tie_word_embeddings": True, "num_key_value_heads": 1, "head_dim": 32}),
    "llama_llama3": ("Llama", {"rope_parameters": _LLAMA3_ROPE}),
    "llama_linear": ("Llama", {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1000.0}}),
    "llama_yarn": ("Llama", {"rope_parameters": _YARN_ROPE}),
    "llama_dynamic": ("Llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1000.0}}),
    "mistral": ("Mistral", {"sliding_window": 16}),
    "mistral_full": ("Mistral", {"sliding_window": None, "head_dim": 8}),
    "qwen2": ("Qwen2", {}),
    "qwen2_sliding": ("Qwen2", {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 2}),
    "qwen3": ("Qwen3", {"head_dim": 32}),
    "qwen3_bias": ("Qwen3", {"head_dim": 16, "attention_bias": True, "tie_word_embeddings": True}),
    "gemma3": ("Gemma3", _GEMMA),
    "gemma3_capped": ("Gemma3", _GEMMA | {"final_logit_softcapping": 5.0, "attention_bias": True}),
}
_QWEN3_MOE: dict[str, Any] = {
    "head_dim": 16,
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
}
# Apart from the others: transformers holds experts in other tensors than it saves, so names cannot be compared.
MOE_FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_moe": ("Qwen3Moe", _QWEN3_MOE | {"norm_topk_prob": True}),
    "qwen3_moe_mixed": (
        "Qwen3Moe",
        _QWEN3_MOE | {"mlp_only_layers": [1], "attention_bias": True, "use_sliding_window": True, "sliding_window": 16},
    ),
    "qwen3_moe_every_second": ("Qwen3Moe", _QWEN3_MOE | {"decoder_sparse_step": 2, "tie_word_embeddings": True}),
}
_ALL = FAMILIES | MOE_FAMILIES


def hf_config(family: str, **changes: Any) -> Any:
    import transformers

    name, values = _ALL[family]
    config_class = getattr(transformers, f"{name}TextConfig" if name == "Gemma3" else f"{name}Config")
    return config_class(**_BASE | values | changes)


def make_folder(family: str, path: Path, **changes: Any) -> Path:
    """Save a random model of the family; equal calls save equal weights. Spread enough that greedy text varies."""
    import transformers

    torch.manual_seed(zlib.crc32(family.encode()))
    model = getattr(transformers, f"{_ALL[family][0]}ForCausalLM")(hf_config(family, **changes))
    for name, parameter in model.named_parameters():
        mean = _mean(name, is_gemma=_ALL[family][0] == "Gemma3")
        torch.nn.init.normal_(parameter, mean=mean, std=0.05 if name.endswith("bias") else 0.2)
    model.save_pretrained(path)
    return Path(path)


def _mean(name: str, is_gemma: bool) -> float:
    """Of a parameter's values. In Gemma layers must outweigh the scaled embedding, or every token predicts itself."""
    if "norm" not in name:
        return 0.0
    if not is_gemma or ".self_attn." in name:
        return 1.0
    return 5.0 if ".post_" in name else 0.0


def hf_model(folder: Path, dtype: torch.dtype = torch.float32, **options: Any) -> Any:
    import transformers

    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, **options).eval()


class DenseAttend:
    """Causal attention of one request over everything it was given so far, without pages. Use one per sequence."""

    def __init__(self, model: Model) -> None:
        self.layers: dict[int, AttentionLayer] = {layer.index: layer for layer in model.attention_layers}
        self.owner = {c.layer: c.layer if c.reads is None else c.reads for c in model.cache_layers()}
        self.keys: dict[int, torch.Tensor] = {}
        self.values: dict[int, torch.Tensor] = {}

    def fused(self, layer: int, qkv: torch.Tensor, rope: Any, norms: Any) -> None:
        return None

    def __call__(self, layer: int, q: torch.Tensor, k: torch.Tensor | None, v: torch.Tensor | None) -> torch.Tensor:
        spec, owner = self.layers[layer], self.owner[layer]
        if k is not None and v is not None:
            assert spec.writes
            self.keys[layer] = torch.cat((self.keys[layer], k)) if layer in self.keys else k
            self.values[layer] = torch.cat((self.values[layer], v)) if layer in self.values else v
        repeats = spec.num_heads // spec.num_kv_heads
        keys = self.keys[owner].repeat_interleave(repeats, dim=1)
        values = self.values[owner].repeat_interleave(repeats, dim=1)
        scores = torch.einsum("qhd,khd->hqk", q, keys) * spec.scale
        if spec.softcap is not None:
            scores = torch.tanh(scores / spec.softcap) * spec.softcap
        positions = torch.arange(keys.shape[0], device=q.device)
        behind = positions[-q.shape[0] :, None] - positions  # how far a key lies behind a query
        visible = behind >= 0 if spec.window is None else (behind >= 0) & (behind < spec.window)
        weights = scores.masked_fill(~visible, float("-inf")).softmax(dim=-1)
        return torch.einsum("hqk,khd->qhd", weights, values).flatten(1)


def load(folder: Path, dtype: torch.dtype = torch.float32, **options: Any) -> Model:
    return load_model(folder, dtype=dtype, device="cpu", **options)


def tokens_of(seed: int, count: int) -> torch.Tensor:
    return torch.randint(3, VOCAB, (count,), generator=torch.Generator().manual_seed(seed))


def all_logits(model: Model, tokens: torch.Tensor, chunks: tuple[int, ...] = ()) -> torch.Tensor:
    """Logits of every position, the tokens given in chunks of these sizes (the rest as one)."""
    attend, start, rows = DenseAttend(model), 0, []
    for size in (*chunks, len(tokens) - sum(chunks)):
        positions = torch.arange(start, start + size)
        rows.append(model.logits(model.forward(tokens[start : start + size], positions, attend).final))
        start += size
    return torch.cat(rows)


def greedy(model: Model, prompt: list[int], count: int) -> list[int]:
    """The most likely continuation, token by token, ties to the lowest id."""
    attend, known, computed = DenseAttend(model), list(prompt), 0
    for _ in range(count):
        hidden = model.forward(torch.tensor(known[computed:]), torch.arange(computed, len(known)), attend).final
        computed = len(known)
        known.append(int(model.logits(hidden[-1:]).argmax()))
    return known[len(prompt) :]
