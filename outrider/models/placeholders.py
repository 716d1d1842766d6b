"""Placeholders: tokens of a model's vocabulary that stand for other inputs in prompts."""

from __future__ import annotations

from outrider.models.config import ConfigReader


def read_placeholders(config: ConfigReader) -> tuple[int, ...]:
    """Read the tokens that stand for images or sound, from the whole model's config."""
    keys = ("image_token_id", "video_token_id", "audio_token_id")
    return tuple(config.required(key, int) for key in keys if config.has(key))
