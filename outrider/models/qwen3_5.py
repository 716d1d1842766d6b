"""Qwen3.5, dense and with experts: Qwen3-Next's layers, with separate projections in the checkpoints.

This file is the language model; checkpoints may have a vision tower too. The rope rotates by three components of a
position. For text tokens they are equal, so the rope is an ordinary one."""

from __future__ import annotations

import torch

from outrider.layers import RopeParams, Rotary
from outrider.models.base import DecoderNames
from outrider.models.component_rope import make_component_rotary, read_sections
from outrider.models.config import ConfigReader
from outrider.models.hybrid import pass_over_components
from outrider.models.placeholders import read_placeholders
from outrider.models.qwen3_next import Qwen3Next


class Qwen3_5(Qwen3Next):
    """Model class for Qwen3_5ForCausalLM and Qwen3_5MoeForCausalLM, and for the language models of the
    ConditionalGeneration architectures."""

    is_interleaved = False
    may_see = True

    def __init__(
        self, config: ConfigReader, *, dtype: torch.dtype, device: torch.device, max_len: int | None = None
    ) -> None:
        if config.has("text_config"):
            self.names = DecoderNames.below("model.language_model")
            self.sees = self.has_component_ropes = config.raw("vision_config") is not None
            self.placeholders = read_placeholders(config)
            text = config.section("text_config")
            tied = config.get("tie_word_embeddings", bool, text.get("tie_word_embeddings", bool, False))
            config = text.with_values({"tie_word_embeddings": tied})
        pass_over_components(config)
        self._sections = read_sections(config.section_or_empty("rope_parameters"), (11, 11, 10))
        # Chosen weights always add up to one, whatever an older key may say.
        super().__init__(config.with_values({"norm_topk_prob": True}), dtype=dtype, device=device, max_len=max_len)

    def make_rotary(self, rope: RopeParams, max_len: int | None) -> Rotary:
        if not self.has_component_ropes:
            return super().make_rotary(rope, max_len)
        return make_component_rotary(self, rope, self._sections, max_len)

    def ignores(self, name: str) -> bool:
        return super().ignores(name) or name.startswith("model.visual.")
