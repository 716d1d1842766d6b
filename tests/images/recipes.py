"""Tiny models that see, saved by transformers, and transformers' own logits for prompts with images.

Images have exactly the size that their processors ask for, so that nothing is resized.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from outrider.features.images.preprocess import gemma4 as gemma4_images
from outrider.features.images.preprocess.processor import ImageProcessor, PreparedImage

VOCAB, SOFT, BEGIN, END, VIDEO, AUDIO = 320, 300, 301, 302, 303, 304
BUDGET = 6  # tokens of an image, where the family has a budget
SLIDING, FULL = "sliding_attention", "full_attention"
_IDS = {"image_token_id": SOFT, "boi_token_id": BEGIN, "eoi_token_id": END, "video_token_id": VIDEO}
_GEMMA_TEXT: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 6, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "global_head_dim": 32, "num_global_key_value_heads": 1,
    "attention_k_eq_v": True, "sliding_window": 8, "layer_types": [SLIDING, SLIDING, FULL] * 2,
    "final_logit_softcapping": 30.0, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    "use_bidirectional_attention": "vision", "max_position_embeddings": 512,
}


def widen(model: Any, seed: int = 0) -> None:
    """Weights that matter: initial ones are so small that nothing shows."""
    torch.manual_seed(seed)
    for name, value in model.named_parameters():
        with torch.no_grad():
            if "position" in name or "pos_embed" in name:
                value.copy_(torch.randn_like(value))
            elif value.dim() < 2:
                value.copy_(1 + 0.2 * torch.randn_like(value) if "bias" not in name else 0.2 * torch.randn_like(value))
            else:
                value.mul_(4)


def save_gemma4_unified(path: Path) -> Path:
    import transformers

    config = transformers.Gemma4UnifiedConfig(
        text_config=transformers.Gemma4UnifiedTextConfig(**_GEMMA_TEXT),
        vision_config={"patch_size": 4, "pooling_kernel_size": 3, "mm_embed_dim": 48, "mm_posemb_size": 32,
                       "output_proj_dims": 48},
        audio_config=None, audio_token_id=AUDIO, **_IDS)
    torch.manual_seed(0)
    model = transformers.Gemma4UnifiedForConditionalGeneration(config)
    widen(model)
    model.save_pretrained(path)
    return path


@dataclass(frozen=True)
class Recipe:
    """One family: how its tiny model is saved, and how transformers is asked for logits."""

    save: Callable[[Path], Path]
    model_class: str
    logits: Callable[[Any, Sequence[int], Sequence[PreparedImage]], torch.Tensor]
    side: int  # pixels of one token's square
    shapes: tuple[tuple[int, int], ...]  # rows and columns of images, of odd sizes

    def image(self, seed: int, shape: tuple[int, int]) -> np.ndarray:
        rng = np.random.default_rng(seed)
        return rng.integers(0, 256, (shape[0] * self.side, shape[1] * self.side, 3), dtype=np.uint8)


def gemma4_unified_logits(model: Any, ids: Sequence[int], images: Sequence[PreparedImage]) -> torch.Tensor:
    """Logits by the masks of `create_masks_for_generate`. Without them transformers would let images be seen both ways
    in full layers too, and beyond the window."""
    tokens = torch.tensor([ids])
    kinds = (tokens == SOFT).long()
    masks = model.create_masks_for_generate(
        model.config, torch.zeros(*tokens.shape, 64, dtype=model.dtype), torch.ones_like(tokens), None,
        torch.arange(len(ids))[None], mm_token_type_ids=kinds)
    with torch.no_grad():
        return model(input_ids=tokens, attention_mask=masks, mm_token_type_ids=kinds, use_cache=False,
                     **unified_pixels(images, model.dtype)).logits[0]


def unified_pixels(images: Sequence[PreparedImage], dtype: torch.dtype) -> dict[str, torch.Tensor]:
    if not images:
        return {}
    most = max(image.grid.num_tokens for image in images)
    pixels = torch.zeros(len(images), most, images[0].patches.shape[1], dtype=dtype)
    places = torch.full((len(images), most, 2), -1)
    for index, image in enumerate(images):
        count, at = image.grid.num_tokens, torch.arange(image.grid.num_tokens)
        pixels[index, :count] = torch.from_numpy(image.patches).to(dtype) / 255
        places[index, :count] = torch.stack([at % image.grid.cols, at // image.grid.cols], dim=1)
    return {"pixel_values": pixels, "image_position_ids": places}


def prepared(config: dict[str, Any], images: Sequence[np.ndarray]) -> list[PreparedImage]:
    processor = ImageProcessor.from_config(config, PROCESSOR_CONFIG.get(config["model_type"]))
    return [processor.prepare(image) for image in images]


PROCESSOR_CONFIG: dict[str, dict[str, Any]] = {
    "gemma4_unified": {"max_soft_tokens": BUDGET, "patch_size": 4, "pooling_kernel_size": 3},
    "gemma4": {"max_soft_tokens": BUDGET, "patch_size": 4, "pooling_kernel_size": 3},
}
RECIPES = {
    "gemma4_unified": Recipe(save_gemma4_unified, "Gemma4UnifiedForConditionalGeneration", gemma4_unified_logits, 12,
                             ((2, 3), (1, 5), (3, 2))),
}


def allow_small_budget(monkeypatch: Any) -> None:
    monkeypatch.setattr(gemma4_images, "BUDGETS", (BUDGET, *gemma4_images.BUDGETS))
