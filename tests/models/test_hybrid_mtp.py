"""MTP modules of the hybrid families, read from the target's own checkpoint, against a naive one-request reference.

The reference is written from the tensors and computes everything anew for every draft, in float64; transformers runs
none of these modules.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from outrider.layers import StepContext
from outrider.models.base import Model
from outrider.models.config import ConfigError
from outrider.models.mtp import build_mtp_modules
from outrider.models.sources.folder import read_config
from tests.models.oracle import DenseAttend, load, make_folder
from tests.models.prediction_modules import assert_drafts_equal, head_of

H, HEADS, KV, DIM = 64, 4, 2, 16  # of the tiny families
EXPERTS, TOP, WIDTH, SHARED, DENSE = 8, 3, 24, 40, 128
Shapes = dict[str, tuple[int, ...]]
# family -> pattern of the module's layers; one layer of attention and feed-forward for Qwen
CASES = {
    "nemotron_h": "*E",
    "nemotron_h_latent": "*-E*",
    "qwen3_next": "",
    "qwen3_5": "",
    "qwen3_5_moe": "",
}


def attention_shapes(prefix: str, gates: int) -> Shapes:
    q = HEADS * DIM
    return {
        f"{prefix}.q_proj.weight": (gates * q, H),
        f"{prefix}.k_proj.weight": (KV * DIM, H),
        f"{prefix}.v_proj.weight": (KV * DIM, H),
        f"{prefix}.o_proj.weight": (H, q),
    }


def qwen_shapes(family: str) -> Shapes:
    norms = ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm", "layers.0.input_layernorm",
             "layers.0.post_attention_layernorm")
    shapes: Shapes = {f"mtp.{name}.weight": (H,) for name in norms} | {"mtp.fc.weight": (H, 2 * H)}
    layer = "mtp.layers.0"
    shapes |= attention_shapes(f"{layer}.self_attn", gates=2)
    shapes |= {f"{layer}.self_attn.{name}_norm.weight": (DIM,) for name in "qk"}
    if family == "qwen3_5":
        return shapes | mlp_shapes(f"{layer}.mlp", DENSE)
    shapes |= mlp_shapes(f"{layer}.mlp.shared_expert", SHARED) | {f"{layer}.mlp.shared_expert_gate.weight": (1, H)}
    # All experts in one tensor for each projection, as some published files have them.
    fused = {f"{layer}.mlp.experts.gate_up_proj": (EXPERTS, 2 * WIDTH, H),
             f"{layer}.mlp.experts.down_proj": (EXPERTS, H, WIDTH)}
    return shapes | fused | {f"{layer}.mlp.gate.weight": (EXPERTS, H)}


def mlp_shapes(prefix: str, width: int) -> Shapes:
    ups: Shapes = {f"{prefix}.{name}_proj.weight": (width, H) for name in ("gate", "up")}
    return ups | {f"{prefix}.down_proj.weight": (H, width)}


def nemotron_shapes(family: str, pattern: str) -> Shapes:
    first, last = "mtp.layers.0", f"mtp.layers.{len(pattern) - 1}"
    shapes: Shapes = {f"{first}.{name}.weight": (H,) for name in ("enorm", "hnorm")}
    shapes |= {f"{first}.eh_proj.weight": (H, 2 * H), f"{last}.final_layernorm.weight": (H,)}
    is_latent = family == "nemotron_h_latent"
    for index, kind in enumerate(pattern):
        shapes[f"mtp.layers.{index}.norm.weight"] = (H,)
        mixer = f"mtp.layers.{index}.mixer"
        if kind == "*":
            shapes |= attention_shapes(mixer, gates=1)
        elif kind == "-":
            shapes |= plain_shapes(mixer, DENSE, H, has_bias=is_latent)
        else:
            inner = 32 if is_latent else H
            for expert in range(EXPERTS):
                shapes |= plain_shapes(f"{mixer}.experts.{expert}", WIDTH, inner, has_bias=False)
            shapes |= plain_shapes(f"{mixer}.shared_experts", SHARED, H, has_bias=is_latent)
            shapes |= {f"{mixer}.gate.weight": (EXPERTS, H), f"{mixer}.gate.e_score_correction_bias": (EXPERTS,)}
            if is_latent:
                first, second = f"{mixer}.fc1_latent_proj", f"{mixer}.fc2_latent_proj"
                shapes |= {f"{first}.weight": (inner, H), f"{first}.bias": (inner,)}
                shapes |= {f"{second}.weight": (H, inner), f"{second}.bias": (H,)}
    return shapes


def plain_shapes(prefix: str, width: int, size: int, has_bias: bool) -> Shapes:
    shapes: Shapes = {f"{prefix}.up_proj.weight": (width, size), f"{prefix}.down_proj.weight": (size, width)}
    return shapes | {f"{prefix}.up_proj.bias": (width,), f"{prefix}.down_proj.bias": (size,)} if has_bias else shapes


def make_checkpoint(family: str, pattern: str, folder: Path) -> Path:
    """The target's folder, the module's tensors beside its own."""
    make_folder(family, folder)
    shapes = nemotron_shapes(family, pattern) if pattern else qwen_shapes(family)
    generator = torch.Generator().manual_seed(3)
    mean = 0.0 if not pattern else 1.0  # Qwen's norms scale by 1 + weight
    tensors = {
        name: torch.empty(shape).normal_(mean if "norm" in name else 0.0, 0.2, generator=generator)
        for name, shape in shapes.items()
    }
    path = folder / "model.safetensors"
    save_file(load_file(path) | tensors, path)
    config = read_config(folder)
    if pattern:
        config |= {"num_nextn_predict_layers": 1, "mtp_layers_block_type": None, "mtp_hybrid_override_pattern": pattern}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


class Naive:
    """One request, everything from scratch."""

    def __init__(self, folder: Path, target: Model, pattern: str) -> None:
        self.t = {name: tensor.double() for name, tensor in load_file(folder / "model.safetensors").items()}
        self.config: dict[str, Any] = read_config(folder)
        self.target, self.pattern = target, pattern
        self.offset, self.eps = (0.0, 1e-5) if pattern else (1.0, 1e-6)

    def drafts(self, known: Sequence[int], k: int) -> tuple[list[int], torch.Tensor]:
        """k drafts after `known`, and the logits of each."""
        history = torch.tensor(known[:-1])
        hidden = self.target.forward(history, StepContext(DenseAttend(self.target), torch.arange(len(history)))).final
        chosen: list[int] = []
        logits = []
        for _ in range(k):
            tokens = torch.tensor([*known, *chosen][1:])
            output = self.module(tokens, hidden)
            logits.append(output[-1] @ self.t["lm_head.weight"].T)
            chosen.append(int(logits[-1].argmax()))
            hidden = torch.cat((hidden, output[-1:]))
        return chosen, torch.stack(logits)

    def module(self, tokens: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        if not self.pattern:
            embedded = self.t["model.embed_tokens.weight"][tokens]
            parts = self.norm(embedded, "mtp.pre_fc_norm_embedding"), self.norm(hidden, "mtp.pre_fc_norm_hidden")
            x = torch.cat(parts, dim=1) @ self.t["mtp.fc.weight"].T
            x = x + self.attention(self.norm(x, "mtp.layers.0.input_layernorm"), "mtp.layers.0.self_attn")
            x = x + self.gated_mlp_or_moe(self.norm(x, "mtp.layers.0.post_attention_layernorm"), "mtp.layers.0.mlp")
            return self.norm(x, "mtp.norm")
        embedded = self.t["backbone.embeddings.weight"][tokens]
        parts = self.norm(embedded, "mtp.layers.0.enorm"), self.norm(hidden, "mtp.layers.0.hnorm")
        x = torch.cat(parts, dim=1) @ self.t["mtp.layers.0.eh_proj.weight"].T
        for index, kind in enumerate(self.pattern):
            layer = f"mtp.layers.{index}"
            mixer = {"*": self.attention, "-": self.plain, "E": self.plain_moe}[kind]
            x = x + mixer(self.norm(x, f"{layer}.norm"), f"{layer}.mixer")
        return self.norm(x, f"{layer}.final_layernorm")

    def norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return x / (x.square().mean(-1, keepdim=True) + self.eps).sqrt() * (self.t[f"{name}.weight"] + self.offset)

    def attention(self, x: torch.Tensor, prefix: str) -> torch.Tensor:
        q, k, v = (x @ self.t[f"{prefix}.{name}_proj.weight"].T for name in "qkv")
        k, v = k.view(-1, KV, DIM), v.view(-1, KV, DIM)
        gate = None
        if self.pattern:
            q = q.view(-1, HEADS, DIM)
        else:
            q, gate = q.view(-1, HEADS, 2, DIM).unbind(2)
            q = self.rope(self.norm(q, f"{prefix}.q_norm"))
            k = self.rope(self.norm(k, f"{prefix}.k_norm"))
        out = torch.zeros_like(q)
        for row in range(len(x)):
            for head in range(HEADS):
                keys, values = k[: row + 1, head // 2], v[: row + 1, head // 2]
                out[row, head] = (keys @ q[row, head] * DIM**-0.5).softmax(0) @ values
        out = out if gate is None else out * gate.sigmoid()
        return out.flatten(1) @ self.t[f"{prefix}.o_proj.weight"].T

    def rope(self, x: torch.Tensor) -> torch.Tensor:
        """Row i is slot i + 1, at position i; a quarter of each head turns."""
        turning = DIM // 4
        frequencies = 10000.0 ** (-torch.arange(0, turning, 2, dtype=torch.float64) / turning)
        angles = torch.arange(len(x))[:, None, None] * frequencies
        a, b = x[..., : turning // 2], x[..., turning // 2 : turning]
        turned = (a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin())
        return torch.cat((*turned, x[..., turning:]), dim=-1)

    def gated_mlp_or_moe(self, x: torch.Tensor, prefix: str) -> torch.Tensor:
        if f"{prefix}.gate.weight" not in self.t:
            return self.gated(x, prefix)
        scale = (x @ self.t[f"{prefix}.shared_expert_gate.weight"].T).sigmoid()
        out = self.gated(x, f"{prefix}.shared_expert") * scale
        scores = (x @ self.t[f"{prefix}.gate.weight"].T).softmax(-1)
        for row in range(len(x)):
            weights, ids = scores[row].topk(TOP)
            for weight, expert in zip(weights / weights.sum(), ids.tolist(), strict=True):
                gate, up = (self.t[f"{prefix}.experts.gate_up_proj"][expert] @ x[row]).chunk(2)
                out[row] += weight * (self.t[f"{prefix}.experts.down_proj"][expert] @ (gate * gate.sigmoid() * up))
        return out

    def gated(self, x: torch.Tensor, prefix: str) -> torch.Tensor:
        gate, up = (x @ self.t[f"{prefix}.{name}_proj.weight"].T for name in ("gate", "up"))
        return (gate * gate.sigmoid() * up) @ self.t[f"{prefix}.down_proj.weight"].T

    def linear(self, x: torch.Tensor, prefix: str) -> torch.Tensor:
        return x @ self.t[f"{prefix}.weight"].T + self.t.get(f"{prefix}.bias", torch.tensor(0.0))

    def plain(self, x: torch.Tensor, prefix: str) -> torch.Tensor:
        return self.linear(self.linear(x, f"{prefix}.up_proj").clamp_min(0) ** 2, f"{prefix}.down_proj")

    def plain_moe(self, x: torch.Tensor, prefix: str) -> torch.Tensor:
        config = self.config
        is_latent = config["moe_latent_size"] is not None
        scores = (x @ self.t[f"{prefix}.gate.weight"].T).sigmoid()
        inner = self.linear(x, f"{prefix}.fc1_latent_proj") if is_latent else x
        out = torch.zeros_like(inner)
        for row in range(len(x)):
            ranked = scores[row] + self.t[f"{prefix}.gate.e_score_correction_bias"]
            groups = ranked.view(config["n_group"], -1)
            best = groups.topk(2).values.sum(1).topk(config["topk_group"]).indices
            allowed = torch.full_like(groups, -torch.inf)
            allowed[best] = 0.0
            ids = (ranked + allowed.flatten()).topk(TOP).indices
            weights = scores[row][ids] / (scores[row][ids].sum() if config["norm_topk_prob"] else 1.0)
            for weight, expert in zip(weights * config["routed_scaling_factor"], ids.tolist(), strict=True):
                out[row] += weight * self.plain(inner[row], f"{prefix}.experts.{expert}")
        routed = self.linear(out, f"{prefix}.fc2_latent_proj") if is_latent else out
        return routed + self.plain(x, f"{prefix}.shared_experts")


@pytest.mark.parametrize(("family", "pattern"), CASES.items(), ids=CASES)
def test_drafts_equal_a_naive_reference(family: str, pattern: str, tmp_path: Path) -> None:
    folder = make_checkpoint(family, pattern, tmp_path)
    target = load(folder, torch.float64)
    assert_drafts_equal(folder, target, Naive(folder, target, pattern).drafts)


def test_attention_of_a_module_is_numbered_after_the_targets_layers(tmp_path: Path) -> None:
    folder = make_checkpoint("nemotron_h_latent", "*-E*", tmp_path)
    target = load(folder, torch.float64)
    head = head_of(folder, target)
    assert [layer.index for layer in head.attention_layers] == [5, 6]
    assert [claim.layer for claim in head.cache_layers()] == [5, 6]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mtp_hybrid_override_pattern": "M*"}, "no recurrent layers"),
        ({"mtp_hybrid_override_pattern": "-E"}, "must have an attention layer"),
        ({"num_nextn_predict_layers": 2}, "num_nextn_predict_layers=2"),
        ({"num_nextn_predict_layers": 0}, "num_nextn_predict_layers=0"),
    ],
)
def test_modules_that_cannot_be_served(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    folder = make_checkpoint("nemotron_h", "*E", tmp_path)
    config = read_config(folder) | changes
    (folder / "config.json").write_text(json.dumps(config))
    target = load(folder)
    with pytest.raises(ConfigError, match=message):
        build_mtp_modules(target, first_layer=6, dtype=torch.float32, device=torch.device("cpu"))
