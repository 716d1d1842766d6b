"""Language models inside checkpoints that also see images: Gemma 3 4B, 12B and 27B, Mistral Small 3.1 and later,
Ministral 3 and Mistral 4.

Only the text part is served; tensors of the other parts are not read.
"""

from __future__ import annotations

from typing import Any

import torch

from outrider.models.base import Decoder, DecoderNames
from outrider.models.config import ConfigReader
from outrider.models.gemma3 import Gemma3
from outrider.models.ministral3 import TemperedMistral
from outrider.models.mistral4 import Mistral4
from outrider.models.sources.quantization import KEY

PREFIX = "language_model"
OTHER_PARTS = ("vision_tower.", "multi_modal_projector.", "vision_model.")


class LanguagePart(Decoder):
    """A mixin for language models whose config and tensors are a section of a larger model's. It must be the first base
    class."""

    names = DecoderNames.below(f"{PREFIX}.model")._replace(output=f"{PREFIX}.lm_head")
    default_tied = False

    def __init__(
        self, config: ConfigReader, *, dtype: torch.dtype, device: torch.device, max_len: int | None = None
    ) -> None:
        text = config.section("text_config")
        own = text.get("tie_word_embeddings", bool, self.default_tied)
        # The whole model's key wins.
        values: dict[str, Any] = {"tie_word_embeddings": config.get("tie_word_embeddings", bool, own)}
        if config.has(KEY):
            values[KEY] = config.get(KEY, dict, {})
        config.passes_over("multimodal_projector_bias", "projector_hidden_act", "spatial_merge_size")
        super().__init__(text.with_values(values), dtype=dtype, device=device, max_len=max_len)  # type: ignore[call-arg]

    def ignores(self, name: str) -> bool:
        return super().ignores(name) or name.startswith(OTHER_PARTS)


class Gemma3Conditional(LanguagePart, Gemma3):
    """Model class for Gemma3ForConditionalGeneration."""

    default_tied = True


class Mistral3Conditional(LanguagePart, TemperedMistral):
    """Model class for Mistral3ForConditionalGeneration."""


class Mistral4Conditional(LanguagePart, Mistral4):
    """Model class for Mistral3ForConditionalGeneration around Mistral 4."""
