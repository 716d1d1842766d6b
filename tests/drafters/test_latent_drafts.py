"""Drafts of DeepSeek's and GLM's MTP modules in whole engines, against transformers' own layers, one request at a time.

A module is one more layer of a model that transformers saves: the checkpoint says that it has fewer layers, and holds
each module's norms and projection beside it. The reference computes everything anew for every draft.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from outrider.models.config import ConfigError
from outrider.models.mtp import build_mtp_modules
from outrider.models.registry import build_model
from outrider.models.sources.folder import read_config
from tests.drafters.latent_rig import FAMILIES
from tests.drafters.rig import DraftRig
from tests.engine.harness import Ask, greedy, prompt_of
from tests.models.oracle import hf_model, load, make_folder
from tests.models.paged import PagedModel, Piece

K, LAYERS, HIDDEN = 3, 4, 64


def make_checkpoint(family: str, folder: Path, num_modules: int = 1) -> Path:
    kinds = ["full", "shared", "full", "shared", *["full"] * num_modules]
    more = {"indexer_types": kinds} if family == "glm_moe_dsa" else {}
    make_folder(family, folder, num_hidden_layers=LAYERS + num_modules, **more)
    generator = torch.Generator().manual_seed(3)

    def values(mean: float, *shape: int) -> torch.Tensor:
        return torch.empty(shape).normal_(mean, 0.2, generator=generator)

    tensors = load_file(folder / "model.safetensors")
    for module in (f"model.layers.{LAYERS + i}" for i in range(num_modules)):
        for name in ("enorm", "hnorm", "shared_head.norm"):
            tensors[f"{module}.{name}.weight"] = values(1.0, HIDDEN)
        tensors[f"{module}.eh_proj.weight"] = values(0.0, HIDDEN, 2 * HIDDEN)
        tensors[f"{module}.embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
        tensors[f"{module}.shared_head.head.weight"] = tensors["lm_head.weight"].clone()
    save_file(tensors, folder / "model.safetensors")
    return folder


def without_modules(folder: Path, **changes: Any) -> None:
    config = read_config(folder)
    for key in ("mlp_layer_types", "layer_types", "indexer_types"):
        if config.get(key) is not None:
            config[key] = config[key][:LAYERS]
    config |= {"num_hidden_layers": LAYERS, "num_nextn_predict_layers": 1} | changes
    (folder / "config.json").write_text(json.dumps(config))


class Naive:
    """One request, everything from scratch, by transformers' layer."""

    def __init__(self, folder: Path, deeper: Any, target: Any, keeps_choice: bool = False,
                 num_modules: int = 1) -> None:
        self.keeps_choice, self.num_modules = keeps_choice, num_modules
        self.t = {name: tensor.double() for name, tensor in load_file(folder / "model.safetensors").items()}
        self.rope, self.target = deeper.model.rotary_emb, target
        self.layers = deeper.model.layers[LAYERS:]

    def drafts(self, known: Sequence[int], k: int, first_slot: int = 1) -> list[int]:
        """Draft i comes from module i. Index q of module i joins what the module before it made at q, or the target's
        hidden state, with token q + 1 + i. The last module also continues its own drafts. `first_slot`: the first one
        that module 0 sees; every module sees the indices from there on."""
        self.first_index = first_slot - 1
        hidden = PagedModel(self.target).forward([Piece(0, list(known[:-1]))]).final
        chosen: list[int] = []
        self.kept: torch.Tensor | None = None
        for draft in range(k):
            number = min(draft, self.num_modules - 1)
            output = self.module(torch.tensor([*known, *chosen][1 + number :]), hidden, number)
            chosen.append(int((output[-1] @ self.t["lm_head.weight"].T).argmax()))
            hidden = output if draft + 1 < self.num_modules else torch.cat((hidden, output[-1:]))
        return chosen

    def module(self, tokens: torch.Tensor, hidden: torch.Tensor, number: int) -> torch.Tensor:
        """Row i is at position i, where the first embedding is zero."""
        self.layer, self.name = self.layers[number], f"model.layers.{LAYERS + number}"
        embedded = self.t["model.embed_tokens.weight"][tokens]
        embedded[0] = 0.0
        parts = self.norm(embedded, "enorm"), self.norm(hidden, "hnorm")
        x = (torch.cat(parts, dim=1) @ self.t[f"{self.name}.eh_proj.weight"].T)[None]
        positions = torch.arange(len(tokens))[None]
        mask = torch.full((len(tokens), len(tokens)), -torch.inf, dtype=torch.float64).triu(1)[None, None]
        mask[..., self.first_index :, : self.first_index] = -torch.inf
        options = {"attention_mask": mask, "position_ids": positions, "position_embeddings": self.rope(x, positions)}
        if self.keeps_choice:
            return self.norm(self.with_kept_choice(x, options), "shared_head.norm")
        out = self.layer(x, **options)
        return self.norm((out[0] if isinstance(out, tuple) else out)[0], "shared_head.norm")

    def with_kept_choice(self, x: torch.Tensor, options: dict[str, Any]) -> torch.Tensor:
        """The last row takes the choice that the last row of the first pass made. The others' choices do not matter:
        a module of one layer keeps nothing that depends on them."""
        indexer = self.layer.self_attn.indexer
        if self.kept is not None:
            self.layer.self_attn.indexer = None
            options = options | {"prev_topk_indices": self.kept.expand(1, x.shape[1], -1)}
        out, choice = self.layer(x, **options)
        self.layer.self_attn.indexer = indexer
        if self.kept is None:
            count = min(choice.shape[2], x.shape[1])
            self.kept = choice[:, -1:, :count]
        return out[0]

    def norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        eps = self.target.sizes.eps
        return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * self.t[f"{self.name}.{name}.weight"]


