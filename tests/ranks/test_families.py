"""Every family on several ranks computes what it does on one, in float64, and each rank holds its share."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
import torch

from outrider.cache.kinds import LatentSpec, RecurrentSpec
from outrider.formats import RankGroup
from outrider.layers import AttentionMLPLayer, Module, SelfAttention, check_ranks
from outrider.models import rank_sizes
from outrider.models.classifier import Classifier
from outrider.models.rank_sizes import check_heads
from outrider.models.registry import build_model
from tests.models.classics import CLASSICS
from tests.models.oracle import (
    HYBRID_FAMILIES,
    KDA_FAMILIES,
    LATENT_FAMILIES,
    LOGIT_ROWS,
    MOE_FAMILIES,
    POOLED_FAMILIES,
    STREAM_FAMILIES,
    tokens_of,
)
from tests.ranks.families import Text, config_of, fill, make_model, run_family, states_of, weight_bytes
from tests.ranks.pool import RankPool

DENSE = ["llama", "llama_bias", "llama_tied", "llama_yarn", "mistral", "qwen2", "qwen2_sliding", "qwen3", "qwen3_bias",
         "gemma3", "gemma3_capped", "gemma4_dense", "gemma4_shared"]
EXPERTS = [*MOE_FAMILIES, "gemma4_moe"]
# The covering subset that quick runs take.
QUICK = {("llama_bias", 2), ("qwen3", 4), ("gemma4_shared", 2), ("gemma4_moe", 2), ("qwen3_moe_mixed", 4),
         ("deepseek_v3_direct", 2), ("glm_moe_dsa", 4), ("nemotron_h_latent", 4), ("nemotron_h", 4), ("bamba_bias", 2),
         ("qwen3_next", 4), ("qwen3_5_bias", 2), ("olmo2", 4), ("phi3_sliding", 2), ("cohere_normed", 4),
         ("minimax_m2", 2), ("ernie_moe", 4), ("kimi_linear", 4), ("bailing_hybrid", 2),
         ("gpt_oss", 4), ("qwen4_exp", 4), ("glm5_next", 2), ("hy_v4", 2)}
CASES = [pytest.param(family, count, marks=[] if (family, count) in QUICK else pytest.mark.long)
         for family in (*DENSE, *EXPERTS, *LATENT_FAMILIES, *HYBRID_FAMILIES, *KDA_FAMILIES, *STREAM_FAMILIES,
                        *POOLED_FAMILIES, *CLASSICS)
         for count in (2, 4)]
# Tensors that every rank holds whole.
COPIES = re.compile(
    r"(?<!mamba\.|mixer\.)norm|(o_proj|down_proj|out_proj)\.bias|layer_scalar|per_layer_(model_|input_)?(projection|gate)"
    r"|(mlp|mixer|block_sparse_moe|feed_forward)\.gate\.|e_score_correction_bias|down_proj_bias|[fg]_a_proj|router\."
    r"|shared_expert_gate|fc[12]_latent_proj|q_a_proj|kv_a_proj|indexer"
    r"|hyper_connection|hc_(pre|head|attn|ffn)|ple\.(key_proj|value_proj|conv1d)")

# Norms with a scale for every feature of every head: each rank has those of its heads.
CUT_NORMS = re.compile(r"^(olmo|cohere|minimax).*\.[qk]_norm\.")


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
                        for name, num_bytes in weight_bytes(whole).items()}
        for claim, own in zip(whole.cache_layers(), caches, strict=True):
            assert own == cache_share(family, claim.spec, count)


def share(family: str, name: str, rank: int, count: int, num_bytes: int) -> int:
    """The bytes that a rank holds of a tensor."""
    config = config_of(family)
    if CUT_NORMS.search(f"{family} {name}"):
        return num_bytes // (min(config["num_key_value_heads"], count) if "k_norm" in name else count)
    if COPIES.search(name):
        return num_bytes
    if "qkv_proj" in name:
        q_heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
        return num_bytes * (q_heads // count + 2 * (kv_heads // min(kv_heads, count))) // (q_heads + 2 * kv_heads)
    if re.search(r"[kv]_proj\.", name):
        is_global = config.get("num_global_key_value_heads") and name.startswith("model.layers.3.")
        heads = config["num_global_key_value_heads" if is_global else "num_key_value_heads"]
        return num_bytes // min(heads, count)
    shared = num_bytes
    if re.search(r"(mixer|mamba)\.(in_proj|conv1d)\.", name):
        heads, groups, head_dim, state = mamba_sizes(config)
        shard, copied = heads * head_dim, 2 * groups * state
        shard += shard + heads if "in_proj" in name else 0
        shared = num_bytes * (shard * min(groups, count) + copied * count) // (shard + copied) // min(groups, count)
    assert shared % count == 0
    return shared // count


def mamba_sizes(config: dict[str, Any]) -> tuple[int, ...]:
    """Heads, groups, size of a head and of the state."""
    keys = ("mamba_num_heads", "n_groups", "mamba_head_dim", "ssm_state_size")
    if "mamba_n_heads" in config:
        keys = ("mamba_n_heads", "mamba_n_groups", "mamba_d_head", "mamba_d_state")
    return tuple(config[key] for key in keys)


def cache_share(family: str, spec: Any, count: int) -> Any:
    """A rank's claim on the cache. Latents and index keys are copies; so are the inputs of convolutions of n-gram
    embeddings, and groups of recurrent layers and kv heads that are fewer than ranks."""
    match spec:
        case LatentSpec():
            return spec
        case RecurrentSpec(state_shape=(0,)):  # a convolution alone
            if family in STREAM_FAMILIES:
                return spec
            return replace(spec, conv_dim=spec.conv_dim // count, out_dim=spec.out_dim // count)
        case RecurrentSpec():
            heads, *state = spec.state_shape
            conv_dim = (spec.conv_dim - spec.out_dim) // 2
            groups = conv_dim // spec.state_shape[2]
            return replace(spec, state_shape=(heads // count, *state), out_dim=spec.out_dim // count,
                           gate_sizes=tuple(size // count for size in spec.gate_sizes),
                           conv_dim=spec.out_dim // count + 2 * conv_dim // min(groups, count))
        case _:
            return replace(spec, num_kv_heads=max(1, spec.num_kv_heads // count))


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


class WholeAttention(SelfAttention):
    """A block from outside that does not say how it is sharded."""

    def shard(self, group: RankGroup) -> None:
        Module.shard(self, group)


def run_classifier(group: RankGroup | None) -> Any:
    """A model with a class head, whose first layer is not sharded."""
    config = config_of("llama") | {"architectures": ["LlamaForSequenceClassification"], "num_labels": 3}
    model = build_model(config, dtype=torch.float64, device="cpu")
    assert isinstance(model, Classifier) and isinstance(model.layers[0], AttentionMLPLayer)
    model.layers[0].attention.__class__ = WholeAttention
    if group is not None:
        model.shard(group)
    fill(model, "Llama")
    hidden = Text(model).add([3, 1, 4, 1, 5])
    return model.class_scores(hidden.final, LOGIT_ROWS), [layer.num_kv_heads for layer in model.attention_layers]


def test_a_block_that_is_not_cut_is_whole_on_every_rank(ranks: RankPool) -> None:
    expected, _ = run_classifier(None)
    for scores, kv_heads in ranks.run(2, run_classifier):
        assert (scores - expected).abs().max() <= 1e-12 * expected.abs().max()
        assert kv_heads == [2, 1, 1, 1]


@pytest.mark.parametrize(("family", "changes", "count", "message"), [
    ("llama", {"num_attention_heads": 9, "num_key_value_heads": 9, "head_dim": 16, "intermediate_size": 144}, 2,
     "num_attention_heads is 9, which 2 ranks cannot share: use 1, 3 or 9 ranks"),
    ("llama", {"num_attention_heads": 12, "num_key_value_heads": 4, "head_dim": 16}, 3,
     "num_key_value_heads is 4, which 3 ranks cannot share: use 1, 2 or 4 ranks"),
    ("llama", {"intermediate_size": 129}, 2, "intermediate_size is 129, which 2 ranks cannot share: use 1 rank"),
    ("qwen3_moe", {"moe_intermediate_size": 30}, 4,
     "moe_intermediate_size is 30, which 4 ranks cannot share: use 1 or 2 ranks"),
    ("qwen3_next", {"shared_expert_intermediate_size": 42}, 4,
     "shared_expert_intermediate_size is 42, which 4 ranks cannot share: use 1 or 2 ranks"),
    ("nemotron_h", {"n_groups": 4, "mamba_num_heads": 12, "num_attention_heads": 12}, 3,
     "n_groups is 4, which 3 ranks cannot share: use 1, 2 or 4 ranks"),
    ("bamba", {"mamba_n_heads": 2, "mamba_d_head": 64}, 4,
     "mamba_n_heads is 2, which 4 ranks cannot share: use 1 or 2 ranks"),
    ("qwen3_5", {"linear_num_key_heads": 2}, 4,
     "linear_num_key_heads is 2, which 4 ranks cannot share: use 1 or 2 ranks"),
    ("deepseek_v3", {"num_attention_heads": 6, "num_key_value_heads": 6}, 4,
     "num_attention_heads is 6, which 4 ranks cannot share: use 1 or 2 ranks"),
])
def test_sizes_that_do_not_divide_are_refused_by_their_key(family: str, changes: dict[str, Any], count: int,
                                                           message: str) -> None:
    outline = build_model(config_of(family) | changes, dtype=torch.float32, device="meta")
    with pytest.raises(ValueError, match=f"config.json: {message}$"):
        check_ranks(outline, count)


@pytest.mark.parametrize("family", [*DENSE, *EXPERTS, *LATENT_FAMILIES, *HYBRID_FAMILIES, *KDA_FAMILIES,
                                    *STREAM_FAMILIES, *POOLED_FAMILIES, *CLASSICS])
def test_heads_are_refused_without_torch_only_where_the_model_refuses_them(family: str) -> None:
    """Before ranks start, the config alone is looked at. Its refusal names numbers of ranks that the model takes."""
    config = config_of(family)
    outline = build_model(config, dtype=torch.float32, device="meta")
    for count in (1, 2, 3, 5, 7, 64):
        try:
            check_heads(config, count, "config.json")
        except ValueError as error:
            assert str(error).startswith(f"config.json: num_attention_heads is {config['num_attention_heads']}, which")
            with pytest.raises(ValueError, match="ranks cannot share"):
                check_ranks(outline, count)
            for named in re.findall(r"\d+", str(error).partition(": use ")[2]):
                check_ranks(outline, int(named))
        else:
            is_known = rank_sizes.FAMILIES.fullmatch(config["architectures"][0])
            assert config["num_attention_heads"] % count == 0 or not is_known


def test_a_config_is_refused_before_ranks_start_only_by_heads_that_they_share() -> None:
    config = config_of("nemotron_h")
    check_heads(config | {"hybrid_override_pattern": "MEM-"}, 7, "config.json")
    check_heads(config | {"architectures": ["MyOwnForCausalLM"]}, 7, "config.json")
    check_heads(config | {"num_attention_heads": "many"}, 7, "config.json")  # refused where the model is built
    nested = {"architectures": ["Gemma4ForConditionalGeneration"], "text_config": {"num_attention_heads": 6}}
    with pytest.raises(ValueError, match="num_attention_heads is 6, which 4 ranks cannot share: use 1, 2, 3 or 6 rank"):
        check_heads(nested, 4, "config.json")
    hybrid = {"architectures": ["GraniteMoeHybridForCausalLM"], "num_attention_heads": 4, "layer_types": ["mamba"]}
    check_heads(hybrid, 3, "config.json")
