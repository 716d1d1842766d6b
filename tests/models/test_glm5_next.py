"""GLM5-Next against transformers: logits and greedy text. Its prediction module, which transformers does not run,
against a naive one-request reference, alone and in an engine. `tests/engine/test_hybrid_families.py` has whole engines.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from outrider.config import EngineConfig
from outrider.drafters.draft_model import DraftModelNetwork
from outrider.layers import KDAShape, StepContext
from outrider.mixers.latent.latent_mixer import step_offsets
from outrider.models.base import Model
from outrider.models.config import ConfigError
from outrider.models.glm5_next import Glm5Next
from outrider.models.registry import build_model
from outrider.models.sources.folder import read_config
from outrider.runner.target import with_index_keys
from outrider.training.mtp import MTPTrainee
from outrider.training.settings import TrainingSettings
from tests.models.double_oracle import DoubleOracle
from tests.models.oracle import (
    POOLED_FAMILIES,
    DenseAttend,
    all_logits,
    assert_chunked_equals_whole,
    assert_greedy_text_equals,
    assert_logits_equal,
    load,
    make_folder,
    needs_kda,
)
from tests.models.prediction_modules import assert_drafts_equal, drafts_in_an_engine

Folders = Callable[[str], Path]
pytestmark = needs_kda
H, HEADS, NOPE, VALUE, INDEX_HEADS, INDEX_DIM, TOP, EPS, LIMIT = 64, 4, 24, 20, 16, 32, 3, 1e-5, 1.0
BLOCK, CHOSEN = 4, 3  # tokens of a block, and blocks that are chosen
QUICK = ["glm5_next", pytest.param("glm5_next_free", marks=pytest.mark.long)]


@pytest.mark.parametrize("family", POOLED_FAMILIES)
def test_logits_equal_transformers(folder_of: Folders, family: str) -> None:
    assert_logits_equal(folder_of(family), count=60)


@pytest.mark.parametrize("family", QUICK)
def test_chunked_equals_whole(folder_of: Folders, family: str) -> None:
    assert_chunked_equals_whole(folder_of(family), 60, (1, 2, 15, 1, 1, 25, 3), 1e-10)


@pytest.mark.parametrize("family", QUICK)
def test_greedy_text_equals_transformers(folder_of: Folders, family: str) -> None:
    assert_greedy_text_equals(folder_of(family))


@pytest.mark.parametrize("family", POOLED_FAMILIES)
def test_logits_of_text_that_repeats_itself_equal_transformers(folder_of: Folders, family: str) -> None:
    """Its blocks have equal scores, of which the earliest are chosen. A float32 score would choose others."""
    tokens = torch.tensor([7, 8, 9, 10] * 9)
    logits = all_logits(load(folder_of(family), torch.float64), tokens)
    assert (logits - DoubleOracle(folder_of(family)).logits(tokens.tolist())).abs().max() < 1e-10


@pytest.mark.parametrize(("changes", "message"), [
    ({"index_kpool": 3}, "index_kpool=3"),
    ({"index_topk": 10}, "index_topk=10"),
    ({"index_topk": None}, "index_topk is missing"),
    ({"index_kpool_always_select_tail": False}, "index_kpool_always_select_tail=False"),
    ({"index_kpool_compress": False}, "index_kpool_compress=False"),
    ({"indexer_types": ["full", "full", "full", "shared"]}, "indexer_types=.*layer 3 would reuse the positions"),
    ({"layer_types": ["linear_attention"] * 3}, "layer_types=.*each of the 4 layers"),
    ({"linear_attn_config": {"kda_layers": [1, 2]}}, "kda_layers=.*it contradicts layer_types"),
    ({"qk_rope_head_dim": 16}, "qk_rope_head_dim=16"),
    ({"q_lora_rank": None}, "q_lora_rank is missing"),
    ({"attention_bias": True}, "attention_bias=True"),
    ({"swiglu_limit": 0.0}, "swiglu_limit=0.0"),
    ({"swiglu_limit": "high"}, "swiglu_limit"),
    ({"hc_mult": 1}, "hc_mult"),
    ({"mhc": False}, "mhc=False"),
    ({"scoring_func": "softmax"}, "scoring_func='softmax'"),
    ({"tie_word_embeddings": None, "moe_layer_freq": 2}, "moe_layer_freq=2"),
])
def test_configs_that_cannot_be_served(folder_of: Folders, changes: dict[str, Any], message: str) -> None:
    config = read_config(folder_of("glm5_next"))
    with pytest.raises(ConfigError, match=message):
        build_model(config | {"text_config": config["text_config"] | changes}, dtype=torch.float32, device="meta")


def test_index_keys_in_fp8_are_refused_by_their_key(folder_of: Folders) -> None:
    config = EngineConfig(model=str(folder_of("glm5_next")), index_key_dtype="fp8")
    values = with_index_keys(config, read_config(folder_of("glm5_next")), torch.device("cpu"))
    with pytest.raises(ConfigError, match="text_config: index_key_dtype='fp8' is not supported"):
        build_model(values, dtype=torch.float32, device="meta")


def test_makers_names_of_keys(folder_of: Folders) -> None:
    """The makers' files have KDA's sizes in a section, a schedule of indexers, and keys that mean nothing here; files
    of the text alone have no section and shorter names of tensors."""
    config = read_config(folder_of("glm5_next_free"))
    text = dict(config["text_config"])
    own = {"num_heads": text.pop("linear_num_heads"), "head_dim": text.pop("linear_head_dim"), "kda_layers": [2],
           "short_conv_kernel_size": text.pop("linear_conv_kernel_dim"), "full_attn_layers": [0, 1, 3],
           "gate_lower_bound": -3.0}
    changes = {"linear_attn_config": own, "index_topk_freq": 1, "index_skip_topk_offset": 3, "indexer_types": None,
               "rope_theta": 8e5, "rope_parameters": {"rope_type": "default", "rope_theta": 8e5}, "mhc": True,
               "indexer_rope_interleave": True, "num_nextn_predict_layers": 1, "index_share_for_mtp_iteration": True,
               "first_k_dense_replace": 1, "topk_method": "noaux_tc"}
    architecture = {"architectures": config["architectures"]}
    model = build_model(text | changes | architecture, dtype=torch.float32, device="meta")
    assert isinstance(model, Glm5Next)
    assert model.kda_shape == KDAShape(2, 16, 3, -3.0)
    assert "model.layers.2.self_attn.q_conv1d.weight" in model.weights()
    unbounded = build_model(config, dtype=torch.float32, device="meta")
    assert isinstance(unbounded, Glm5Next) and unbounded.kda_shape.lower_bound is None
    assert "model.language_model.layers.2.self_attn.q_conv1d.weight" in unbounded.weights()


def test_places_of_tokens_among_those_of_their_step() -> None:
    """A kernel reads what tokens before one in its step leave from the step's rows, and not from pages."""
    starts, request_of = torch.tensor([0, 3, 3, 5]), torch.tensor([0, 0, 0, 2, 2])
    view: Any = SimpleNamespace(num_tokens=5, positions=request_of, query_starts=starts, request_of=request_of)
    assert step_offsets(view).tolist() == [0, 1, 2, 0, 1]


