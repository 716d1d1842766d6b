"""Hunyuan, dense and with experts: norms of q and k heads after the rope, and a rope whose base is scaled by `alpha`.
"""

from __future__ import annotations

import torch

from outrider.kernels.moe import RouteRule
from outrider.layers import Experts, FeedForward, HeadNorm, LateNormAttention, MoE, RopeParams, Router, SelfAttention
from outrider.mixers import AttentionLayer
from outrider.models.config import ConfigReader, read_rope
from outrider.models.llama import Llama

NORM_NAMES = ("query_layernorm", "key_layernorm")


class Hunyuan(Llama):
    """Model class for HunYuanDenseV1ForCausalLM."""

    default_eps = 1e-5

    def __init__(
        self, config: ConfigReader, *, dtype: torch.dtype, device: torch.device, max_len: int | None = None
    ) -> None:
        for key in ("use_qk_norm", "use_rotary_pos_emb"):
            config.must_equal(key, True, default=True)
        for key in ("use_cla", "add_classification_head", "use_mla"):
            config.must_equal(key, False, default=False)
        config.must_equal("norm_type", "rms", default="rms")
        config.must_equal("mlp_bias", False, default=False)
        # Names of tokens, sizes of image parts, and settings of heads and shared caches that are off.
        config.passes_over("cla_share_factor", "eod_token_id", "eod_id", "im_start_id", "im_end_id", "im_newline_id",
                           "pad_id", "text_start_id", "text_end_id", "video_start_id", "video_end_id", "mask_init_id",
                           "sep_id", "bos_id", "org_vocab_size", "class_num", "pool_type", "attention_head_dim",
                           "anyres_pooling_size", "skip_cls_token", "max_image_size", "max_video_size")
        super().__init__(config, dtype=dtype, device=device, max_len=max_len)

    def read_rope(self, config: ConfigReader) -> RopeParams:
        """Read the rope. With an `alpha`, "dynamic" does not mean dynamic: the rope's base is scaled once, for every
        length."""
        key = "rope_scaling" if config.raw("rope_scaling") else "rope_parameters"
        rope = config.section_or_empty(key)
        kind = rope.raw("rope_type") or rope.raw("type")
        alpha = rope.optional("alpha", float)
        if kind != "dynamic" or not alpha:
            return read_rope(config, self.sizes.head_dim)
        if alpha <= 0:
            raise rope.refusal("alpha", "it must be greater than 0")
        rope.must_equal("factor", 1, default=1)
        rope.passes_over("beta_fast", "beta_slow", "mscale", "mscale_all_dim")
        dim = self.sizes.head_dim
        theta = rope.get("rope_theta", float, config.get("rope_theta", float, self.default_theta))
        plain = {"rope_scaling": None, "rope_parameters": {"rope_theta": theta * alpha ** (dim / (dim - 2))}}
        return read_rope(config.with_values(plain), dim)

    def make_head_norm(self, layer: AttentionLayer) -> HeadNorm:
        return HeadNorm(layer.num_heads, layer.num_kv_heads, layer.head_dim, self.sizes.eps, dtype=self.dtype,
                        device=self.device, names=NORM_NAMES)

    def make_attention(self, layer: AttentionLayer) -> SelfAttention:
        norm = self.make_head_norm(layer)
        return LateNormAttention(layer, self.hidden_size, head_norm=norm, **self.attention_options())

    def biases(self, config: ConfigReader) -> tuple[bool, bool, bool]:
        attention = config.get("attention_bias", bool, False)
        return attention, attention, False


class HunyuanMoe(Hunyuan):
    """Model class for HunYuanMoEV1ForCausalLM: every layer has experts, and beside them an MLP that processes every
    token."""

    def make_feed_forward(self, index: int) -> FeedForward:
        config, hidden_size = self.config, self.hidden_size
        num_experts, top_k = (read_number(config, key, index) for key in ("num_experts", "moe_topk"))
        if not 1 <= top_k <= num_experts:
            raise config.refusal("moe_topk", f"it must be from 1 to num_experts ({num_experts})")
        rule = RouteRule(num_experts, top_k)
        width = self.sizes.intermediate_size
        if config.has("moe_intermediate_size"):
            width = read_number(config, "moe_intermediate_size", index)
        num_shared = read_number(config, "num_shared_expert", index) if config.has("num_shared_expert") else 1
        for key, only in (("use_mixed_mlp_moe", True), ("moe_drop_tokens", False), ("norm_topk_prob", True),
                          ("moe_layer_num_skipped", 0)):
            config.must_equal(key, only, default=only)
        return MoE(
            Router(index, hidden_size, rule, projection="wg", dtype=self.dtype, device=self.device),
            Experts(rule.num_experts, hidden_size, width, activation=self.activation, dtype=self.dtype,
                    device=self.device),
            shared=self.make_mlp(num_shared * self.sizes.intermediate_size), shared_name="shared_mlp",
        )


def read_number(config: ConfigReader, key: str, index: int) -> int:
    """Read a count of one layer: the number under `key`, or the layer's entry if it is a list."""
    if not isinstance(config.raw(key), list):
        return config.required(key, int)
    numbers = config.required(key, list[int])
    if index >= len(numbers) or numbers[index] < 1:
        raise config.refusal(key, "it must have a number of at least 1 for every layer")
    return numbers[index]
