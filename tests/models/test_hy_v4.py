"""HY-V4: names of its tensors, how it rotates, what it refuses, and its prediction module against a naive reference.

`test_latent.py` compares logits with transformers over pages, `tests/drafters/test_latent_matrix.py` whole engines.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from outrider.models.config import ConfigError
from outrider.models.hy_v4 import HYV4, published_name
from outrider.models.mtp import build_mtp_modules
from outrider.models.registry import build_model
from outrider.models.sources.folder import read_config
from tests.drafters.latent_rig import FAMILIES
from tests.drafters.rig import DraftRig
from tests.engine.harness import Ask, greedy, prompt_of
from tests.models.oracle import hf_model, load, make_folder, tokens_of
from tests.models.paged import PagedModel, Piece
from tests.models.published import CHECKPOINTS

pytest.importorskip("transformers.models.hy_v4", reason="needs transformers with this family")
Folders = Callable[[str], Path]
K, LAYERS, HIDDEN, HEADS, ROPE, NOPE, INDEX_DIM = 3, 4, 64, 4, 16, 24, 32
MODULE = "model.mtp_layers.0"


def logits_of(model: Any, tokens: Sequence[int]) -> torch.Tensor:
    with torch.no_grad():
        return PagedModel(model).logits([Piece(0, [*tokens])])[0]


@torch.no_grad()
def test_logits_and_text_equal_transformers_in_float64(folder_of: Folders) -> None:
    """As far as transformers computes in float64: norms, streams, choices and routes stay in float32."""
    folder = folder_of("hy_v4")
    reference, model = hf_model(folder, torch.float64, experts_implementation="eager"), load(folder, torch.float64)
    tokens = tokens_of(1, 40).tolist()
    wanted = reference(torch.tensor([tokens]), use_cache=False).logits[0]
    assert (logits_of(model, tokens) - wanted).abs().max() < 2e-5
    paged, text, new = PagedModel(model), tokens[:10], tokens[:10]
    while len(text) < 30:
        new = [int(paged.logits([Piece(0, new)])[0][-1].argmax())]
        text = [*text, *new]
    for end in range(10, 30):
        assert text[end] == int(reference(torch.tensor([text[:end]]), use_cache=False).logits[0, -1].argmax())
    assert len(set(text[10:])) > 4, "a constant text would hide mistakes"


def rewrite(folder: Path, to: Path, rename: Callable[[str], str], config: dict[str, Any] | None = None,
            change: Callable[[str, torch.Tensor], torch.Tensor] = lambda _, tensor: tensor) -> Path:
    """A copy of a folder with other names and values of tensors, and other values of the config."""
    tensors = {rename(name): change(name, tensor) for name, tensor in load_file(folder / "model.safetensors").items()}
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, to / "model.safetensors")
    (to / "config.json").write_text(json.dumps(read_config(folder) | (config or {})))
    return to


def own_name(name: str) -> str:
    """The name of transformers' own module for a tensor of the published files."""
    for half, theirs in (("attn", "attn_hc"), ("mlp", "ffn_hc")):
        name = name.replace(f"hc_{half}_layer.hc_pre.hc_", f"{theirs}.")
    for published, own in (("hc_head.hc_head_", "hc_head.hc_"), ("linear_gate", "gate_proj"),
                           ("learnable_sink_param", "sinks")):
        name = name.replace(published, own)
    return name


def test_files_may_have_three_kinds_of_names(folder_of: Folders, tmp_path: Path) -> None:
    """Those that transformers writes, those of the published files, and those of transformers' modules."""
    folder, tokens = folder_of("hy_v4"), tokens_of(1, 20).tolist()
    wanted = logits_of(load(folder), tokens)
    names = {published_name(name) for name in load_file(folder / "model.safetensors")}
    for published in ("model.layers.0.hc_attn_layer.hc_pre.hc_fn", "model.layers.1.hc_mlp_layer.hc_pre.hc_scale",
                      "model.hc_head.hc_head_base", "model.layers.2.self_attn.linear_gate.weight",
                      "model.layers.2.self_attn.learnable_sink_param", "model.layers.0.mlp.gate_proj.weight",
                      "model.layers.1.mlp.shared_experts.gate_proj.weight", "model.layers.1.mlp.experts.gate_up_proj",
                      "model.layers.1.mlp.gate.e_score_correction_bias"):
        assert published in names
        assert published_name(published) == published_name(own_name(published)) == published
    for number, rename in enumerate((published_name, lambda name: own_name(published_name(name)))):
        (tmp_path / str(number)).mkdir()
        assert torch.equal(logits_of(load(rewrite(folder, tmp_path / str(number), rename)), tokens), wanted)