def test_streams_are_read_by_matrices_of_float32(folder_of: Folders) -> None:
    """As the makers have them, in a model of 16 bits too."""
    weights = build_model(read_config(folder_of("glm5_next")), dtype=torch.bfloat16, device="meta").weights()
    found = {slot.target.dtype for name, slot in weights.items() if ".hc_" in name}
    assert found == {torch.float32}


# The multi-token-prediction module


def make_module(folder: Path, **changes: Any) -> Path:
    """A folder with a module behind the last layer: random tensors like those of a layer that attends, without its
    streams, and copies of the target's tensors as files have them."""
    make_folder("glm5_next", folder)
    path = folder / "model.safetensors"
    tensors = load_file(path)
    layers, like = "model.language_model.layers", "model.language_model.layers.1."
    shapes = {f"{layers}.4.{name.removeprefix(like)}": tensor.shape for name, tensor in tensors.items()
              if name.startswith(like) and ".hc_" not in name}
    shapes |= {f"{layers}.4.{name}.weight": torch.Size([H]) for name in ("enorm", "hnorm", "shared_head.norm")}
    shapes |= {f"{layers}.4.eh_proj.weight": torch.Size([H, 2 * H])}
    generator = torch.Generator().manual_seed(3)
    made = {name: torch.empty(shape).normal_(1.0 if "norm" in name else 0.0, 0.2, generator=generator)
            for name, shape in shapes.items()}
    copies = {f"{layers}.4.embed_tokens.weight": "model.language_model.embed_tokens.weight",
              f"{layers}.4.shared_head.head.weight": "lm_head.weight"}
    save_file(tensors | made | {name: tensors[of].clone() for name, of in copies.items()}, path)
    config = json.loads((folder / "config.json").read_text())
    config["text_config"] |= {"num_nextn_predict_layers": 1} | changes
    (folder / "config.json").write_text(json.dumps(config))
    return folder


