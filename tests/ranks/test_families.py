"""Every family on several ranks computes what it does on one, in float64, and each rank holds its share."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from outrider.cache.kinds import FullSpec
from outrider.layers import check_ranks
from outrider.models.registry import build_model
from tests.models.oracle import tokens_of
from tests.ranks.families import config_of, make_model, run_family, states_of, weight_bytes
from tests.ranks.pool import RankPool

DENSE = ["llama", "llama_bias", "llama_tied", "llama_yarn", "mistral", "qwen2", "qwen2_sliding", "qwen3", "qwen3_bias",
         "gemma3", "gemma3_capped", "gemma4_dense", "gemma4_shared"]
# The covering subset that quick runs take.
QUICK = {("llama_bias", 2), ("qwen3", 4), ("gemma4_shared", 2)}
CASES = [pytest.param(family, count, marks=[] if (family, count) in QUICK else pytest.mark.long)
         for family in DENSE for count in (2, 4)]  # fmt: skip
# Tensors that every rank holds whole.
COPIES = re.compile(r"norm|(o_proj|down_proj)\.bias|layer_scalar|per_layer_(model_|input_)?(projection|gate)")


@pytest.mark.parametrize(("family", "count"), CASES)
def test_ranks_compute_what_one_does(ranks: RankPool, family: str, count: int) -> None:
    prompt = tokens_of(seed=1, count=20).tolist()
    whole = make_model(family, None)
    expected = states_of(whole, prompt, 6)
    assert len(expected["tokens"].unique()) > 1, "a constant text would hide mistakes"
    results = ranks.run(count, run_family, family, prompt, 6)
    for rank, (states, held, caches) in enumerate(results):
        for name, state in states.items():
            assert torch.equal(state, results[0][0][name]), "all ranks must have the same bits"
            assert (state - expected[name]).abs().max() <= 1e-12 * expected[name].abs().max(), name
        assert held == {name: share(family, name, rank, count, num_bytes)
                        for name, num_bytes in weight_bytes(whole).items()}  # fmt: skip
        for claim, own in zip(whole.cache_layers(), caches, strict=True):
            assert own == cache_share(claim.spec, count)


def share(family: str, name: str, rank: int, count: int, num_bytes: int) -> int:
    """The bytes that a rank holds of a tensor."""
    config = config_of(family)
    if COPIES.search(name):
        return num_bytes
    if re.search(r"[kv]_proj\.", name):
        is_global = config.get("num_global_key_value_heads") and name.startswith("model.layers.3.")
        heads = config["num_global_key_value_heads" if is_global else "num_key_value_heads"]
        return num_bytes // min(heads, count)
    assert num_bytes % count == 0
    return num_bytes // count


def cache_share(spec: Any, count: int) -> Any:
    assert isinstance(spec, FullSpec)
    return type(spec)(**vars(spec) | {"num_kv_heads": max(1, spec.num_kv_heads // count)})


def test_a_vocabulary_that_does_not_divide(ranks: RankPool) -> None:
    """The last rank has fewer rows."""
    prompt = tokens_of(seed=1, count=20).tolist()
    expected = states_of(make_model("llama", None, **ODD), prompt, 6)
    for states, held in ranks.run(3, run_odd_sizes, prompt):
        assert (states["logits"] - expected["logits"]).abs().max() <= 1e-12 * expected["logits"].abs().max()
        assert torch.equal(states["tokens"], expected["tokens"])
        assert held["lm_head.weight"] == held["model.embed_tokens.weight"] in (86 * 48 * 8, 84 * 48 * 8)


ODD = {"num_attention_heads": 6, "num_key_value_heads": 3, "hidden_size": 48, "intermediate_size": 96}


def run_odd_sizes(group: Any, prompt: list[int]) -> Any:
    model = make_model("llama", group, **ODD)
    return states_of(model, prompt, 6), weight_bytes(model)


@pytest.mark.parametrize(("family", "changes", "count", "message"), [
    ("llama", {"num_attention_heads": 9, "num_key_value_heads": 9, "head_dim": 16, "intermediate_size": 144}, 2,
     "num_attention_heads is 9, which 2 ranks cannot share: use 1, 3 or 9 ranks"),
    ("llama", {"num_attention_heads": 12, "num_key_value_heads": 4, "head_dim": 16}, 3,
     "num_key_value_heads is 4, which 3 ranks cannot share: use 1, 2 or 4 ranks"),
    ("llama", {"intermediate_size": 129}, 2, "intermediate_size is 129, which 2 ranks cannot share: use 1 rank"),
])  # fmt: skip
def test_sizes_that_do_not_divide_are_refused_by_their_key(family: str, changes: dict[str, Any], count: int,
                                                           message: str) -> None:
    outline = build_model(config_of(family) | changes, dtype=torch.float32, device="meta")
    with pytest.raises(ValueError, match=f"config.json: {message}$"):
        check_ranks(outline, count)
