"""Placeholders: tokens of a model's vocabulary that mark the places of images or other inputs in prompts."""

from __future__ import annotations

from outrider.models.config import ConfigReader


def read_placeholders(config: ConfigReader) -> tuple[int, ...]:
    """Read the placeholder tokens for images and sound from the whole model's config."""
    keys = ("image_token_id", "video_token_id", "audio_token_id")
    return tuple(config.required(key, int) for key in keys if config.has(key))
