"""Mixture of experts: Qwen3-MoE against transformers, and the shared layer against the blocks of other families."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import _disable_current_modes

from outrider.formats import DenseExperts
from outrider.kernels import experts_on_host, moe, ops
from outrider.kernels.moe import RouteRule
from outrider.layers import StepContext
from outrider.layers.base import FeedForward, Module, find_modules
from outrider.layers.linear import Linear
from outrider.layers.mlp import GatedMLP
from outrider.layers.moe import Experts, MoE
from outrider.layers.router import ExpertTally, Router
from outrider.models.config import ConfigError
from outrider.models.loader import load_weights
from outrider.models.registry import build_model
from outrider.models.sources.folder import read_config
from outrider.models.sources.safetensors_files import safetensors_tensors
from tests.models.oracle import (
    LOGIT_ROWS,
    MOE_FAMILIES,
    all_logits,
    assert_chunked_equals_whole,
    assert_greedy_text_equals,
    assert_logits_equal,
    hf_config,
    hf_model,
    load,
    make_folder,
    tokens_of,
)
from tests.unit.test_sample_host_reads import no_host_reads

Folders = Callable[[str], Path]
DEVICE = torch.device("cpu")
F64 = {"dtype": torch.float64, "device": DEVICE}


# Qwen3-MoE


@pytest.mark.parametrize("family", MOE_FAMILIES)
def test_logits_equal_transformers(folder_of: Folders, family: str) -> None:
    assert_logits_equal(folder_of(family), count=80)


@pytest.mark.parametrize("family", MOE_FAMILIES)
def test_chunked_equals_whole(folder_of: Folders, family: str) -> None:
    assert_chunked_equals_whole(folder_of(family), 60, (1, 15, 1, 2, 30), 1e-11)


@pytest.mark.parametrize("family", MOE_FAMILIES)
def test_greedy_text_equals_transformers(folder_of: Folders, family: str) -> None:
    assert_greedy_text_equals(folder_of(family))


def test_bfloat16_is_near_float64(folder_of: Folders) -> None:
    """transformers' own error is the yardstick; where rounding flips a choice of experts, both are far off."""
    tokens = tokens_of(seed=5, count=40)
    exact = all_logits(load(folder_of("qwen3_moe"), torch.float64), tokens)
    with torch.no_grad():
        theirs = hf_model(folder_of("qwen3_moe"), torch.bfloat16)(tokens[None]).logits[0]
    ours = all_logits(load(folder_of("qwen3_moe"), torch.bfloat16), tokens)
    assert (ours - exact).abs().median() < 1.2 * (theirs - exact).abs().median()


@pytest.mark.parametrize("family", MOE_FAMILIES)
def test_every_value_of_a_checkpoint_is_loaded(folder_of: Folders, family: str) -> None:
    slots, saved = load(folder_of(family)).weights(), dict(safetensors_tensors(folder_of(family)))
    assert saved.keys() == slots.keys()
    for name, tensor in saved.items():
        assert torch.equal(slots[name].target, tensor), name


def test_experts_in_fused_tensors_load_like_single_ones(folder_of: Folders, tmp_path: Path) -> None:
    hf_model(folder_of("qwen3_moe")).save_pretrained(tmp_path, save_original_format=False)
    model: Any = build_model(read_config(tmp_path), dtype=torch.float32, device="cpu")
    for layer in model.layers:
        layer.mlp.experts.declared = replace(layer.mlp.experts.declared, is_joint=True)
    assert model.weights()["model.layers.0.mlp.experts.gate_up_proj"].shape == (8, 48, 64)
    load_weights(model, safetensors_tensors(tmp_path))
    tokens = tokens_of(seed=1, count=10)
    assert torch.equal(all_logits(model, tokens), all_logits(load(folder_of("qwen3_moe")), tokens))


@pytest.mark.parametrize(
    ("key", "value", "says"),
    [
        ("num_experts_per_tok", 9, "num_experts_per_tok=9 is not supported; it must be from 1 to .* .8."),
        ("moe_intermediate_size", None, "moe_intermediate_size is missing"),
        ("decoder_sparse_step", 0, "decoder_sparse_step=0 is not supported"),
        ("hidden_act", "gelu", "hidden_act='gelu' is not supported; supported: 'silu'"),
    ],
)
def test_unsupported_values_are_refused(key: str, value: Any, says: str) -> None:
    config = hf_config("qwen3_moe").to_dict() | {"architectures": ["Qwen3MoeForCausalLM"], key: value}
    with pytest.raises(ConfigError, match=f"config.json: {says}"):
        build_model(config, dtype=torch.float32, device="cpu")


