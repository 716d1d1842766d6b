"""Qwen4-Exp against transformers: logits and greedy text. Its prediction module, which transformers does not run,
against a naive one-request reference, alone and in an engine. `tests/engine/test_hybrid_families.py` has whole engines.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from outrider.drafters.draft_model import DraftModelNetwork
from outrider.layers import StepContext
from outrider.layers.ngram_embedding import NgramShape
from outrider.models.base import Model
from outrider.models.config import ConfigError
from outrider.models.loader import load_weights
from outrider.models.registry import build_model
from outrider.models.sources.folder import read_config
from outrider.models.sources.model_source import WeightError
from outrider.training.mtp import MTPTrainee
from outrider.training.settings import TrainingSettings
from tests.models.oracle import (
    STREAM_FAMILIES,
    DenseAttend,
    all_logits,
    assert_chunked_equals_whole,
    assert_greedy_text_equals,
    assert_logits_equal,
    load,
    make_folder,
    needs_kda,
    tokens_of,
)
from tests.models.prediction_modules import assert_drafts_equal, drafts_in_an_engine

Folders = Callable[[str], Path]
pytestmark = needs_kda
H, STREAMS, HEADS, KV, DIM, INDEX_HEADS, INDEX_DIM, TOP, EPS = 64, 4, 4, 2, 16, 16, 16, 3, 1e-6
QUICK = ["qwen4_exp", pytest.param("qwen4_exp_sigmoid", marks=pytest.mark.long)]
BLOCK, CHOSEN = 4, 3  # tokens of a block, and blocks that are chosen


@pytest.mark.parametrize("family", STREAM_FAMILIES)
def test_logits_equal_transformers(folder_of: Folders, family: str) -> None:
    assert_logits_equal(folder_of(family), count=60)


@pytest.mark.parametrize("family", QUICK)
def test_chunked_equals_whole(folder_of: Folders, family: str) -> None:
    assert_chunked_equals_whole(folder_of(family), 60, (1, 2, 15, 1, 1, 25, 3), 1e-10)


@pytest.mark.parametrize("family", QUICK)
def test_greedy_text_equals_transformers(folder_of: Folders, family: str) -> None:
    assert_greedy_text_equals(folder_of(family))


def test_no_ngram_reaches_beyond_an_end_of_text(folder_of: Folders) -> None:
    """Against transformers, with ends at neighbouring positions and at the first."""
    import transformers

    folder = folder_of("qwen4_exp")
    tokens = tokens_of(5, 30)
    tokens[[0, 7, 8, 15, 17]] = 2
    with torch.no_grad():
        wanted = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)(tokens[None]).logits[0]
    assert (all_logits(load(folder), tokens, (3, 5, 1, 8)) - wanted).abs().max() < 1e-4


def test_hashes_are_those_of_the_files(folder_of: Folders) -> None:
    stored = load_file(folder_of("qwen4_exp") / "model.safetensors")
    for number, layer in enumerate((0, 2)):
        shape = NgramShape.make(number, order=3, heads_per_order=4, least_rows=50, multiple=16, vocab_size=256,
                                seed=1234, end_id=2, vector_size=4)
        prefix = f"model.layers.{layer}.ple.ple_embedding"
        assert stored[f"{prefix}.layer_multipliers"].tolist() == list(shape.multipliers)
        assert stored[f"{prefix}.ngram_heads_vocab_sizes"].tolist() == list(shape.primes)
        assert sum(len(stored[f"{prefix}.ngram_embedding.shard_{i}.weight"]) for i in range(4)) == shape.num_rows


@pytest.mark.parametrize("part", ["layer_multipliers", "ngram_heads_vocab_sizes", "ngram_heads_offsets"])
def test_other_hashes_than_those_of_the_config_are_refused(folder_of: Folders, part: str) -> None:
    folder, name = folder_of("qwen4_exp"), f"model.layers.2.ple.ple_embedding.{part}"
    tensors = load_file(folder / "model.safetensors")
    tensors[name] = tensors[name] + torch.tensor([0] * (len(tensors[name]) - 1) + [2])
    model = build_model(read_config(folder), dtype=torch.float32, device="cpu")
    with pytest.raises(WeightError, match=f"tensor {name} does not hold the values .* from the config"):
        load_weights(model, tensors.items())


@pytest.mark.parametrize(("changes", "message"), [
    ({"indexer_compress_ratio": 3}, "indexer_compress_ratio=3"),
    ({"indexer_budget": 10}, "indexer_budget=10"),
    ({"indexer_budget": None}, "indexer_budget is missing"),
    ({"indexer_head_dim": 8}, "indexer_head_dim=8"),
    ({"indexer_kv_heads": 2}, "indexer_kv_heads=2"),
    ({"ple_layer_ids": [4]}, "ple_layer_ids=.*4 is not one"),
    ({"ple_embed_dim": 30}, "ple_embed_dim=30"),
    ({"eos_token_id": None}, "eos_token_id=None"),
    ({"attention_bias": True}, "attention_bias=True"),
    ({"output_gate_type": "tanh"}, "output_gate_type='tanh'"),
    ({"hc_count": 1}, "hc_count"),
])
def test_configs_that_cannot_be_served(folder_of: Folders, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build_model(read_config(folder_of("qwen4_exp")) | changes, dtype=torch.float32, device="meta")


# The multi-token-prediction module


def make_module(folder: Path) -> Path:
    """A folder with a module: random tensors like those of the last layer and of what is around it."""
    make_folder("qwen4_exp", folder)
    path = folder / "model.safetensors"
    tensors = load_file(path)
    shapes = {"mtp.layers.0." + name.removeprefix("model.layers.3."): tensor.shape for name, tensor in tensors.items()
              if name.startswith("model.layers.3.")}
    shapes |= {name.replace("model.", "mtp.", 1): tensor.shape for name, tensor in tensors.items()
               if name.startswith("model.hyper_connection_mixer.")}
    shapes |= {"mtp.pre_fc_norm_embedding.weight": torch.Size([H]),
               "mtp.pre_fc_norm_hidden.weight": torch.Size([STREAMS * H]),
               "mtp.fc_embedding.weight": torch.Size([H, H]), "mtp.fc_hidden.weight": torch.Size([H, H])}
    generator = torch.Generator().manual_seed(3)
    made = {name: torch.empty(shape).normal_(0.0, 0.2, generator=generator) for name, shape in shapes.items()}
    save_file(tensors | made, path)
    return folder


class NaiveModule:
    """One request, everything from scratch, written from the tensors."""

    def __init__(self, folder: Path, target: Model) -> None:
        self.target = target
        self.t = {name.removeprefix("mtp."): tensor.double() for name, tensor
                  in load_file(folder / "model.safetensors").items() if tensor.is_floating_point()}

    def drafts(self, known: Sequence[int], k: int) -> tuple[list[int], torch.Tensor]:
        """k drafts after `known`, and the logits of each."""
        history, attend = torch.tensor(known[:-1]), DenseAttend(self.target)
        context = StepContext(attend, torch.arange(len(history)), history=attend.history(history))
        streams = self.target.forward(history, context).before_norm
        chosen: list[int] = []
        logits = []
        for _ in range(k):
            made = self.module(torch.tensor([*known, *chosen][1:]), streams)
            final, _ = self.read(made, "hyper_connection_mixer")
            logits.append(final[-1] @ self.t["lm_head.weight"].T)
            chosen.append(int(logits[-1].argmax()))
            streams = torch.cat((streams, made[-1:]))
        return chosen, torch.stack(logits)

    def module(self, tokens: torch.Tensor, streams: torch.Tensor) -> torch.Tensor:
        embedded = self.norm(self.t["model.embed_tokens.weight"][tokens], "pre_fc_norm_embedding")
        each = self.norm(streams, "pre_fc_norm_hidden").view(-1, STREAMS, H) @ self.t["fc_hidden.weight"].T
        x = (each + (embedded @ self.t["fc_embedding.weight"].T)[:, None]).flatten(1)
        for gate, half in (("attn_hyper_connection", self.attention), ("mlp_hyper_connection", self.experts)):
            mixed, weights = self.read(x, f"layers.0.{gate}")
            x = x + torch.cat([half(mixed) * weights[:, i, None] for i in range(STREAMS)], dim=1)
        return x

    def norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return x / (x.square().mean(-1, keepdim=True) + EPS).sqrt() * (1 + self.t[f"{name}.weight"])

    def read(self, x: torch.Tensor, prefix: str) -> tuple[torch.Tensor, torch.Tensor]:
        gains = 1 + self.t[f"{prefix}.hc_norm.weight"].view(STREAMS, H)
        normed = torch.cat([part / (part.square().mean(-1, keepdim=True) + EPS).sqrt() * gain
                            for part, gain in zip(x.split(H, dim=1), gains, strict=True)], dim=1)
        low = normed @ self.t[f"{prefix}.input_mix_weight_down.weight"].T / STREAMS
        gates = (low * low.sigmoid() @ self.t[f"{prefix}.input_mix_weight_up.weight"].T).sigmoid()
        mixed = sum((gates * normed).split(H, dim=1)) / STREAMS
        if f"{prefix}.block_inject_weight.weight" not in self.t:
            return mixed, mixed[:, :0]
        return mixed, 2 * (normed @ self.t[f"{prefix}.block_inject_weight.weight"].T / STREAMS).sigmoid()

    def attention(self, x: torch.Tensor) -> torch.Tensor:
        prefix = "layers.0.self_attn"
        q, k, v = (x @ self.t[f"{prefix}.{name}_proj.weight"].T for name in "qkv")
        q, gate = q.view(-1, HEADS, 2, DIM).unbind(2)
        k, v = k.view(-1, KV, DIM), v.view(-1, KV, DIM)
        rows = torch.arange(len(x))
        q, k = self.rope(self.norm(q, f"{prefix}.q_norm"), rows), self.rope(self.norm(k, f"{prefix}.k_norm"), rows)
        made = (x @ self.t[f"{prefix}.indexer.index_qk_proj.weight"].T).view(-1, INDEX_HEADS + 1, INDEX_DIM)
        index_q = self.rope(self.norm(made[:, :-1], f"{prefix}.indexer.q_layernorm"), rows)
        out = torch.zeros_like(q)
        for row in range(len(x)):
            whole = (row + 1) // BLOCK
            seen = list(range(whole * BLOCK, row + 1))
            if whole:
                means = torch.stack([made[i * BLOCK : (i + 1) * BLOCK, -1].mean(0) for i in range(whole)])
                keys = self.rope(self.norm(means, f"{prefix}.indexer.k_layernorm")[:, None], BLOCK * rows[:whole])
                scores = (index_q[row] @ keys[:, 0].T).clamp_min(0).sum(0)
                best = scores.topk(min(CHOSEN, whole)).indices.tolist()
                seen += [at * BLOCK + i for at in best for i in range(BLOCK)]
            for head in range(HEADS):
                weights = (k[seen, head // 2] @ q[row, head] * DIM**-0.5).softmax(0)
                out[row, head] = weights @ v[seen, head // 2]
        return (out * gate.sigmoid()).flatten(1) @ self.t[f"{prefix}.o_proj.weight"].T

    def rope(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Row i is slot i + 1, at position i."""
        frequencies = 10000.0 ** (-torch.arange(0, DIM, 2, dtype=torch.float64) / DIM)
        angles = positions[:, None, None] * frequencies
        a, b = x.chunk(2, dim=-1)
        return torch.cat((a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()), dim=-1)

    def experts(self, x: torch.Tensor) -> torch.Tensor:
        prefix = "layers.0.mlp"
        scale = (x @ self.t[f"{prefix}.shared_expert_gate.weight"].T).sigmoid()
        out = self.mlp(x, f"{prefix}.shared_expert") * scale
        scores = (x @ self.t[f"{prefix}.gate.weight"].T).softmax(-1)
        for row in range(len(x)):
            weights, ids = scores[row].topk(TOP)
            for weight, expert in zip(weights / weights.sum(), ids.tolist(), strict=True):
                out[row] += weight * self.mlp(x[row], f"{prefix}.experts.{expert}")
        return out

    def mlp(self, x: torch.Tensor, prefix: str) -> torch.Tensor:
        gate, up = (x @ self.t[f"{prefix}.{name}_proj.weight"].T for name in ("gate", "up"))
        return gate * gate.sigmoid() * up @ self.t[f"{prefix}.down_proj.weight"].T


