"""GLM-4.5, 4.6 and 4.7: attention with a rope on half of each head, DeepSeek-V3's experts, and prediction modules,
which are stored as layers after the last one.
"""

from __future__ import annotations

import torch

from outrider.layers import Experts, FeedForward, MoE, RopeParams, Router
from outrider.models.config import ConfigReader
from outrider.models.deepseek_v3 import PREDICTED, read_sparse_layers
from outrider.models.hybrid import partial_rope
from outrider.models.llama import Llama
from outrider.models.nemotron_h import read_rule


class Glm4Moe(Llama):
    """Model class for Glm4MoeForCausalLM."""

    default_eps = 1e-5

    def __init__(
        self, config: ConfigReader, *, dtype: torch.dtype, device: torch.device, max_len: int | None = None
    ) -> None:
        self.has_head_norm = config.get("use_qk_norm", bool, False)
        dense = config.get("first_k_dense_replace", int, 1)
        self.is_sparse = read_sparse_layers(config.with_values({"first_k_dense_replace": dense}))
        super().__init__(config, dtype=dtype, device=device, max_len=max_len)

    @property
    def num_predicted(self) -> int:
        """Return the number of prediction modules in the checkpoint."""
        return self.config.get(PREDICTED, int, self.config.get("num_mtp_layers", int, 1))

    def ignores(self, name: str) -> bool:
        """Ignore the layers after the last one: they are the prediction modules."""
        modules = (f"{self.names.layers}.{self.num_layers + i}." for i in range(max(1, self.num_predicted)))
        return super().ignores(name) or name.startswith(tuple(modules))

    def read_rope(self, config: ConfigReader) -> RopeParams:
        return partial_rope(config, self.sizes.head_dim, 0.5)

    def biases(self, config: ConfigReader) -> tuple[bool, bool, bool]:
        return config.get("attention_bias", bool, False), False, False

    def make_feed_forward(self, index: int) -> FeedForward:
        if index < self.num_layers and not self.is_sparse[index]:
            return self.make_mlp(self.sizes.intermediate_size)
        config, hidden_size, rule = self.config, self.hidden_size, read_rule(self.config)
        width, num_shared = config.required("moe_intermediate_size", int), config.get("n_shared_experts", int, 1)
        return MoE(
            Router(index, hidden_size, rule, has_bias=True, dtype=self.dtype, device=self.device),
            Experts(rule.num_experts, hidden_size, width, activation=self.activation, dtype=self.dtype,
                    device=self.device),
            shared=self.make_mlp(num_shared * width) if num_shared else None,
        )
