"""Qwen3.5, dense and with experts: Qwen3-Next's layers, with separate projections in the checkpoints.

Only text is served: of a checkpoint with a vision tower the language model is read. Text positions are the same in all
three components of its rope, which makes it an ordinary rope.
"""

from __future__ import annotations

import torch

from outrider.models.base import DecoderNames
from outrider.models.config import ConfigReader
from outrider.models.hybrid import pass_over_components
from outrider.models.qwen3_next import Qwen3Next


class Qwen3_5(Qwen3Next):
    """Model class for Qwen3_5ForCausalLM and Qwen3_5MoeForCausalLM, and for the language models of the
    ConditionalGeneration architectures."""

    is_interleaved = False

    def __init__(
        self, config: ConfigReader, *, dtype: torch.dtype, device: torch.device, max_len: int | None = None
    ) -> None:
        if config.has("text_config"):
            self.names = DecoderNames.below("model.language_model")
            text = config.section("text_config")
            tied = config.get("tie_word_embeddings", bool, text.get("tie_word_embeddings", bool, False))
            config = text.with_values({"tie_word_embeddings": tied})
        pass_over_components(config)
        # Chosen weights always add up to one, whatever an older key may say.
        super().__init__(config.with_values({"norm_topk_prob": True}), dtype=dtype, device=device, max_len=max_len)

    def ignores(self, name: str) -> bool:
        return super().ignores(name) or name.startswith("model.visual.")