@pytest.fixture(scope="module")
def module_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_module(tmp_path_factory.mktemp("qwen4_exp_mtp"))


@torch.inference_mode()
def test_drafts_of_the_module_equal_a_naive_reference(module_folder: Path) -> None:
    """Behind contexts of which everything is chosen, and behind longer ones."""
    target = load(module_folder, torch.float64)
    contexts = ((1, 12, ()), (2, 30, (1, 5)))
    assert_drafts_equal(module_folder, target, NaiveModule(module_folder, target).drafts, contexts, least_distinct=3)


@torch.inference_mode()
def test_drafts_and_text_of_an_engine(module_folder: Path) -> None:
    """In ragged batches, in chunks, after preemptions and prefix hits, drafts are those of the naive reference, and the
    text is the one without drafts."""
    target = load(module_folder, torch.float64)
    proposed = drafts_in_an_engine(module_folder, target)
    reference = NaiveModule(module_folder, target)
    for known, drafts in proposed[::3]:
        assert drafts == reference.drafts(known, 3)[0]


def test_what_cannot_draft_for_or_from_it_is_refused_by_name(module_folder: Path) -> None:
    target = load(module_folder)
    with pytest.raises(ValueError, match=r"draft model \(Qwen4Exp\) has recurrent layers"):
        DraftModelNetwork(target, target.num_layers, target.vocab_size)
    with pytest.raises(ValueError, match="--method mtp cannot tune a module with latent attention or an indexer"):
        MTPTrainee.aux_layers_for(target, TrainingSettings())
