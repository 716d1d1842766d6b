"""Families with KDA layers against transformers: logits, greedy text, the files' forms; and against themselves."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from outrider.layers import StepContext
from outrider.models.base import Model
from outrider.models.config import ConfigError
from outrider.models.registry import build_model
from outrider.models.sources.folder import read_config
from tests.models.oracle import (
    KDA_FAMILIES,
    DenseAttend,
    all_logits,
    assert_chunked_equals_whole,
    assert_greedy_text_equals,
    assert_logits_equal,
    hf_logits,
    load,
    make_folder,
    needs_kda,
    tokens_of,
)
from tests.models.prediction_modules import assert_drafts_equal

Folders = Callable[[str], Path]
pytestmark = needs_kda


@pytest.mark.parametrize("family", KDA_FAMILIES)
def test_logits_equal_transformers(folder_of: Folders, family: str) -> None:
    assert_logits_equal(folder_of(family), count=150)  # many chunks of a scan, more than two of theirs


@pytest.mark.parametrize("family", KDA_FAMILIES)
def test_chunked_equals_whole(folder_of: Folders, family: str) -> None:
    assert_chunked_equals_whole(folder_of(family), 150, (1, 2, 15, 1, 1, 65, 3), 1e-10)


@pytest.mark.parametrize("family", KDA_FAMILIES)
def test_greedy_text_equals_transformers(folder_of: Folders, family: str) -> None:
    assert_greedy_text_equals(folder_of(family))


def makers_config(folder: Path) -> dict[str, Any]:
    """The config of a Kimi-Linear folder in the form of the makers' own files."""
    config = read_config(folder)
    kinds, dense = config.pop("layer_types"), config.pop("mlp_layer_types").count("dense")
    numbers = {kind: [i for i, own in enumerate(kinds, 1) if own == kind] for kind in set(kinds)}
    linear = {"kda_layers": numbers["linear_attention"], "full_attn_layers": numbers["full_attention"],
              "head_dim": config.pop("linear_head_dim"), "num_heads": config.pop("linear_num_heads"),
              "short_conv_kernel_size": config.pop("linear_conv_kernel_dim")}
    return config | {"linear_attn_config": linear, "first_k_dense_replace": dense, "head_dim": 72, "moe_layer_freq": 1,
                     "mla_use_nope": True, "moe_router_activation_func": "sigmoid", "use_grouped_topk": True,
                     "rope_theta": 10000.0, "rope_scaling": None, "num_nextn_predict_layers": 0}


def test_the_makers_form_of_the_config(folder_of: Folders, tmp_path: Path) -> None:
    whole = folder_of("kimi_linear")
    tokens = tokens_of(seed=6, count=40)
    (tmp_path / "model.safetensors").symlink_to(whole / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(makers_config(whole)))
    assert (all_logits(load(tmp_path), tokens) - hf_logits(whole, tokens)).abs().max() < 1e-4


@pytest.mark.parametrize(("changes", "message"), [
    ({"mla_use_nope": False}, "mla_use_nope=False"),
    ({"moe_router_activation_func": "softmax"}, "moe_router_activation_func='softmax'"),
    ({"linear_attn_config": {"kda_layers": [1, 2, 4], "full_attn_layers": [3, 4], "head_dim": 8, "num_heads": 4}},
     "kda_layers"),
    ({"num_experts": 9, "n_routed_experts": 8}, "num_experts=9"),
    ({"num_experts_per_token": 99}, "num_experts_per_token=99 is not supported; it must be from 1 to"),
    ({"num_experts": "x"}, "num_experts must be an integer from 1 to 4096, got 'x'"),
    ({"num_experts": None}, r"num_experts \(or n_routed_experts\) is missing"),
    ({"num_key_value_heads": 2}, "num_key_value_heads=2"),
])
def test_configs_that_cannot_be_served(folder_of: Folders, changes: dict[str, Any], message: str) -> None:
    config = makers_config(folder_of("kimi_linear")) | changes
    with pytest.raises(ConfigError, match=message):
        build_model(config, dtype=torch.float32, device="meta")


# The multi-token-prediction module of Bailing-hybrid: latent attention with a gate for each head, and experts.


def make_module(folder: Path) -> Path:
    """A Bailing-hybrid folder with a module behind its last layer: random tensors like those of the last layer."""
    make_folder("bailing_hybrid", folder)
    path = folder / "model.safetensors"
    tensors = load_file(path)
    num_layers, hidden = read_config(folder)["num_hidden_layers"], tensors["model.norm.weight"].shape[0]
    last, module = (f"model.layers.{number}." for number in (num_layers - 1, num_layers))
    shapes = {module + name.removeprefix(last): tensor.shape for name, tensor in tensors.items()
              if name.startswith(last)}
    shapes |= {f"{module}{name}.weight": torch.Size([hidden]) for name in ("enorm", "hnorm", "final_layernorm")}
    shapes[f"{module}eh_proj.weight"] = torch.Size([hidden, 2 * hidden])
    generator = torch.Generator().manual_seed(3)
    made = {name: torch.empty(shape).normal_(1.0 if "norm" in name else 0.0, 0.2, generator=generator)
            for name, shape in shapes.items()}
    save_file(tensors | made, path)
    return folder