class NaiveModule:
    """One request, everything from scratch, written from the tensors. is_shared: further drafts attend to what was
    chosen for the first."""

    def __init__(self, folder: Path, target: Model, is_shared: bool = False) -> None:
        self.target, self.is_shared = target, is_shared
        stored = {name: tensor.double() for name, tensor in load_file(folder / "model.safetensors").items()}
        self.t = {name.removeprefix("model.language_model.layers.4."): tensor for name, tensor in stored.items()}
        self.embeddings, self.head = stored["model.language_model.embed_tokens.weight"], stored["lm_head.weight"]

    def drafts(self, known: Sequence[int], k: int) -> tuple[list[int], torch.Tensor]:
        """k drafts after `known`, and the logits of each."""
        history = torch.tensor(known[:-1])
        states = self.target.forward(history, StepContext(DenseAttend(self.target), torch.arange(len(history)))).final
        chosen: list[int] = []
        logits = []
        self.kept: list[int] | None = None
        for _ in range(k):
            made = self.module(torch.tensor([*known, *chosen][1:]), states)
            logits.append(made[-1] @ self.head.T)
            chosen.append(int(logits[-1].argmax()))
            states = torch.cat((states, made[-1:]))
        return chosen, torch.stack(logits)

    def module(self, tokens: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        joined = torch.cat((self.norm(self.embeddings[tokens], "enorm"), self.norm(states, "hnorm")), dim=1)
        x = joined @ self.t["eh_proj.weight"].T
        x = x + self.attention(self.norm(x, "input_layernorm"))
        x = x + self.experts(self.norm(x, "post_attention_layernorm"))
        return self.norm(x, "shared_head.norm")

    def norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return x / (x.square().mean(-1, keepdim=True) + EPS).sqrt() * self.t[f"{name}.weight"]

    def attention(self, x: torch.Tensor) -> torch.Tensor:
        def product(of: torch.Tensor, name: str) -> torch.Tensor:
            return of @ self.t[f"self_attn.{name}.weight"].T

        compressed = self.norm(product(x, "q_a_proj"), "self_attn.q_a_layernorm")
        q = product(compressed, "q_b_proj").view(-1, HEADS, NOPE)
        latent = self.norm(product(x, "kv_a_proj_with_mqa"), "self_attn.kv_a_layernorm")
        k, v = product(latent, "kv_b_proj").view(-1, HEADS, NOPE + VALUE).split((NOPE, VALUE), dim=-1)
        index_q = product(compressed, "indexer.wq_b").view(-1, INDEX_HEADS, INDEX_DIM)
        weights = product(x, "indexer.weights_proj")
        raw = product(x, "indexer.wk")
        raw = (raw - raw.mean(-1, keepdim=True)) / (raw.var(-1, keepdim=True, unbiased=False) + 1e-6).sqrt()
        keys = raw * self.t["self_attn.indexer.k_norm.weight"] + self.t["self_attn.indexer.k_norm.bias"]
        gates = x @ self.t["self_attn.indexer.index_kpool_compress_gate"].T
        bias = self.t["self_attn.indexer.index_kpool_compress_ape"]
        out = torch.zeros(len(x), HEADS, VALUE, dtype=x.dtype)
        for row in range(len(x)):
            whole = (row + 1) // BLOCK
            seen = list(range(whole * BLOCK, row + 1))
            if whole:
                parts = [slice(i * BLOCK, (i + 1) * BLOCK) for i in range(whole)]
                pooled = torch.stack([((gates[at] + bias).softmax(0) * keys[at]).sum(0) for at in parts])
                scores = weights[row] @ (index_q[row] @ pooled.T).clamp_min(0)
                best = scores.topk(min(CHOSEN, whole)).indices.tolist()
                seen += [at * BLOCK + i for at in best for i in range(BLOCK)]
            if self.is_shared and row == len(x) - 1:
                seen = self.kept = seen if self.kept is None else self.kept
            for head in range(HEADS):
                out[row, head] = (k[seen, head] @ q[row, head] * NOPE**-0.5).softmax(0) @ v[seen, head]
        return product(out.flatten(1), "o_proj")

    def experts(self, x: torch.Tensor) -> torch.Tensor:
        out = self.mlp(x, "mlp.shared_experts")
        scores = (x @ self.t["mlp.gate.weight"].T).sigmoid()
        for row in range(len(x)):
            ids = (scores[row] + self.t["mlp.gate.e_score_correction_bias"]).topk(TOP).indices
            weights = scores[row, ids] / scores[row, ids].sum() * 2.5
            for weight, expert in zip(weights, ids.tolist(), strict=True):
                out[row] += weight * self.mlp(x[row], f"mlp.experts.{expert}")
        return out

    def mlp(self, x: torch.Tensor, prefix: str) -> torch.Tensor:
        gate, up = (x @ self.t[f"{prefix}.{name}_proj.weight"].T for name in ("gate", "up"))
        gate, up = gate.clamp(max=LIMIT), up.clamp(-LIMIT, LIMIT)
        return gate * gate.sigmoid() * up @ self.t[f"{prefix}.down_proj.weight"].T


@pytest.fixture(scope="module")
def module_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_module(tmp_path_factory.mktemp("glm5_next_mtp"))


@torch.inference_mode()
def test_drafts_of_the_module_equal_a_naive_reference(module_folder: Path) -> None:
    """Behind contexts of which everything is chosen, and behind longer ones."""
    target = load(module_folder, torch.float64)
    contexts = ((1, 12, ()), (2, 30, (1, 5)))
    assert_drafts_equal(module_folder, target, NaiveModule(module_folder, target).drafts, contexts, least_distinct=3)


@torch.inference_mode()
@pytest.mark.parametrize("is_shared", [False, pytest.param(True, marks=pytest.mark.long)], ids=["", "one choice"])
def test_drafts_and_text_of_an_engine(module_folder: Path, is_shared: bool, tmp_path: Path) -> None:
    """In ragged batches, in chunks, after preemptions and prefix hits, drafts are those of the naive reference, and the
    text is the one without drafts."""
    if is_shared:
        module_folder = make_module(tmp_path, index_share_for_mtp_iteration=True)
    target = load(module_folder, torch.float64)
    proposed = drafts_in_an_engine(module_folder, target)
    reference, other = (NaiveModule(module_folder, target, way) for way in (is_shared, not is_shared))
    some = proposed[::4]
    assert all(drafts == reference.drafts(known, 3)[0] for known, drafts in some)
    assert any(drafts != other.drafts(known, 3)[0] for known, drafts in some)


def test_what_cannot_draft_for_or_from_it_is_refused_by_name(module_folder: Path) -> None:
    target = load(module_folder)
    with pytest.raises(ValueError, match=r"draft model \(Glm5Next\) has recurrent layers"):
        DraftModelNetwork(target, target.num_layers, target.vocab_size)
    with pytest.raises(ValueError, match="--method mtp cannot tune a module with latent attention or an indexer"):
        MTPTrainee.aux_layers_for(target, TrainingSettings())
