"""Seed-OSS: Llama with biases of q, k and v."""

from __future__ import annotations

from outrider.models.config import ConfigReader
from outrider.models.llama import Llama


class SeedOss(Llama):
    """Model class for SeedOssForCausalLM."""

    default_head_dim = 128

    def biases(self, config: ConfigReader) -> tuple[bool, bool, bool]:
        return (config.get("attention_bias", bool, True), config.get("attention_out_bias", bool, False),
                config.get("mlp_bias", bool, False))