@pytest.mark.parametrize(
    ("family", "keeps_choice"),
    [("deepseek_v3", False), ("deepseek_v32", False), ("glm_moe_dsa", False), ("glm_moe_dsa", True)],
)
def test_drafts_equal_a_naive_reference(family: str, keeps_choice: bool, tmp_path: Path) -> None:
    """Ragged, padded, in chunks, with a prefix hit; contexts below and above top-k."""
    folder = make_checkpoint(family, tmp_path)
    deeper = hf_model(folder, torch.float64, attn_implementation="eager", experts_implementation="eager")
    without_modules(folder, index_share_for_mtp_iteration=keeps_choice)
    target = load(folder, torch.float64)
    reference = Naive(folder, deeper, target, keeps_choice)
    first = prompt_of(1, 37)
    asks = [Ask(first, greedy(6)), Ask(prompt_of(2, 4), greedy(7)), Ask(prompt_of(3, 21), greedy(5))]
    speculative = {"method": "mtp", "model": str(folder), "num_speculative_tokens": K, "auto": False}
    with DraftRig(target, speculative_config=speculative, max_num_batched_tokens=24, pad_requests=(4,),
                  pad_tokens=(30,)) as rig:
        rig.run(asks)
        rig.run([Ask([*first[:32], *prompt_of(5, 3)], greedy(4))])
        assert rig.scheduler.cache.stats.hit_tokens == 32
    seen = set()
    with torch.no_grad():
        for proposal in rig.proposals:
            assert list(proposal.drafts) == reference.drafts(proposal.known, K)[: len(proposal.drafts)]
            seen |= set(proposal.drafts)
        anew = Naive(folder, deeper, target)
        differs = [list(proposal.drafts) != anew.drafts(proposal.known, K)[: len(proposal.drafts)]
                   for proposal in rig.proposals if keeps_choice]
    assert any(differs) == keeps_choice, "keeping the choice must show"
    assert len(rig.proposals) > 15 and len(seen) > 8, "constant drafts would hide mistakes"


