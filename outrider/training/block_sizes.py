"""BlockSizes: the shape of a block drafter for a target, and the configs that describe it to serving engines."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from outrider.models.base import Model
from outrider.training.eagle3_sizes import HeadSizes, check_aux_layers
from outrider.training.settings import TrainingSettings

MOST_AUX_LAYERS = 5


@dataclass(frozen=True)
class BlockSizes:
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_positions: int
    eps: float
    rope_theta: float
    num_target_layers: int
    aux_layers: tuple[int, ...]
    num_drafts: int
    mask_token: int
    markov_rank: int  # 0: no Markov head, which makes it a DFlash drafter; otherwise a DSpark one

    @classmethod
    def for_target(cls, target: Model, settings: TrainingSettings, mask_token: int) -> BlockSizes:
        """The sizes of a block drafter: those of the target's layers if these are ordinary layers
        (`HeadSizes.for_layers`)."""
        aux_layers = block_aux_layers(target, settings)
        like = HeadSizes.for_layers(target, aux_layers, settings)
        return cls(like.hidden_size, like.intermediate_size, settings.layers, like.num_heads, like.num_kv_heads,
                   like.head_dim, like.vocab_size, like.max_positions, like.eps, like.rope_theta, target.num_layers,
                   aux_layers, settings.passes, mask_token, settings.markov_rank)

    @property
    def num_rows(self) -> int:
        """The number of token rows of a block. With a Markov head, the row of the last known token makes the first
        draft, as in the published DSpark files; otherwise only mask rows make drafts."""
        return self.num_drafts + self.first_row

    @property
    def first_row(self) -> int:
        return 0 if self.markov_rank else 1

    def layer_config(self) -> dict[str, Any]:
        return {
            "model_type": "qwen3", "hidden_size": self.hidden_size, "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.num_layers, "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads, "head_dim": self.head_dim, "vocab_size": self.vocab_size,
            "max_position_embeddings": self.max_positions, "rms_norm_eps": self.eps, "rope_theta": self.rope_theta,
            "hidden_act": "silu", "attention_bias": False, "tie_word_embeddings": False,
            "layer_types": ["full_attention"] * self.num_layers,
        }

    def markov_config(self) -> dict[str, Any]:
        if not self.markov_rank:
            return {}
        return {"markov_rank": self.markov_rank, "markov_head_type": "vanilla", "enable_confidence_head": False,
                "confidence_head_with_markov": False}

    def hf_config(self, draft_vocab_size: int) -> dict[str, Any]:
        """The config in the form of the original checkpoints. In it layer numbers begin at 0, so i names the stream
        after layer i, not after i layers."""
        ids = [layer - 1 for layer in self.aux_layers]
        config = {**self.layer_config(), "block_size": self.num_rows, "num_target_layers": self.num_target_layers,
                  "draft_vocab_size": draft_vocab_size, "dtype": "bfloat16"}
        if self.markov_rank:
            return config | {"architectures": ["Qwen3DSparkModel"], "target_layer_ids": ids,
                             "mask_token_id": self.mask_token, "sample_from_anchor": True, **self.markov_config()}
        nested = {"mask_token_id": self.mask_token, "target_layer_ids": ids}
        return config | {"architectures": ["DFlashDraftModel"], "dflash_config": nested}

    def speculators_config(self, draft_vocab_size: int, target_name: str) -> dict[str, Any]:
        """The config in the form of the speculators library."""
        kind = "dspark" if self.markov_rank else "dflash"
        return {
            "architectures": ["DSparkSpeculator" if self.markov_rank else "DFlashSpeculator"],
            "speculators_model_type": kind, "transformer_layer_config": self.layer_config(),
            "draft_vocab_size": draft_vocab_size, "block_size": self.num_rows, "mask_token_id": self.mask_token,
            "aux_hidden_state_layer_ids": list(self.aux_layers), "sample_from_anchor": bool(self.markov_rank),
            "dtype": "bfloat16", **self.markov_config(),
            "speculators_config": {
                "algorithm": kind, "default_proposal_method": "greedy",
                "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": self.num_drafts}],
                "verifier": {"name_or_path": target_name, "architectures": []},
            },
        }


def block_aux_layers(target: Model, settings: TrainingSettings) -> tuple[int, ...]:
    """The layers after which the drafter reads the target's residual stream: by default five, spread from the second
    layer to the third from the end; fewer if the target is small."""
    count = target.num_layers
    if settings.taps:
        return check_aux_layers(settings.taps, count)
    first, last = min(2, count), max(1, count - 2)
    spread = {round(first + (last - first) * index / (MOST_AUX_LAYERS - 1)) for index in range(MOST_AUX_LAYERS)}
    return tuple(sorted(spread))
