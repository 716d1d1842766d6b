"""Models by family, and how they are built and loaded.

Imports torch, and never transformers.
"""

from outrider.models.base import Decoder, Hidden, Model
from outrider.models.config import ConfigError, ConfigReader
from outrider.models.loader import WeightError, load_dummy, load_weights, safetensors_tensors
from outrider.models.registry import build_model, eos_token_ids, load_model, read_config, register

__all__ = [
    "ConfigError",
    "ConfigReader",
    "Decoder",
    "Hidden",
    "Model",
    "WeightError",
    "build_model",
    "eos_token_ids",
    "load_dummy",
    "load_model",
    "load_weights",
    "read_config",
    "register",
    "safetensors_tensors",
]
