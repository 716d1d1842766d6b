"""gpt-oss: attention with sinks, every second layer with a window, and experts with biases and a limited activation.

The published files store the experts in MXFP4. Unquantised files store them as [inputs, outputs], with alternating
features of gate and up.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from outrider.formats import RankGroup, Ranks, TensorShard, WeightSlot, join_names
from outrider.formats.declared import ModelSize
from outrider.kernels.activations import CLAMPED
from outrider.kernels.moe import ExpertBiases
from outrider.layers import Experts, FeedForward, Module, MoE, Parameter, RopeParams, Router, SelfAttention
from outrider.layers.base import HeldRows
from outrider.layers.moe import TransposedSlot
from outrider.mixers import AttentionLayer
from outrider.models.config import FULL, SLIDING, ConfigReader, layer_windows
from outrider.models.llama import Llama
from outrider.models.qwen3_moe import read_rule
from outrider.models.sources.quantization import KEY


class SinkAttention(SelfAttention):
    """Attention with a sink for every head. The sinks are a tensor of the checkpoint, which the attention kernel
    reads."""

    _held: HeldRows | None = None

    def shard(self, group: RankGroup) -> None:
        held = Ranks.from_group(group).share(ModelSize(self.layer.num_heads))
        self._held = HeldRows(self.layer.num_heads, (held,))
        super().shard(group)

    def parts(self) -> Sequence[tuple[str, Module]]:
        return [*super().parts(), ("sinks", Parameter(self.layer.sinks, self._held))]


@dataclass(frozen=True)
class AlternatingSlot(TransposedSlot):
    """A slot for a joint tensor of all experts with alternating output features of gate and up along its last axis."""

    @classmethod
    def turned(cls, tensor: torch.Tensor) -> torch.Tensor:
        return super().turned(torch.cat((tensor[..., ::2], tensor[..., 1::2]), dim=-1))


class BiasedExperts(Experts):
    """Experts with biases. Each rank holds its part of the first projection's biases; rank 0 adds those of the
    second."""

    def __init__(self, num_experts: int, hidden_size: int, width: int, *, is_transposed: bool, dtype: torch.dtype,
                 device: torch.device) -> None:
        """is_transposed: the files store unquantised matrices as [inputs, outputs]."""
        super().__init__(num_experts, hidden_size, width, activation=CLAMPED, is_fused=True,
                         is_transposed=is_transposed, dtype=dtype, device=device)
        self._rank = 0
        self._width, self._held = width, range(width)
        self._down = torch.empty(num_experts, hidden_size, dtype=dtype, device=device)
        self._gate_up = torch.empty(num_experts, 2 * width, dtype=dtype, device=device)

    @property
    def biases(self) -> ExpertBiases:
        return ExpertBiases(self._gate_up, None if self._rank else self._down)

    def shard(self, group: RankGroup) -> None:
        super().shard(group)
        self._rank = group.rank
        self._held = Ranks.from_group(group).share(ModelSize(self._width))
        self._gate_up = self._gate_up.new_empty(len(self._gate_up), 2 * len(self._held))

    def transposed(self, name: str) -> type[TransposedSlot]:
        return AlternatingSlot if name.endswith("gate_up_proj") else TransposedSlot

    def weights(self, prefix: str = "") -> dict[str, WeightSlot]:
        slots = super().weights(prefix)
        held, width = self._held, self._width
        both = (held, range(width + held.start, width + held.stop))
        shard = None if len(held) == width else TensorShard((len(self._gate_up), 2 * width), 1, both)
        return slots | {
            join_names(prefix, "gate_up_proj_bias"): AlternatingSlot(self._gate_up, shard=shard),
            join_names(prefix, "down_proj_bias"): WeightSlot(self._down),
        }


class GptOss(Llama):
    """Model class for GptOssForCausalLM."""

    default_head_dim = 64
    default_theta = 150_000.0
    default_eps = 1e-5

    def __init__(
        self, config: ConfigReader, *, dtype: torch.dtype, device: torch.device, max_len: int | None = None
    ) -> None:
        config.must_equal("swiglu_limit", 7.0, default=7.0)
        config.must_equal("swiglu_alpha", 1.702, default=1.702)
        config.passes_over("initial_context_length", "experts_per_token")  # other names of keys that are read
        super().__init__(config, dtype=dtype, device=device, max_len=max_len)

    def read_rope(self, config: ConfigReader) -> RopeParams:
        if not config.has("rope_scaling"):
            config.required("rope_parameters", dict)  # transformers' default is the yarn of its checkpoints
        return super().read_rope(config)

    def windows(self, config: ConfigReader) -> list[int | None]:
        kinds = [FULL if index % 2 else SLIDING for index in range(self.num_layers)]
        return layer_windows(config, config.get("layer_types", list, kinds))

    def biases(self, config: ConfigReader) -> tuple[bool, bool, bool]:
        attention = config.get("attention_bias", bool, True)
        return attention, attention, False

    def attention_layer(self, index: int, window: int | None = None) -> AttentionLayer:
        wide = torch.float64 if self.dtype == torch.float64 else torch.float32
        sinks = torch.empty(self.sizes.num_heads, dtype=wide, device=self.device)
        return replace(super().attention_layer(index, window), sinks=sinks)

    def make_attention(self, layer: AttentionLayer) -> SelfAttention:
        return SinkAttention(layer, self.hidden_size, head_norm=None, **self.attention_options())

    def make_feed_forward(self, index: int) -> FeedForward:
        rule = read_rule(self.config.with_values({"norm_topk_prob": True}))
        return MoE(
            Router(index, self.hidden_size, rule, has_linear_bias=True, dtype=self.dtype, device=self.device),
            BiasedExperts(rule.num_experts, self.hidden_size, self.sizes.intermediate_size,
                          is_transposed=not self.config.has(KEY), dtype=self.dtype, device=self.device),
            router_name="router",
        )
