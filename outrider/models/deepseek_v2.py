"""DeepSeek-V2: DeepSeek-V3 with experts chosen by a softmax, without score corrections and without prediction modules.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch

from outrider.kernels.moe import RouteRule
from outrider.layers import Router
from outrider.models.config import ConfigReader
from outrider.models.deepseek_v3 import DeepseekV3

GREEDY, IN_GROUPS = "greedy", "group_limited_greedy"


class DeepseekV2(DeepseekV3):
    """Model class for DeepseekV2ForCausalLM."""

    num_predicted = 0
    defaults: ClassVar[Mapping[str, Any]] = {"n_shared_experts": 2, "q_lora_rank": 1536}

    def __init__(
        self, config: ConfigReader, *, dtype: torch.dtype, device: torch.device, max_len: int | None = None
    ) -> None:
        for key, only in (("scoring_func", "softmax"), ("norm_topk_prob", False)):
            config.must_equal(key, only, default=only)
        config.must_equal("topk_method", GREEDY, IN_GROUPS, default=GREEDY)
        usual = {"scoring_func": "sigmoid", "topk_method": "noaux_tc"}  # checked above
        self.method = config.raw("topk_method") or GREEDY
        # The head's size is a default of newer files that no layer has.
        super().__init__(config.with_values(usual | {"head_dim": None}), dtype=dtype, device=device, max_len=max_len)

    def router(self, index: int) -> Router:
        config = self.config
        num_experts, top_k = config.required("n_routed_experts", int), config.required("num_experts_per_tok", int)
        groups, top_groups = 1, 1
        if self.method == IN_GROUPS:
            groups, top_groups = config.required("n_group", int), config.required("topk_group", int)
        else:
            config.passes_over("n_group", "topk_group")
        if num_experts % groups or top_groups > groups or top_k > num_experts // groups * top_groups:
            raise config.refusal("n_group", f"it must divide n_routed_experts ({num_experts}), topk_group "
                                            f"({top_groups}) must be at most n_group, and the topk_group chosen groups "
                                            f"must have at least num_experts_per_tok ({top_k}) experts")
        rule = RouteRule(num_experts, top_k, renormalise=False, num_groups=groups, top_groups=top_groups,
                         scale=config.get("routed_scaling_factor", float, 1.0))
        return Router(index, self.hidden_size, rule, dtype=self.dtype, device=self.device)
