"""Which of the tests run on a card by default, in about a minute, and about how long they take: compiling, mostly.

Kernels are tried in bf16, which models have, and recurrent ones in float32 too; engines run in float32 anyway. Knows
names and ids of tests only. OUTRIDER_GPU_ALL=1 runs everything else as well.
"""

from __future__ import annotations

import re
from typing import Any

# Test (of tests/kernels: without its module's "test_triton_") -> ids that run; those that are not named run whole.
KEPT = {
    "attention__decode_equals_the_reference": r"^split",
    "attention__decode_with_window_and_softcap": r"^split-(20|None)",
    "attention__prefill_equals_the_reference": r"^(None|7)-",
    "draft__joined_inputs_equal_the_steps_one_by_one": r"7\.5",
    "gated_delta__checkpoints_in_long_runs": r"^(0|9|18)$",
    "gated_delta__random_steps_with_long_runs": r"^[02]$",  # the third has the chunks of 32 of another test
    "gated_delta__tiles_do_not_matter_to_a_bit": r"16",
    "gated_norm__gated_norm": r"^(33-128|2-2500)-",
    "latent__whole_contexts": r"(1-3|4-2)-",
    "linear__gated_linear_is_the_product_then_the_activation": r"silu-(1|33)$|gelu_pytorch_tanh-16",
    "linear__split_linear": r"^(1|5)-",
    "linear__matvec_with_its_activation": r"(1|4)$",
    "linear__thin_linear": r"(1|3|17)$",
    "moe__experts": r"^7-",
    "moe__pairs_are_sorted_by_expert_and_in_order": r"^(30|1000)-",
    "moe__route": r"(softmax|groups by best|all)-none|sigmoid-bias|groups by two-bias|softmax-expert",
    "moe__tile_shapes_do_not_matter": r"config[01]",
    "recurrent__a_run_behind_a_fold_that_reaches_a_boundary": r"4",
    "rows__norms": r"^1000$",
    "rows__rope_and_cache_write": r"^plain-9|^norm-4",
    "sampling__sampling_equals_the_plain_sampler": r"^(1|2500)-|bfloat16|dtype4",
    "sampling__verdicts_at_rates_equal_the_torch_code": r"rates[23]",
}
# Of the host alone, or engines on the CPU.
LEFT_OUT = re.compile(
    r"wrappers?_.*names?_what|__configs_|__no_choice_|__an_engine|__an_assistant|__float32_drafts|__chunks_are_cut"
)
FLOAT32 = re.compile(r"^recurrent__|^test_decode\[float32-64-plain|^test_batch_mates.*float32-64")
TYPES = ("float32-", "bfloat16-", "float32", "bfloat16")

# Seconds, by how the names of groups begin. A process that has one of the slow ones has few others.
SECONDS = {
    "llama": 30, "qwen3_5": 30, "qwen3_next": 26, "nemotron_h": 26, "gemma4": 20, "eagle3": 22, "verify": 30,
    "deepseek": 24, "glm_moe_dsa": 24,
    "steady nemotron_h": 24, "steady": 14, "warm nemotron_h": 22, "warm qwen3_5": 26, "warm": 18, "memory": 14,
    "tests/gpu/test_flex.py": 16,
    "attention": 16, "kernels recurrent": 24, "kernels gated_delta": 30, "kernels attention": 14, "kernels moe": 12,
    "kernels": 8,
}


def seconds_of(group: str) -> int:
    begins = [name for name in SECONDS if group.startswith(name)]
    return SECONDS[max(begins, key=len)] if begins else 10


def is_chosen(test: str, case: str, dtype: Any) -> bool:
    """test: its name, without its parameters. case: their id. dtype: the parameter of that name, if it has one."""
    name = test.removeprefix("test_triton_")
    if LEFT_OUT.search(name):
        return False
    if dtype == "float32" and not FLOAT32.search(f"{name}[{case}"):
        return False
    for prefix in TYPES:
        case = case.removeprefix(prefix)
    return name not in KEPT or re.search(KEPT[name], case) is not None
