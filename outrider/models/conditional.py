"""Language models inside checkpoints with vision: Gemma 3, Mistral Small 3.1 and later, Qwen2-VL to Qwen3-VL, LFM2-VL,
SmolVLM, Llava and InternVL.

Qwen3-VL is served with images (`features/images`), the others as text models only, whose other tensors are not read. In
a text all position components of an image rope are equal, which makes it an ordinary rope."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch

from outrider.kernels.moe import RouteRule
from outrider.layers import RopeParams, Rotary
from outrider.models.base import Decoder, DecoderNames
from outrider.models.component_rope import make_component_rotary, read_sections
from outrider.models.config import ConfigReader
from outrider.models.gemma3 import Gemma3
from outrider.models.lfm2 import Lfm2
from outrider.models.llama import Llama, Qwen2, Qwen3
from outrider.models.ministral3 import Ministral3, TemperedMistral
from outrider.models.mistral4 import Mistral4
from outrider.models.placeholders import read_placeholders
from outrider.models.qwen3_moe import Qwen3Moe
from outrider.models.sources.quantization import KEY

PREFIX = "language_model"
OTHER_PARTS = ("vision_tower.", "multi_modal_projector.", "vision_model.", "visual.", "connector.", "image_newline")
# Keys about images, beside the configs of other parts.
IMAGE_KEYS = (
    "multimodal_projector_bias", "projector_hidden_act", "projector_hidden_size", "projector_bias",
    "projector_use_layernorm", "spatial_merge_size", "vision_feature_select_strategy", "vision_aspect_ratio",
    "image_seq_length", "image_grid_pinpoints", "downsample_ratio", "downsample_factor", "scale_factor",
    "encoder_patch_size", "max_num_patches", "max_pixels_tolerance", "min_image_tokens", "max_image_tokens",
    "min_tiles", "max_tiles", "tile_size", "use_thumbnail", "use_image_special_tokens", "do_image_splitting",
    "use_image_newline_parameter", "_pad_token_id",
)
# Sizes of the language model that transformers' config classes have where a section leaves them out.
LLAMA = {"vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32,
         "num_attention_heads": 32, "max_position_embeddings": 2048}
MISTRAL = LLAMA | {"intermediate_size": 14336, "num_key_value_heads": 8, "max_position_embeddings": 131072,
                   "sliding_window": 4096}
MINISTRAL = MISTRAL | {"vocab_size": 131072, "num_hidden_layers": 34, "max_position_embeddings": 262144,
                       "sliding_window": None}
QWEN = LLAMA | {"vocab_size": 151936, "intermediate_size": 22016, "num_key_value_heads": 32,
                "max_position_embeddings": 32768}
GEMMA3 = {"vocab_size": 262208, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26,
          "num_attention_heads": 8, "num_key_value_heads": 4, "max_position_embeddings": 131072, "sliding_window": 4096}
COMPONENTS = ("mrope_section", "mrope_interleaved")  # of a position: time, height and width


class LanguagePart(Decoder):
    """A mixin for language models whose config and tensors are a section of a larger model's. It must be the first base
    class."""

    names = DecoderNames.below(f"{PREFIX}.model")._replace(output=f"{PREFIX}.lm_head")
    default_tied = False
    text_defaults: ClassVar[Mapping[str, Any]] = {}  # of keys that the section leaves out: transformers' defaults

    def __init__(
        self, config: ConfigReader, *, dtype: torch.dtype, device: torch.device, max_len: int | None = None
    ) -> None:
        text = config.text_section()
        own = text.get("tie_word_embeddings", bool, self.default_tied)
        # The whole model's key wins.
        values: dict[str, Any] = {"tie_word_embeddings": config.get("tie_word_embeddings", bool, own)}
        if config.has(KEY):
            values[KEY] = config.get(KEY, dict, {})
        self.read_whole(config)
        config.passes_over(*IMAGE_KEYS, "ignore_index", "vocab_size")  # the second is the text's, once more
        text.passes_over("pixel_shuffle_factor", "perceiver_config", "neftune_noise_alpha")
        text = _with_one_position(text.with_values(values)).with_defaults(self.text_defaults)
        super().__init__(text, dtype=dtype, device=device, max_len=max_len)  # type: ignore[call-arg]

    def read_whole(self, config: ConfigReader) -> None:
        """Read the values that the family needs from the whole model's config. Called before the language model is
        built."""

    def ignores(self, name: str) -> bool:
        return super().ignores(name) or name.removeprefix("model.").startswith(OTHER_PARTS)


class InnerPart(LanguagePart):
    """A language part whose tensors lie in the checkpoint beside those of other parts; the output layer lies above all
    parts."""

    names = DecoderNames.below(f"model.{PREFIX}")


def _with_one_position(config: ConfigReader) -> ConfigReader:
    """Return the config with ropes of one component. For a text they equal the ropes of several components."""
    for key in ("rope_scaling", "rope_parameters"):
        if config.raw(key):
            rope = config.section(key)
            rope.passes_over(*COMPONENTS)
            plain = {name: "default" if value == "mrope" else value for name, value in rope.values.items()
                     if name not in COMPONENTS}
            config = config.with_values({key: plain})
    return config


class Gemma3Conditional(LanguagePart, Gemma3):
    """Model class for Gemma3ForConditionalGeneration."""

    default_tied = True
    text_defaults = GEMMA3


class Mistral3Conditional(LanguagePart, TemperedMistral):
    """Model class for Mistral3ForConditionalGeneration."""

    text_defaults = MISTRAL


class Ministral3Conditional(LanguagePart, Ministral3):
    """Model class for Mistral3ForConditionalGeneration around Ministral 3."""

    text_defaults = MINISTRAL


class Mistral4Conditional(LanguagePart, Mistral4):
    """Model class for Mistral3ForConditionalGeneration around Mistral 4."""


class Qwen2VL(LanguagePart, Qwen2):
    """Model class for Qwen2VLForConditionalGeneration and Qwen2_5_VLForConditionalGeneration."""

    names = DecoderNames()
    default_theta = 1_000_000.0
    default_eps = 1e-5


class SeeingPart(InnerPart):
    """A language part that takes image features from the model's vision tower and has a rope of three components."""

    may_see = True

    def read_whole(self, config: ConfigReader) -> None:
        self.sees = self.has_component_ropes = config.raw("vision_config") is not None
        self.placeholders = read_placeholders(config)
        text = config.text_section()
        key = "rope_scaling" if text.raw("rope_scaling") else "rope_parameters"
        self._sections = read_sections(text.section_or_empty(key), (24, 20, 20))

    def make_rotary(self, rope: RopeParams, max_len: int | None) -> Rotary:
        if not self.has_component_ropes:
            return super().make_rotary(rope, max_len)
        return make_component_rotary(self, rope, self._sections, max_len)


