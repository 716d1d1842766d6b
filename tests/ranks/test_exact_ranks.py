"""Exact mode on ranks: for one number of ranks, bits do not depend on the batch. In float32, with odd sizes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from outrider.formats import RankGroup
from outrider.kernels import cpu as native
from tests.engine.harness import Rig, random_model
from tests.engine.test_exact_mode import ASKS, FAMILIES, SETTINGS, bits_of
from tests.ranks.pool import RankPool
from tests.ranks.threads import run_threads

pytestmark = pytest.mark.skipif(not native.available(), reason="exact mode on a CPU needs the native kernels")
# Sizes that two ranks can share.
CHANGES: dict[str, Any] = {"moe_intermediate_size": 14, "moe_shared_expert_intermediate_size": 12,
                           "shared_expert_intermediate_size": 12, "linear_num_key_heads": 2,
                           "linear_num_value_heads": 6}
BAMBA = FAMILIES["llama"] | {
    "architectures": ["BambaForCausalLM"], "attn_layer_indices": [1], "hidden_size": 42, "mamba_n_heads": 6,
    "mamba_d_head": 14, "mamba_n_groups": 1, "mamba_d_state": 9,
}
CONFIGS = {name: config | {key: value for key, value in CHANGES.items() if key in config}
           for name, config in (FAMILIES | {"bamba": BAMBA}).items()}


def run_exact(group: RankGroup, family: str) -> Any:
    """Each request alone, and all in chunks with batch mates, preempted."""
    model = random_model(CONFIGS[family], torch.float32, 11, group)
    with Rig(model, **SETTINGS, enable_prefix_caching=False) as rig:
        alone = bits_of(rig.run_one_by_one(ASKS))
    with Rig(model, **SETTINGS | {"max_num_batched_tokens": 24}) as rig:
        assert bits_of(rig.run(ASKS, after_step=rig.preempt)) == alone
        assert rig.scheduler.stats.num_preemptions > 0
    return alone


@pytest.mark.long
@pytest.mark.parametrize("family", CONFIGS)
def test_bits_do_not_depend_on_the_batch(ranks: RankPool, family: str) -> None:
    first, second = ranks.run(2, run_exact, family)
    assert first == second


def test_bits_are_those_of_both_parts_summed_in_one_process(ranks: RankPool) -> None:
    """In the order of ranks, whatever carries the parts."""
    assert run_threads(2, run_exact, "bamba") == ranks.run(2, run_exact, "bamba")