class NaiveModule:
    """One request, everything from scratch, written from the tensors."""

    def __init__(self, folder: Path, target: Model) -> None:
        self.config: dict[str, Any] = read_config(folder)
        self.target = target
        tensors = {name: tensor.double() for name, tensor in load_file(folder / "model.safetensors").items()}
        self.embedding, self.head = tensors["model.word_embeddings.weight"], tensors["lm_head.weight"]
        prefix = f"model.layers.{self.config['num_hidden_layers']}."
        self.t = {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}

    def drafts(self, known: list[int], k: int) -> tuple[list[int], torch.Tensor]:
        """k drafts after `known`, and the logits of each."""
        history = torch.tensor(known[:-1])
        hidden = self.target.forward(history, StepContext(DenseAttend(self.target), torch.arange(len(history)))).final
        chosen: list[int] = []
        logits = []
        for _ in range(k):
            output = self.module(torch.tensor([*known, *chosen][1:]), hidden)
            logits.append(output[-1] @ self.head.T)
            chosen.append(int(logits[-1].argmax()))
            hidden = torch.cat((hidden, output[-1:]))
        return chosen, torch.stack(logits)

    def module(self, tokens: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        joined = torch.cat((self.norm(self.embedding[tokens], "enorm"), self.norm(hidden, "hnorm")), dim=1)
        x = joined @ self.t["eh_proj.weight"].T
        x = x + self.attention(self.norm(x, "input_layernorm"))
        x = x + self.experts(self.norm(x, "post_attention_layernorm"))
        return self.norm(x, "final_layernorm")

    def norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * self.t[f"{name}.weight"]

    def attention(self, x: torch.Tensor) -> torch.Tensor:
        heads, nope, turning, value = 4, 24, 16, 20
        q = (x @ self.t["attention.q_proj.weight"].T).view(-1, heads, nope + turning)
        latent, key = (x @ self.t["attention.kv_a_proj_with_mqa.weight"].T).split((32, turning), dim=1)
        latent = self.norm(latent, "attention.kv_a_layernorm")
        expanded = (latent @ self.t["attention.kv_b_proj.weight"].T).view(-1, heads, nope + value)
        q_turned, key = self.rope(q[..., nope:]), self.rope(key[:, None])[:, 0]
        out = torch.zeros(len(x), heads, value, dtype=x.dtype)
        for row in range(len(x)):
            for head in range(heads):
                scores = expanded[: row + 1, head, :nope] @ q[row, head, :nope] + key[: row + 1] @ q_turned[row, head]
                weights = (scores * (nope + turning) ** -0.5).softmax(0)
                out[row, head] = weights @ expanded[: row + 1, head, nope:]
        gate = (x @ self.t["attention.g_proj.weight"].T).sigmoid()
        return (out * gate[..., None]).flatten(1) @ self.t["attention.dense.weight"].T

    def rope(self, x: torch.Tensor) -> torch.Tensor:
        """Row i is slot i + 1, at position i; neighbours turn together."""
        frequencies = 1000.0 ** (-torch.arange(0, x.shape[-1], 2, dtype=torch.float64) / x.shape[-1])
        angles = torch.arange(len(x))[:, None, None] * frequencies
        a, b = x[..., ::2], x[..., 1::2]
        return torch.cat((a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()), dim=-1)

    def experts(self, x: torch.Tensor) -> torch.Tensor:
        config, out = self.config, self.mlp(x, "mlp.shared_experts")
        scores = (x @ self.t["mlp.gate.weight"].T).sigmoid()
        for row in range(len(x)):
            ranked = scores[row] + self.t["mlp.gate.expert_bias"]
            groups = ranked.view(config["num_expert_group"], -1)
            best = groups.topk(2).values.sum(1).topk(config["topk_group"]).indices
            allowed = torch.full_like(groups, -torch.inf)
            allowed[best] = 0.0
            ids = (ranked + allowed.flatten()).topk(config["num_experts_per_token"]).indices
            weights = scores[row][ids] / scores[row][ids].sum() * config["routed_scaling_factor"]
            for weight, expert in zip(weights, ids.tolist(), strict=True):
                out[row] += weight * self.mlp(x[row], f"mlp.experts.{expert}")
        return out

    def mlp(self, x: torch.Tensor, prefix: str) -> torch.Tensor:
        gate, up = (x @ self.t[f"{prefix}.{name}_proj.weight"].T for name in ("gate", "up"))
        return gate * gate.sigmoid() * up @ self.t[f"{prefix}.down_proj.weight"].T


def test_drafts_of_the_module_equal_a_naive_reference(tmp_path: Path) -> None:
    folder = make_module(tmp_path)
    target = load(folder, torch.float64)
    assert_drafts_equal(folder, target, NaiveModule(folder, target).drafts)