def test_published_files_rotate_pairs(folder_of: Folders, tmp_path: Path) -> None:
    """Weights with the rotating dimensions in pairs make the logits of the same weights with them in halves, which
    transformers has. Configs do not say which it is: without a key it is pairs."""
    folder, tokens = folder_of("hy_v4"), tokens_of(1, 40).tolist()

    def in_pairs(rows: torch.Tensor) -> torch.Tensor:
        return torch.stack(rows.chunk(2, dim=-2), dim=-2).flatten(-3, -2)

    def change(name: str, tensor: torch.Tensor) -> torch.Tensor:
        heads = {"q_b_proj.weight": HEADS, "kv_a_proj_with_mqa.weight": 1, "indexer.wq_b.weight": 16,
                 "indexer.wk.weight": 1, "indexer.k_norm.weight": 1, "indexer.k_norm.bias": 1}
        found = next((count for end, count in heads.items() if name.endswith(end)), None)
        if found is None:
            return tensor
        rows = tensor.view(found, tensor.shape[0] // found, -1)
        return torch.cat((rows[:, :-ROPE], in_pairs(rows[:, -ROPE:])), dim=1).view(tensor.shape)

    without = {"rope_interleave": None, "indexer_rope_interleave": None}
    pairs = load(rewrite(folder, tmp_path, lambda name: name, without, change))
    assert isinstance(pairs, HYV4) and pairs.shape.rotates_pairs and pairs.shape.index_rotates_pairs
    assert (logits_of(pairs, tokens) - logits_of(load(folder), tokens)).abs().max() < 1e-4
    (tmp_path / "config.json").write_text(json.dumps(read_config(folder)))
    assert (logits_of(load(tmp_path), tokens) - logits_of(load(folder), tokens)).abs().max() > 1e-2, "it must show"


@pytest.mark.parametrize(("changes", "message"), [
    ({"enable_ihc": False}, "enable_ihc=False"),
    ({"learnable_sink": False}, "learnable_sink=False"),
    ({"gated_mla": False}, "gated_mla=False"),
    ({"gating_type": "headwise"}, "gating_type='headwise'"),
    ({"tie_word_embeddings": True}, "tie_word_embeddings=True"),
    ({"hc_mult": 3}, "hc_mult=3"),
    ({"hc_mult": 1}, "hc_mult"),
    ({"layer_types": ["full_attention"] * 4}, "layer_types"),
    ({"indexer_types": ["shared", "full", "full", "full"]}, "indexer_types"),
    ({"mlp_layer_types": ["dense"]}, "mlp_layer_types"),
    ({"q_lora_rank": None}, "q_lora_rank"),
    ({"index_head_dim": 2}, "index_head_dim=2"),
    ({"hidden_act": "gelu"}, "hidden_act='gelu'"),
    ({"sliding_window": 4096}, "sliding_window"),
])
def test_configs_that_cannot_be_served(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build_model(FAMILIES["hy_v4"] | changes, dtype=torch.float32, device="meta")


def test_a_published_config_is_served() -> None:
    """Its model has as many numbers as the published files; layers choose positions as the config says, also where it
    leaves out what the makers' code fills in."""
    config = CHECKPOINTS["tencent/Hy4-preview"].config
    short = {key: value for key, value in config.items() if key not in ("indexer_types", "mlp_layer_types")}
    model, other = (build_model(values, dtype=torch.bfloat16, device="meta") for values in (config, short))
    assert isinstance(model, HYV4) and isinstance(other, HYV4)
    assert model.is_sparse == other.is_sparse == [False, *[True] * 77]
    assert model.index_kinds == other.index_kinds
    assert [i for i, kind in enumerate(model.index_kinds) if kind == "full"] == [0, *range(1, 78, 4)]
    modules = build_mtp_modules(model, first_layer=78, dtype=torch.bfloat16, device=torch.device("meta"))
    count = sum(slot.target.numel() for part in (model, *modules) for slot in part.weights().values())
    assert count == 779_960_992_733, "the module's are among them"


# The multi-token-prediction module


def make_checkpoint(folder: Path, **changes: Any) -> Any:
    """Save a model whose last layer becomes the module's, without its streams. Returns transformers' model of all."""
    kinds = ["full", "shared", "full", "shared", "full"]
    make_folder("hy_v4", folder, num_hidden_layers=LAYERS + 1, indexer_types=kinds)
    deeper = hf_model(folder, torch.float64, attn_implementation="eager", experts_implementation="eager")
    generator = torch.Generator().manual_seed(3)
    last = f"model.layers.{LAYERS}."
    tensors = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        name = published_name(name).replace(last, f"{MODULE}.")
        if not name.startswith(f"{MODULE}.hc_"):
            tensors[name] = tensor
    for name in ("enorm", "hnorm", "final_layernorm"):
        tensors[f"{MODULE}.{name}.weight"] = torch.empty(HIDDEN).normal_(1.0, 0.2, generator=generator)
    tensors[f"{MODULE}.eh_proj.weight"] = torch.empty(HIDDEN, 2 * HIDDEN).normal_(0.0, 0.2, generator=generator)
    save_file(tensors, folder / "model.safetensors")
    cut = {key: value[:LAYERS] for key, value in read_config(folder).items() if key.endswith("er_types")}
    config = read_config(folder) | cut | {"num_hidden_layers": LAYERS, "num_nextn_predict_layers": 1} | changes
    (folder / "config.json").write_text(json.dumps(config))
    return deeper


class NaiveModule:
    """One request, everything from scratch, by transformers' attention and experts."""

    def __init__(self, folder: Path, deeper: Any, target: Any) -> None:
        self.t = {name: tensor.double() for name, tensor in load_file(folder / "model.safetensors").items()}
        self.layer, self.rope, self.target = deeper.model.layers[LAYERS], deeper.model.rotary_emb, target

    def drafts(self, known: Sequence[int], k: int, keeps_choice: bool = False) -> list[int]:
        hidden = PagedModel(self.target).forward([Piece(0, list(known[:-1]))]).final
        chosen: list[int] = []
        kept: torch.Tensor | None = None
        for _ in range(k):
            output, choice = self.module(torch.tensor([*known, *chosen][1:]), hidden, kept)
            if keeps_choice and kept is None:
                kept = choice[:, -1:]
            chosen.append(int((output[-1] @ self.t["lm_head.weight"].T).argmax()))
            hidden = torch.cat((hidden, output[-1:]))
        return chosen

    def module(self, tokens: torch.Tensor, hidden: torch.Tensor,
               kept: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """Row i is at position i, where the first embedding is zero. kept: the choice of the last row."""
        embedded = self.t["model.embed_tokens.weight"][tokens]
        embedded[0] = 0.0
        parts = self.norm(embedded, "enorm"), self.norm(hidden, "hnorm")
        x = (torch.cat(parts, dim=1) @ self.t[f"{MODULE}.eh_proj.weight"].T)[None]
        mask = torch.full((len(tokens), len(tokens)), -torch.inf, dtype=torch.float64).triu(1)[None, None]
        indexer, more = self.layer.self_attn.indexer, {}
        if kept is not None:
            self.layer.self_attn.indexer, more = None, {"prev_topk_indices": kept.expand(1, len(tokens), -1)}
        attended, _, choice = self.layer.self_attn(
            self.layer.input_layernorm(x), self.rope(x, torch.arange(len(tokens))[None]), mask, **more)
        self.layer.self_attn.indexer = indexer
        x = x + attended
        x = x + self.layer.mlp(self.layer.post_attention_layernorm(x))
        return self.norm(x[0], "final_layernorm"), choice

    def norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * self.t[f"{MODULE}.{name}.weight"]


@torch.no_grad()
@pytest.mark.parametrize("keeps_choice", [False, pytest.param(True, marks=pytest.mark.long)])
def test_drafts_equal_a_naive_reference(tmp_path: Path, keeps_choice: bool) -> None:
    """Ragged, padded, in chunks, with a prefix hit and preemptions; contexts below and above top-k."""
    deeper = make_checkpoint(tmp_path, index_share_for_mtp_iteration=keeps_choice)
    target = load(tmp_path, torch.float64)
    first = prompt_of(1, 37)
    asks = [Ask(first, greedy(6)), Ask(prompt_of(2, 4), greedy(7)), Ask(prompt_of(3, 21), greedy(5))]
    speculative = {"method": "mtp", "model": str(tmp_path), "num_speculative_tokens": K, "auto": False}
    with DraftRig(target, speculative_config=speculative, max_num_batched_tokens=24, pad_requests=(4,),
                  pad_tokens=(30,)) as rig:
        rig.run(asks)
        rig.run([Ask([*first[:32], *prompt_of(5, 3)], greedy(4))])
        assert rig.scheduler.cache.stats.hit_tokens == 32
        rig.run([Ask(prompt_of(6, 19), greedy(8))], after_step=rig.preempt)
        assert rig.scheduler.stats.num_preemptions > 0
    reference, seen, differs = NaiveModule(tmp_path, deeper, target), set(), 0
    for proposal in rig.proposals[:: 1 if keeps_choice else 3]:
        count = len(proposal.drafts)
        assert list(proposal.drafts) == reference.drafts(proposal.known, K, keeps_choice)[:count]
        seen |= set(proposal.drafts)
        differs += keeps_choice and list(proposal.drafts) != reference.drafts(proposal.known, K)[:count]
    assert len(rig.proposals) > 15 and len(seen) > 8, "constant drafts would hide mistakes"
    assert bool(differs) == keeps_choice, "keeping the choice must show"


def test_modules_that_cannot_be_served_are_refused(tmp_path: Path) -> None:
    for changes, says in (({"num_nextn_predict_layers": 2, "index_share_for_mtp_iteration": True},
                           "index_share_for_mtp_iteration=True is not supported; supported: False"),
                          ({"num_nextn_predict_layers": 0}, "num_nextn_predict_layers=0: .* no multi-token")):
        target = build_model(FAMILIES["hy_v4"] | changes, dtype=torch.float64, device="cpu")
        with pytest.raises(ConfigError, match=says):
            build_mtp_modules(target, first_layer=4, dtype=torch.float64, device=torch.device("cpu"))
