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


_GEMMA_VISION = {"hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 3,
                 "num_key_value_heads": 3, "head_dim": 16, "patch_size": 4, "pooling_kernel_size": 3,
                 "position_embedding_size": 64}
_EDGE_TEXT = _GEMMA_TEXT | {"hidden_size_per_layer_input": 8, "num_kv_shared_layers": 3, "use_double_wide_mlp": True,
                            "use_bidirectional_attention": None, "attention_k_eq_v": False,
                            "num_global_key_value_heads": None}
_EXPERTS = {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 32}


def save_gemma4(text: dict[str, Any], vision: dict[str, Any]) -> Callable[[Path], Path]:
    def save(path: Path) -> Path:
        import transformers

        own = {"hidden_size_per_layer_input": 0} | text | {"vocab_size_per_layer_input": VOCAB}
        config = transformers.Gemma4Config(
            text_config=transformers.Gemma4TextConfig(**own), vision_config=_GEMMA_VISION | vision, audio_config=None,
            audio_token_id=AUDIO, **_IDS)
        torch.manual_seed(0)
        model = transformers.Gemma4ForConditionalGeneration(config)
        widen(model)
        with torch.no_grad():
            for name, value in model.named_buffers():
                last = name.rpartition(".")[2]
                if last in ("std_bias", "std_scale"):
                    value.copy_(torch.randn_like(value) * 0.3 + (last == "std_scale"))
                elif last in ("input_min", "output_min", "input_max", "output_max"):
                    value.fill_(1.5 if last.endswith("max") else -1.5)
                elif last == "layer_scalar":
                    value.fill_(0.9)
        model.save_pretrained(path)
        return path

    return save


_QWEN_TEXT: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 512, "tie_word_embeddings": False, "bos_token_id": 1,
    "eos_token_id": 2,
}
_QWEN_VISION = {"depth": 2, "hidden_size": 48, "intermediate_size": 64, "num_heads": 3, "patch_size": 4,
                "out_hidden_size": 64, "num_position_embeddings": 36}
_QWEN_IDS = {"image_token_id": SOFT, "video_token_id": VIDEO, "vision_start_token_id": BEGIN,
             "vision_end_token_id": END}
_ROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 2, 2], "mrope_interleaved": True}


def save_qwen3_5(path: Path) -> Path:
    import transformers

    text = _QWEN_TEXT | {
        "head_dim": 32, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16,
        "linear_value_head_dim": 16, "rope_parameters": _ROPE | {"partial_rotary_factor": 0.5}}
    config = transformers.Qwen3_5Config(text_config=text, vision_config=_QWEN_VISION, **_QWEN_IDS)
    torch.manual_seed(0)
    model = transformers.Qwen3_5ForConditionalGeneration(config)
    widen(model)
    with torch.no_grad():
        for name, value in model.named_parameters():
            if "norm" in name and name.startswith("model.language_model") and "linear_attn" not in name:
                value.sub_(1)  # these norms scale by 1 + weight
    model.save_pretrained(path)
    return path


def save_qwen3_vl(path: Path) -> Path:
    import transformers

    config = transformers.Qwen3VLConfig(
        text_config=_QWEN_TEXT | {"head_dim": 16, "rope_parameters": _ROPE},
        vision_config=_QWEN_VISION | {"depth": 3, "deepstack_visual_indexes": [0, 1]}, **_QWEN_IDS)
    torch.manual_seed(0)
    model = transformers.Qwen3VLForConditionalGeneration(config)
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
    place: tuple[int, ...] = (SOFT,)  # what the chat template writes for an image

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