def test_configs_of_older_transformers_name_the_experts_otherwise() -> None:
    config = hf_config("qwen3_moe").to_dict() | {"architectures": ["Qwen3MoeForCausalLM"]}
    config.pop("num_local_experts", None)
    model = build_model(config | {"num_experts": 5}, dtype=torch.float32, device="cpu")
    assert [router.rule.num_experts for router in find_modules([model], Router)] == [5] * 4


# The layer against blocks of other families


class SquaredRelu(FeedForward):
    """A shared expert without a gate."""

    def __init__(self, hidden_size: int, width: int) -> None:
        self.up = Linear(hidden_size, width, bias=False, **F64)
        self.down = Linear(width, hidden_size, bias=False, **F64)

    def parts(self) -> list[tuple[str, Module]]:
        return [("up_proj", self.up), ("down_proj", self.down)]

    def __call__(self, x: torch.Tensor, context: StepContext) -> torch.Tensor:
        return self.down(F.relu(self.up(x, context)).square(), context)


def spread_block(block: torch.nn.Module) -> torch.nn.Module:
    """float64 values far enough apart that every part counts."""
    generator = torch.Generator().manual_seed(0)
    for tensor in block.double().state_dict().values():
        tensor.normal_(0.0, 0.3, generator=generator)
    return block.eval()


def fill(layer: Any, block: torch.nn.Module) -> None:
    state, slots = block.state_dict(), layer.weights("it")
    assert {f"it.{name}" for name in state} == slots.keys()
    for name, tensor in state.items():
        assert tuple(tensor.shape) == slots[f"it.{name}"].shape
        slots[f"it.{name}"].store(tensor)
    layer.finalize()