class Qwen3VL(SeeingPart, Qwen3):
    """Model class for Qwen3VLForConditionalGeneration."""

    default_theta = 500_000.0


class Qwen3VLMoe(SeeingPart, Qwen3Moe):
    """Model class for Qwen3VLMoeForConditionalGeneration."""

    has_turned_experts = True
    default_theta = 500_000.0

    def read_rule(self, config: ConfigReader) -> RouteRule:
        """Read the router's rule. The weights of a token's experts always sum to one, since transformers' config class
        has no key for it."""
        config.must_equal("norm_topk_prob", True, default=True)
        return super().read_rule(config.with_values({"norm_topk_prob": True}))


class LlamaPart(LanguagePart, Llama):
    """Model class for Llava models and InternVL around Llama."""

    text_defaults = LLAMA


class Qwen2Part(LanguagePart, Qwen2):
    """Model class for Llava models and InternVL around Qwen2."""

    text_defaults = QWEN


class Qwen3Part(LanguagePart, Qwen3):
    """Model class for InternVL around Qwen3."""

    text_defaults = QWEN


class SmolVLM(LanguagePart, Llama):
    """Model class for SmolVLMForConditionalGeneration and Idefics3ForConditionalGeneration."""

    names = DecoderNames.below("model.text_model")
    text_defaults = LLAMA


class Lfm2VL(InnerPart, Lfm2):
    """Model class for Lfm2VlForConditionalGeneration."""

    names = InnerPart.names._replace(norm=f"model.{PREFIX}.embedding_norm")
    default_tied = True