def gemma4_logits(model: Any, ids: Sequence[int], images: Sequence[PreparedImage]) -> torch.Tensor:
    tokens = torch.tensor([ids])
    given: dict[str, Any] = {}
    if images:
        most = max(len(image.patches) for image in images)
        pixels = torch.zeros(len(images), most, images[0].patches.shape[1])
        places = torch.full((len(images), most, 2), -1)
        for index, image in enumerate(images):
            at, cols = torch.arange(len(image.patches)), image.grid.cols * 3
            pixels[index, : len(at)] = torch.from_numpy(image.patches).float() / 255
            places[index, : len(at)] = torch.stack([at % cols, at // cols], dim=1)
        given = {"pixel_values": pixels, "image_position_ids": places}
    with torch.no_grad():
        return model(input_ids=tokens, mm_token_type_ids=(tokens == SOFT).long(), use_cache=False, **given).logits[0]


def qwen_logits(model: Any, ids: Sequence[int], images: Sequence[PreparedImage]) -> torch.Tensor:
    """Logits of one forward pass. The patches of a still image are the same frame twice."""
    tokens = torch.tensor([ids])
    model.model.rope_deltas = None  # of the last call, which would move the positions of this one
    given: dict[str, Any] = {}
    if images:
        patches = torch.cat([torch.from_numpy(image.patches) for image in images]).float() / 255
        frames = ((patches - 0.5) / 0.5).view(len(patches), 3, 1, -1).expand(-1, -1, 2, -1).reshape(len(patches), -1)
        sides = [[1, image.grid.rows * 2, image.grid.cols * 2] for image in images]
        given = {"pixel_values": frames, "image_grid_thw": torch.tensor(sides)}
    with torch.no_grad():
        return model(input_ids=tokens, mm_token_type_ids=(tokens == SOFT).int(), use_cache=False, **given).logits[0]


def prepared(config: dict[str, Any], images: Sequence[np.ndarray]) -> list[PreparedImage]:
    processor = ImageProcessor.from_config(config, PROCESSOR_CONFIG.get(config["model_type"]))
    return [processor.prepare(image) for image in images]


PROCESSOR_CONFIG: dict[str, dict[str, Any]] = {
    "gemma4_unified": {"max_soft_tokens": BUDGET, "patch_size": 4, "pooling_kernel_size": 3},
    "gemma4": {"max_soft_tokens": BUDGET, "patch_size": 4, "pooling_kernel_size": 3},
    "qwen3_5": {"size": {"shortest_edge": 64, "longest_edge": 4096}, "patch_size": 4, "merge_size": 2},
    "qwen3_vl": {"size": {"shortest_edge": 64, "longest_edge": 4096}, "patch_size": 4, "merge_size": 2},
}
RECIPES = {
    "gemma4_unified": Recipe(save_gemma4_unified, "Gemma4UnifiedForConditionalGeneration", gemma4_unified_logits, 12,
                             ((2, 3), (1, 5), (3, 2))),
    "gemma4": Recipe(save_gemma4(_GEMMA_TEXT, {"standardize": True}), "Gemma4ForConditionalGeneration", gemma4_logits,
                     12, ((2, 3), (1, 5), (3, 2))),
    "gemma4_edge": Recipe(save_gemma4(_EDGE_TEXT, {"use_clipped_linears": True}), "Gemma4ForConditionalGeneration",
                          gemma4_logits, 12, ((2, 3), (1, 5), (3, 2))),
    "gemma4_experts": Recipe(save_gemma4(_GEMMA_TEXT | _EXPERTS, {"standardize": True}),
                             "Gemma4ForConditionalGeneration", gemma4_logits, 12, ((2, 3), (1, 5), (3, 2))),
    "qwen3_5": Recipe(save_qwen3_5, "Qwen3_5ForConditionalGeneration", qwen_logits, 8, ((2, 3), (5, 1), (3, 4)),
                      (BEGIN, SOFT, END)),
    "qwen3_vl": Recipe(save_qwen3_vl, "Qwen3VLForConditionalGeneration", qwen_logits, 8, ((2, 3), (5, 1), (3, 4)),
                       (BEGIN, SOFT, END)),
}


def allow_small_budget(monkeypatch: Any) -> None:
    monkeypatch.setattr(gemma4_images, "BUDGETS", (BUDGET, *gemma4_images.BUDGETS))