def assert_same(layer: Any, block: torch.nn.Module, hidden_size: int) -> None:
    """Up to float32, in which transformers' routers score whatever the dtype."""
    x = torch.randn(1, 25, hidden_size, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    fill(layer, block)
    with torch.no_grad():
        wanted = block(x)
    torch.testing.assert_close(layer(x[0], LOGIT_ROWS), wanted[0], atol=1e-5, rtol=1e-5)


def test_deepseek_block() -> None:
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Config, DeepseekV3MoE

    block = spread_block(DeepseekV3MoE(DeepseekV3Config(
        hidden_size=32, moe_intermediate_size=24, n_routed_experts=16, n_shared_experts=2, num_experts_per_tok=4,
        n_group=4, topk_group=2, routed_scaling_factor=2.5, norm_topk_prob=True,
    )))
    rule = RouteRule(16, 4, "sigmoid", scale=2.5, num_groups=4, top_groups=2, group_score="top2")
    layer = MoE(
        Router(0, 32, rule, has_bias=True, **F64),
        Experts(16, 32, 24, activation="silu", is_fused=True, **F64),
        shared=GatedMLP(32, 48, activation="silu", bias=False, **F64),
    )
    assert_same(layer, block, 32)


@pytest.mark.parametrize("latent_size", [None, 16])
def test_nemotron_block(latent_size: int | None) -> None:
    from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHConfig, NemotronHMoE

    block = spread_block(NemotronHMoE(NemotronHConfig(
        hidden_size=32, moe_intermediate_size=24, n_routed_experts=8, moe_shared_expert_intermediate_size=40,
        num_experts_per_tok=3, n_group=1, topk_group=1, routed_scaling_factor=1.5, norm_topk_prob=True,
        moe_latent_size=latent_size, mlp_hidden_act="relu2", mlp_bias=False,
    )))
    latent = None
    if latent_size is not None:
        latent = (Linear(32, 16, bias=False, **F64), Linear(16, 32, bias=False, **F64))
    layer = MoE(
        Router(0, 32, RouteRule(8, 3, "sigmoid", scale=1.5), has_bias=True, **F64),
        Experts(8, latent_size or 32, 24, activation="relu2", is_fused=True, **F64),
        shared=SquaredRelu(32, 40),
        latent=latent,
    )
    assert_same(layer, block, 32)


def test_qwen3_next_block() -> None:
    from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextConfig, Qwen3NextSparseMoeBlock

    block = spread_block(Qwen3NextSparseMoeBlock(Qwen3NextConfig(
        hidden_size=32, moe_intermediate_size=24, shared_expert_intermediate_size=40, num_experts=8,
        num_experts_per_tok=3, norm_topk_prob=True,
    )))
    layer = MoE(
        Router(0, 32, RouteRule(8, 3), **F64),
        Experts(8, 32, 24, activation="silu", is_fused=True, **F64),
        shared=GatedMLP(32, 40, activation="silu", bias=False, **F64),
        shared_name="shared_expert",
        shared_gate=Linear(32, 1, bias=False, **F64),
    )
    assert_same(layer, block, 32)


def test_weights_of_single_experts_are_views_of_the_fused_ones() -> None:
    for activation, names in (("silu", ["gate_proj", "up_proj", "down_proj"]), ("relu2", ["up_proj", "down_proj"])):
        layer = Experts(3, 8, 4, activation=activation, **F64)
        slots = layer.weights("e")
        assert slots.keys() == {f"e.{expert}.{name}.weight" for expert in range(3) for name in names}
        for index, slot in enumerate(slots.values()):
            slot.target.fill_(index)
        assert isinstance(layer.format, DenseExperts)
        gate_up, down = layer.format._gate_up, layer.format._down
        assert down[2].eq(len(slots) - 1).all()
        first = [row.unique().tolist() for row in gate_up[1].split(4)]
        assert first == ([[3.0], [4.0]] if activation == "silu" else [[2.0]])


# Routers


def test_softmax_groups_are_worth_their_best_expert() -> None:
    logits = torch.tensor([[3.0, 0.0, 2.9, 2.8, 0.0, 0.0]], dtype=torch.float64)
    by_best = RouteRule(6, 2, num_groups=3, top_groups=1)
    assert ops.route(logits, by_best).ids.tolist() == [[0, 1]]
    by_two = RouteRule(6, 2, num_groups=3, top_groups=1, group_score="top2")
    assert ops.route(logits, by_two).ids.tolist() == [[2, 3]]


def test_a_bias_counts_for_the_choice_alone() -> None:
    logits, bias = torch.zeros(1, 4), torch.tensor([0.0, 0.0, 0.0, 5.0])
    found = ops.route(logits, RouteRule(4, 2, "sigmoid", scale=3.0), bias)
    assert found.ids.tolist() == [[3, 0]] and found.weights.tolist() == [[1.5, 1.5]]
    assert found.weights.dtype == torch.float32 and found.ids.dtype == torch.int64


def test_an_expert_scale_comes_after_renormalising() -> None:
    scale = torch.tensor([1.0, 2.0, 4.0, 8.0])
    found = ops.route(torch.zeros(1, 4), RouteRule(4, 2), expert_scale=scale)
    assert found.ids.tolist() == [[0, 1]], "ties go to the lowest id"
    assert found.weights.tolist() == [[0.5, 1.0]]


def test_scores_are_float32_in_a_16_bit_model_and_float64_stays() -> None:
    for dtype, wide in ((torch.bfloat16, torch.float32), (torch.float64, torch.float64)):
        router = Router(0, 16, RouteRule(4, 2), has_bias=True, dtype=dtype, device=DEVICE)
        for slot in router.weights("r").values():
            slot.target.normal_()
        assert router(torch.randn(3, 16, dtype=dtype), LOGIT_ROWS).weights.dtype == wide


# The products


def draw(num_tokens: int, activation: str = "silu") -> dict[str, Any]:
    generator = torch.Generator().manual_seed(num_tokens)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    routed = ops.route(normal(num_tokens, 6), RouteRule(6, 2))
    rows = 10 if activation == "relu2" else 20
    return {
        "x": normal(num_tokens, 12), "ids": routed.ids, "weights": routed.weights,
        "gate_up": normal(6, rows, 12), "down": normal(6, 12, 10), "activation": activation,
    }


@pytest.mark.parametrize("activation", ["silu", "gelu_pytorch_tanh", "relu2"])
@pytest.mark.parametrize("num_tokens", [0, 1, 50])
def test_the_cpu_means_what_the_reference_says(
    monkeypatch: pytest.MonkeyPatch, num_tokens: int, activation: str
) -> None:
    inputs = draw(num_tokens, activation)
    wanted = moe.experts(**inputs)
    torch.testing.assert_close(ops.experts(**inputs), wanted)
    monkeypatch.setattr(moe, "MAX_GATHERED", 1000)
    torch.testing.assert_close(moe.experts(**inputs), wanted)
    for dtype, limit in ((torch.float32, 1e-5), (torch.bfloat16, 2e-2)):
        narrow = {name: t.to(dtype) if name in ("x", "gate_up", "down") else t for name, t in inputs.items()}
        narrow["weights"] = inputs["weights"].float()
        result = ops.experts(**narrow)
        assert result.dtype == dtype and result.shape == wanted.shape
        assert num_tokens == 0 or float((result - wanted).norm() / wanted.norm()) < limit


def test_dead_token_rows_do_not_disturb_the_others() -> None:
    inputs = draw(9)
    whole = ops.experts(**inputs)
    inputs["x"][:4] = float("nan")
    inputs["ids"][:4], inputs["weights"][:4] = inputs["ids"][8], float("inf")
    for function in (ops.experts, moe.experts):
        assert torch.equal(function(**inputs)[4:].isnan(), torch.zeros(5, 12, dtype=torch.bool))
        torch.testing.assert_close(function(**inputs)[4:], whole[4:])


def test_a_wrong_shape_or_activation_is_named() -> None:
    for name, value in (
        ("x", torch.zeros(3, 11)), ("gate_up", torch.zeros(6, 19, 12)), ("weights", torch.zeros(3, 1)),
        ("activation", "tanh"),
    ):
        with pytest.raises(ValueError, match=f"experts: {name} "):
            ops.experts(**draw(3) | {name: value})


@pytest.mark.parametrize("guard", [torch.no_grad, torch.inference_mode])
def test_only_the_plan_of_the_cpu_reads_on_the_host(monkeypatch: pytest.MonkeyPatch, guard: Callable[[], Any]) -> None:
    inputs, x = draw(5), torch.randn(5, 12, dtype=torch.float64)
    rule = RouteRule(8, 2, "sigmoid", num_groups=4, top_groups=2, group_score="top2")
    router = Router(0, 12, rule, has_bias=True, **F64)
    counter = ExpertTally([router], 99, device=DEVICE)
    for slot in router.weights("r").values():
        slot.target.normal_()
    router.observer = counter
    plan, tolist, calls = experts_on_host.plan_on_host, torch.Tensor.tolist, []

    def exempt(*args: Any) -> Any:
        calls.append(1)
        with _disable_current_modes(), monkeypatch.context() as patch:
            patch.setattr(torch.Tensor, "tolist", tolist)
            return plan(*args)

    with guard(), no_host_reads(monkeypatch):
        router(x, LOGIT_ROWS)
        moe.experts(**inputs)
        with pytest.raises(AssertionError, match="host read"):
            ops.experts(**inputs)
        monkeypatch.setattr(experts_on_host, "plan_on_host", exempt)
        ops.experts(**inputs)
    assert len(calls) == 1 and (counter.mean() or 0) > 0


# What benchmarks hook into


def test_distinct_experts_are_counted_per_layer(tmp_path: Path) -> None:
    model = load(make_folder("qwen3_moe_mixed", tmp_path))
    routers, seen = find_modules([model], Router), {}
    assert [router.index for router in routers] == [0, 2, 3], "layer 1 is dense"
    counter = ExpertTally(routers, 99, device=DEVICE)

    def observe(index: int, ids: torch.Tensor) -> None:
        counter(index, ids)
        seen[index] = len(set(ids.flatten().tolist()))

    for router in routers:
        router.observer = observe
    all_logits(model, tokens_of(seed=1, count=3))
    counted = {index: total.item() / counter._steps[index] for index, total in counter._totals.items()}
    assert counted == seen and set(seen) == {0, 2, 3} and min(seen.values()) >= 3
    assert counter.mean() == sum(seen.values()) / 3


def test_ids_can_be_overridden_while_the_router_still_runs(folder_of: Folders) -> None:
    model, tokens, calls = load(folder_of("qwen3_moe"), torch.float64), tokens_of(seed=1, count=6), []
    plain = all_logits(model, tokens)
    chosen: dict[int, torch.Tensor] = {}
    for router in find_modules([model], Router):
        router.observer = lambda index, ids: chosen.setdefault(index, ids)

    all_logits(model, tokens)

    def replay(index: int, num_tokens: int) -> torch.Tensor:
        calls.append((index, num_tokens))
        return chosen[index]

    for router in find_modules([model], Router):
        router.routing_override = replay
    assert torch.equal(all_logits(model, tokens), plain), "its own choice changes nothing"
    chosen[2] = (chosen[2] + 1) % 8
    assert not torch.allclose(all_logits(model, tokens), plain)
    assert calls[:4] == [(0, 6), (1, 6), (2, 6), (3, 6)]