@pytest.mark.parametrize(("family", "num_modules"), [("deepseek_v32", 2), ("deepseek_v3", 3)])
def test_several_modules_make_one_draft_each(family: str, num_modules: int, tmp_path: Path) -> None:
    """And the last one those beyond. Ragged, padded, in chunks, with a prefix hit and preemptions; contexts below and
    above top-k."""
    folder = make_checkpoint(family, tmp_path, num_modules)
    deeper = hf_model(folder, torch.float64, attn_implementation="eager", experts_implementation="eager")
    without_modules(folder, num_nextn_predict_layers=num_modules)
    target = load(folder, torch.float64)
    first = prompt_of(1, 37)
    asks = [Ask(first, greedy(6)), Ask(prompt_of(2, 1), greedy(6)), Ask(prompt_of(3, 21), greedy(5))]
    speculative = {"method": "mtp", "model": str(folder), "num_speculative_tokens": K, "auto": False}
    with DraftRig(target, speculative_config=speculative, max_num_batched_tokens=24, pad_requests=(4,),
                  pad_tokens=(30,)) as rig:
        assert [placed.part.shape for placed in rig.step.pool.layout.page_parts] == [(num_modules, HIDDEN), ()]
        rig.run(asks)
        rig.run([Ask([*first[:32], *prompt_of(5, 3)], greedy(4))])
        assert rig.scheduler.cache.stats.hit_tokens == 32
        rig.run([Ask(prompt_of(6, 19), greedy(8))], after_step=rig.preempt)
        assert rig.scheduler.stats.num_preemptions > 0
    reference, alone = (Naive(folder, deeper, target, num_modules=count) for count in (num_modules, 1))
    seen, differs = set(), 0
    with torch.no_grad():
        for proposal in rig.proposals:
            assert list(proposal.drafts) == reference.drafts(proposal.known, K)[: len(proposal.drafts)]
            seen |= set(proposal.drafts)
            differs += list(proposal.drafts) != alone.drafts(proposal.known, K)[: len(proposal.drafts)]
    assert len(rig.proposals) > 15 and len(seen) > 8, "constant drafts would hide mistakes"
    assert differs > 5, "the later modules must show"


def test_several_modules_after_cold_steps(tmp_path: Path) -> None:
    """Later modules need a token more each before they are valid again."""
    folder = make_checkpoint("deepseek_v3", tmp_path, 3)
    deeper = hf_model(folder, torch.float64, attn_implementation="eager", experts_implementation="eager")
    without_modules(folder, num_nextn_predict_layers=3)
    target, ask = load(folder, torch.float64), Ask(prompt_of(11, 70), greedy(8))
    speculative = {"method": "mtp", "model": str(folder), "num_speculative_tokens": K, "auto": False}
    with DraftRig(target, speculative_config=speculative, max_num_batched_tokens=16,
                  propose_at=lambda step: 0 if step < 2 or step in (7, 8) else 3) as rig:
        rig.run([ask])
        lengths = [len(proposal.known) for proposal in rig.proposals]
        resumed = next(n for before, n in zip(lengths, lengths[1:], strict=False) if n - before > 2)
        firsts = [33 if n < resumed else resumed - 1 for n in lengths]
        made = [(p.known, p.drafts, first) for p, first in zip(rig.proposals, firsts, strict=True)]
        rig.proposals.clear()
        (output,) = rig.run([ask])
        assert output.metrics.num_cached_tokens == 64 and rig.num_cold >= 4
        # In pages that were hit, outputs of module 0 have seen more than this request does. Its own cache has not.
        made += [(p.known, p.drafts[:1], 48) for p in rig.proposals]
    reference, differs = Naive(folder, deeper, target, num_modules=3), 0
    with torch.no_grad():
        for known, drafts, first_slot in made:
            assert list(drafts) == reference.drafts(known, K, first_slot)[: len(drafts)]
            differs += list(drafts) != reference.drafts(known, K)[: len(drafts)]
    assert len(made) > len(firsts) > 3 and differs > 2, "what is not seen must show"


def test_modules_that_cannot_be_served_are_refused() -> None:
    config = FAMILIES["deepseek_v32"]
    for changes, says in (({"num_nextn_predict_layers": 2, "index_share_for_mtp_iteration": True},
                           "index_share_for_mtp_iteration=True is not supported; supported: False"),
                          ({"num_nextn_predict_layers": 0}, "num_nextn_predict_layers=0: .* no multi-token")):
        target = build_model(config | changes, dtype=torch.float64, device="cpu")
        with pytest.raises(ConfigError, match=says):
            build_mtp_modules(target, first_layer=3, dtype=torch.float64, device=torch.device("cpu"))
