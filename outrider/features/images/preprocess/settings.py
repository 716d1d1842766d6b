"""The image settings of a model's files: preprocessor_config.json, or the section `image_processor` in
processor_config.json."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from outrider.models.config_reader import ConfigReader
from outrider.models.vision.levels import RESCALE

BICUBIC = 3  # Pillow's number of the filter


def image_settings(processor_config: Mapping[str, Any] | None) -> ConfigReader:
    """Return a reader of the image settings. Without a file every setting has the family's default."""
    values = processor_config or {}
    if isinstance(values.get("image_processor"), Mapping):
        return ConfigReader(values, "processor_config.json").section("image_processor")
    return ConfigReader(values, "preprocessor_config.json")


def check_steps(settings: ConfigReader) -> None:
    """Refuse settings that ask for preprocessing other than conversion to RGB, bicubic resize and division by 255."""
    for key in ("do_resize", "do_rescale", "do_convert_rgb"):
        settings.must_equal(key, True, default=True)
    for key in ("do_center_crop", "do_pad"):
        settings.must_equal(key, False, default=False)
    settings.must_equal("resample", BICUBIC, default=BICUBIC)
    settings.must_equal("rescale_factor", RESCALE, default=RESCALE)


def check_normalization(settings: ConfigReader, mean: float, deviation: float) -> None:
    """Refuse a normalisation of pixels other than the one that the family's vision towers expect."""
    settings.must_equal("image_mean", mean, [mean] * 3, default=mean)
    settings.must_equal("image_std", deviation, [deviation] * 3, default=deviation)


def must_match(settings: ConfigReader, key: str, value: int, vision_key: str) -> None:
    """Refuse a setting that contradicts the model's config."""
    if settings.get(key, int, value) != value:
        raise settings.refusal(key, f"the model's vision_config has {vision_key}={value}")
