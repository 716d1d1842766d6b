"""Check, before ranks are started, whether they can share a config's attention heads. This file does not import torch.

The full check (`layers.check_ranks`) needs the model's layers, and so torch in every rank. This file checks rules that
hold for all families, so that an impossible number of ranks is refused before any rank starts."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from outrider.core.ranks import ShardSize, rank_refusal

# Families whose attention ranks share; one from outside may hold it whole. Those that are missing here are refused by
# the ranks, later.
FAMILIES = re.compile(
    r"(BailingHybrid|Bamba|Cohere|Deepseek|Ernie4|Exaone4|FalconH1|Gemma|Glm|GptOss|Granite|HYV4|HunYuan|Idefics3"
    r"|InternVL|KimiLinear|Lfm2|Llama|Llava|MiniMaxM2|Mistral|Mixtral|MuseGlimmer|NemotronH|Olmo|Phi3|Qwen|SeedOss"
    r"|SmolLM3|SmolVLM)\w*For\w+")
# Attention in patterns of layers.
ATTENTION = ("*", "attention", "full_attention", "sliding_attention", "chunked_attention", "indexed_attention",
             "deepseek_sparse_attention")
HEADS = "num_attention_heads"
TEXT = "text_config"  # the section of a language model in configs of several
# Sizes that some families shard. They only narrow down the numbers of ranks that are named: a config may have a key
# that its layers do not use.
OTHER_KEYS = ("intermediate_size", "moe_intermediate_size", "shared_expert_intermediate_size",
              "moe_shared_expert_intermediate_size", "mamba_num_heads", "mamba_n_heads", "linear_num_key_heads",
              "linear_num_heads", "shared_intermediate_size")
COPIED_KEYS = ("num_key_value_heads", "n_groups", "mamba_n_groups")  # several ranks may hold the same piece


def check_heads(config: Mapping[str, Any], num_ranks: int, source: str) -> None:
    """Refuse a number of ranks that cannot share the attention heads. source: the config's file."""
    architectures = config.get("architectures")
    if not isinstance(architectures, list) or not architectures or not FAMILIES.fullmatch(str(architectures[0])):
        return
    section = config.get(TEXT)
    values = section if isinstance(section, Mapping) and HEADS in section else config
    heads = _size(values, HEADS)
    if heads is None or heads.fits(num_ranks) or not _attends(values):
        return
    others = [_size(values, key, key in COPIED_KEYS) for key in (*OTHER_KEYS, *COPIED_KEYS)]
    sizes = [heads, *(size for size in others if size is not None)]
    raise ValueError(f"{source}: {rank_refusal(HEADS, heads, num_ranks, sizes)}")


def _size(values: Mapping[str, Any], key: str, may_copy: bool = False) -> ShardSize | None:
    """Return the size under a key; None if the config does not have it. A value of a wrong type is refused later, by
    the code that builds the model."""
    size = values.get(key)
    return ShardSize((key,), size, may_copy) if type(size) is int and size > 0 else None


def _attends(values: Mapping[str, Any]) -> bool:
    """Whether the model has attention layers; a hybrid's pattern may have none."""
    patterns = [values.get(key) for key in ("layers_block_type", "hybrid_override_pattern", "layer_types")]
    named = [pattern for pattern in patterns if isinstance(pattern, str | list) and pattern]
    has_layers = values.get("attn_layer_indices") != []
    return has_layers and all(any(kind in ATTENTION for kind in pattern) for pattern in named)
