"""The bridge to transformers beside its oracle: what it replaces, refuses, drafters, auxiliary states, host reads."""

from __future__ import annotations

import contextlib
import functools
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from outrider.core.params import SamplingParams
from outrider.formats.scaled import ScaledLinear
from outrider.layers import (
    Embedding,
    Experts,
    FusedLinear,
    GatedMLP,
    Linear,
    Module,
    NothingAttends,
    RMSNorm,
    SelfAttention,
    StepContext,
    TiedLinear,
)
from outrider.layers.base import find_modules
from outrider.models.base import Model
from outrider.models.bridge import installed, known
from outrider.models.bridge.model import BridgedModel
from outrider.models.config import ConfigError
from outrider.models.registry import build_model
from tests.drafters.checkpoints import make_drafter
from tests.engine.harness import CONFIGS, Ask, Rig, greedy, prompt_of, random_model, tiny_model, tokens_alone, tokens_of
from tests.engine.test_no_host_reads import MODES, PlansMayRead, guard_steps
from tests.models import quantized_files as files
from tests.models.bridged import BRIDGED, FORCED, hf_config_of, make_bridged, model_class_of
from tests.models.oracle import BASE, DenseAttend, all_logits, hf_model, load
from tests.models.oracle import tokens_of as tokens_from
from tests.models.test_quantized_files import load as load_quantized
from tests.unit.test_extending import outcome

STARCODER = {key: value for key, value in CONFIGS["llama"].items() if key != "rms_norm_eps"} | {
    "architectures": ["Starcoder2ForCausalLM"], "sliding_window": 20}


def outlined(name: str, **changes: Any) -> Model:
    """A model of a tiny config on the meta device."""
    config = hf_config_of(name, **changes).to_dict() | {"architectures": [model_class_of(name).__name__]}
    return build_model(config, dtype=torch.float32, device="meta", model_impl="transformers")


def kinds_of(model: Model) -> set[type[Module]]:
    return {type(part) for _, part in model.parts()}


# What is replaced


def test_a_plain_model_is_all_blocks_of_ours() -> None:
    for name in FORCED.keys() - {"ministral3"}:  # whose queries grow with their position
        kinds = kinds_of(outlined(name))
        assert kinds - {TiedLinear, Linear} == {Embedding, SelfAttention, GatedMLP, RMSNorm}, name


def test_products_of_one_input_are_joined() -> None:
    parts = [part for _, part in outlined("helium").parts() if isinstance(part, FusedLinear)]  # a rope of its own form
    assert [[*part.stored] for part in parts] == [["q_proj", "k_proj", "v_proj"]] * 4


def test_experts_are_ours_and_routers_stay() -> None:
    model = outlined("qwen2_moe")
    experts = [part for _, part in model.parts() if isinstance(part, Experts)]
    assert len(experts) == 4 and "model.layers.0.mlp.gate.weight" in dict(model.parts())
    assert "model.layers.0.mlp.experts.7.down_proj.weight" in model.weights()


def test_layers_are_described_by_their_calls() -> None:
    windows = [layer.window for layer in outlined("cwm", layer_types=["sliding_attention", "full_attention"] * 2)
               .attention_layers]
    assert windows == [16, None, 16, None]
    gemma = outlined("gemma2", query_pre_attn_scalar=25).attention_layers[0]
    assert (gemma.softcap, gemma.scale, gemma.head_dim) == (5.0, 0.2, 16)
    latent = outlined("minicpm3").attention_layers[0]
    assert (latent.head_dim, latent.num_kv_heads) == (40, 4)
    assert outlined("granite_swa").attention_layers[0].sinks is not None


class _TwoRanks:
    """A group that no sum is asked of."""

    rank, count = 0, 2

    def sum(self, part: torch.Tensor) -> torch.Tensor:
        raise AssertionError

    def gather(self, part: torch.Tensor, dim: int = -1) -> torch.Tensor:
        raise AssertionError


class _Norm(nn.Module):
    """A norm with a change that only its arithmetic shows."""

    def __init__(self, change: float) -> None:
        super().__init__()
        self.weight, self.eps, self.change = nn.Parameter(torch.ones(16, device="meta")), 1e-6, change

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return known.norm(x, self.weight, self.eps, False, False) * self.change


def test_a_module_that_computes_something_else_is_not_known() -> None:
    assert known.find_norm(_Norm(1.0)) == (16, 1e-6, False, False) and known.find_norm(_Norm(1.01)) is None
    llama = import_module("transformers.models.llama.modeling_llama")
    config = hf_config_of("llama")
    with torch.device("meta"):
        mlp = llama.LlamaMLP(config)
    assert known.find_mlp(mlp) == ("silu", False)

    class Halved(llama.LlamaMLP):  # type: ignore[name-defined, misc]
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) / 2

    with torch.device("meta"):
        assert known.find_mlp(Halved(config)) is None


class _EpsilonOutside(nn.Module):
    """A norm that adds its epsilon to the root."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(16, device="meta")), 1e-6

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x / (x.square().mean(-1, keepdim=True).sqrt() + self.eps) * self.weight


def test_modules_that_differ_in_small_or_large_values_alone_are_not_known() -> None:
    """A norm's epsilon, two forms of gelu, and limits that usual values do not reach."""
    assert known.find_norm(_EpsilonOutside()) is None
    for activation in ("gelu", "gelu_10"):
        assert GatedMLP not in kinds_of(outlined("llama", hidden_act=activation)), activation
    assert GatedMLP in kinds_of(outlined("llama", hidden_act="gelu_new")), "the arithmetic of gelu_pytorch_tanh"
    assert SelfAttention in kinds_of(outlined("olmo"))
    assert SelfAttention not in kinds_of(outlined("olmo", clip_qkv=300.0))


@torch.no_grad()
def test_the_row_of_a_padding_token_is_that_of_the_file(tmp_path: Path) -> None:
    """transformers clears Youtu's row after it has been read, and the embedding is the head too: the logits of that
    token differ, and those of no other."""
    folder = make_bridged("youtu", tmp_path, q_lora_rank=None, pad_token_id=0)
    reference, tokens = hf_model(folder), tokens_from(1, 30)
    found = all_logits(load(folder), tokens)
    wanted = reference(tokens[None], use_cache=False).logits[0]
    assert (found - wanted)[:, 1:].abs().max() < 1e-4 and not wanted[:, 0].any()
    stored = load_file(folder / "model.safetensors")["model.embed_tokens.weight"]
    reference.get_input_embeddings().weight[0] = stored[0]
    assert (found - reference(tokens[None], use_cache=False).logits[0]).abs().max() < 1e-4


# What is refused


@pytest.mark.parametrize(("architecture", "says"), [
    ("BloomForCausalLM", "does not let another package compute its attention"),  # alibi
    ("MambaForCausalLM", "keeps a state of its own"),
    ("T5ForConditionalGeneration", "has a text model of this name"),
    ("NoSuchForCausalLM", "has a text model of this name"),
])
def test_architectures_are_refused_by_name(architecture: str, says: str) -> None:
    with pytest.raises(ConfigError, match=f"architectures=.*{architecture}.*{says}"):
        build_model({"architectures": [architecture]}, dtype=torch.float32, device="meta")


@pytest.mark.parametrize(("kind", "values", "says"), [
    ("DiffLlama", {}, "computes attention twice in one pass"),
    ("Doge", {}, "builds its own attention mask"),
    ("GptOss", {"num_local_experts": 4, "num_experts_per_tok": 2}, "no kernel for the experts .*GptOssExperts"),
    ("HunYuanMoEV1", {"num_experts": 8, "moe_topk": 3, "head_dim": 16},
     r"in model.layers.0.mlp.gate .HunYuanMoEV1Gate.: the code reads the weight of a linear layer by itself"),
    ("JetMoe", {"num_local_experts": 4, "num_experts_per_tok": 2, "kv_channels": 16},
     r"in model.layers.0.self_attention.experts.router .JetMoeTopKGating.: the code copies values of a tensor to the"),
])
def test_what_code_does_is_refused_by_its_module(monkeypatch: pytest.MonkeyPatch, kind: str, values: dict[str, Any],
                                                  says: str) -> None:
    monkeypatch.setitem(BRIDGED, "refused", (kind, values))
    with pytest.raises(ConfigError, match=f"{kind}ForCausalLM.*the engine cannot run that code: .*{says}"):
        outlined("refused")


def test_convolutions_over_tokens_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    modelling = import_module("transformers.models.arcee.modeling_arcee")
    make = modelling.ArceeMLP.__init__

    def with_convolution(self: Any, config: Any) -> None:
        make(self, config)
        self.convolution = nn.Conv1d(4, 4, 3)

    monkeypatch.setattr(modelling.ArceeMLP, "__init__", with_convolution)
    with pytest.raises(ConfigError, match="layers.0.mlp.convolution .Conv1d. mixes neighbouring tokens"):
        outlined("arcee")


@pytest.mark.parametrize(("name", "values", "says"), [
    ("llama", {"rope_parameters": {"rope_type": "longrope", "rope_theta": 100.0, "short_factor": [1.0] * 8,
                                   "long_factor": [2.0] * 8}}, "rope_type='longrope' .* longest text of a batch"),
    ("arcee", {"dual_chunk_attention_config": {"chunk_size": 8}}, "dual_chunk_attention_config=.* is not supported"),
    ("arcee", {"is_encoder_decoder": True}, "is_encoder_decoder=True is not supported"),
    ("arcee", {"model_type": "llama"}, "model_type='llama' is not supported; the class ArceeForCausalLM has"),
    ("arcee", {"layer_types": ["conv"] * 4}, "layer_types=.* layers of type 'conv' cannot run"),
    ("arcee", {"num_key_value_heads": "two"}, "ArceeConfig of transformers refuses this config"),
])
def test_config_keys_are_refused_by_name(name: str, values: dict[str, Any], says: str) -> None:
    config = hf_config_of(name).to_dict() | {"architectures": [model_class_of(name).__name__]} | values
    with pytest.raises(ConfigError, match=f"config.json: .*{says}"):
        build_model(config, dtype=torch.float32, device="meta", model_impl="transformers")


def test_keys_that_transformers_ignores_are_named(caplog: pytest.LogCaptureFixture) -> None:
    """Published files have many. Keys that the class derives from others and saves are not among them."""
    with caplog.at_level("WARNING", logger="outrider"):
        config = hf_config_of("youtu").to_dict() | {"architectures": ["YoutuForCausalLM"], "mlp_type": "default"}
        build_model(config, dtype=torch.float32, device="cpu")
    assert [record.message for record in caplog.records] == [
        "config.json: transformers' YoutuConfig does not read mlp_type"]


def test_code_of_a_checkpoint_is_never_run() -> None:
    config = {"architectures": ["MineForCausalLM"], "auto_map": {"AutoModelForCausalLM": "modeling_mine.Mine"}}
    with pytest.raises(ConfigError, match="the code that auto_map names is never run"):
        build_model(config, dtype=torch.float32, device="meta")


def test_families_of_ours_come_first_and_can_be_asked_for() -> None:
    config = CONFIGS["llama"]
    options: dict[str, Any] = {"dtype": torch.float32, "device": "meta"}
    assert not isinstance(build_model(config, **options), BridgedModel)
    assert isinstance(build_model(config, model_impl="transformers", **options), BridgedModel)
    assert isinstance(build_model(STARCODER, **options), BridgedModel)
    with pytest.raises(ConfigError, match="Starcoder2ForCausalLM.* is not supported; supported: "):
        build_model(STARCODER, model_impl="outrider", **options)


def test_without_transformers_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> Any:
        raise ImportError(f"No module named {name!r}")

    monkeypatch.setattr(installed, "import_module", absent)
    with pytest.raises(ConfigError, match=r"Starcoder2ForCausalLM.* cannot be imported .*outrider\[transformers\]"):
        build_model(STARCODER, dtype=torch.float32, device="meta")


def test_ranks_and_exact_mode_are_refused() -> None:
    with pytest.raises(ValueError, match="tensor_parallel_size=2 is not supported with model_impl='transformers'"):
        random_model(STARCODER, torch.float32, 0, group=_TwoRanks())
    with pytest.raises(ValueError, match="exact=True is not supported with model_impl='transformers'"):
        Rig(random_model(STARCODER | {"hidden_size": 64}, torch.float32, 0), exact=True)


# What it computes


@functools.cache
def starcoder() -> Model:
    return random_model(STARCODER, torch.float64, 3)


def test_a_family_forced_through_the_bridge_computes_the_same() -> None:
    """Logits and the residual streams that EAGLE heads read."""
    plain, tokens = tiny_model("llama"), tokens_from(seed=1, count=40)
    bridged = build_model(CONFIGS["llama"], dtype=torch.float64, device="cpu", model_impl="transformers")
    slots = bridged.weights()
    for name, slot in plain.weights().items():
        slots[name].store(slot.target.clone())
    bridged.finalize()
    assert (all_logits(bridged, tokens) - all_logits(plain, tokens)).abs().max() < 1e-4  # ropes are float32 there
    aux_layers = (0, 1, plain.num_layers)
    found, expected = (model.forward(tokens, StepContext(DenseAttend(model), torch.arange(40)), aux_layers)
                       for model in (bridged, plain))
    for stream, own in zip((*found.aux_states, found.before_norm), (*expected.aux_states, expected.before_norm),
                           strict=True):
        assert (stream - own).abs().max() < 1e-4


SHARED = prompt_of(0, 32)
ASKS = [
    Ask([*SHARED, *prompt_of(1, 9)], greedy(8)),
    Ask([*SHARED, *prompt_of(2, 3)], SamplingParams(temperature=1.0, seed=7, max_tokens=8)),
    Ask([*SHARED[:16], *prompt_of(3, 19)], SamplingParams(temperature=0.8, top_p=0.9, repetition_penalty=1.2, seed=3,
                                                         max_tokens=8)),
    Ask(prompt_of(4, 5), greedy(8, frequency_penalty=0.5)),
]


@functools.cache
def expected_tokens() -> list[list[list[int]]]:
    return tokens_alone(starcoder(), ASKS)


@pytest.mark.parametrize("kind", ["eagle3", *(pytest.param(kind, marks=pytest.mark.long)
                                              for kind in ("eagle", "draft_model", "suffix"))])
def test_tokens_do_not_depend_on_the_drafter(kind: str, tmp_path: Path) -> None:
    speculative: dict[str, Any] = {"method": kind, "num_speculative_tokens": 3, "auto": False}
    if kind != "suffix":
        speculative = make_drafter(kind, "llama", tmp_path).speculative(3)
    common: dict[str, Any] = {"speculative_config": speculative, "max_num_seqs": 3, "max_model_len": 64}
    with Rig(starcoder(), overlap=False, max_num_batched_tokens=9, pad_requests=(4,), pad_tokens=(12,),
             **common) as rig:
        assert tokens_of(rig.run(ASKS)) == expected_tokens()
        assert rig.scheduler.cache.stats.hit_tokens > 0 and rig.runner.num_padded_steps > 0
    with Rig(starcoder(), overlap=True, max_num_batched_tokens=30, **common) as rig:
        assert tokens_of(rig.run(ASKS, after_step=rig.preempt)) == expected_tokens()
        assert rig.scheduler.stats.num_preemptions > 0


def test_equal_layers_are_passed_over_while_kernels_compile() -> None:
    model, calls = outlined("arcee"), list[int]()
    assert isinstance(model, BridgedModel)
    for index, layer in enumerate(model._layers):
        layer.register_forward_hook(lambda *_, index=index: calls.append(index))
    tokens = torch.zeros(3, dtype=torch.int64, device="meta")
    for expected in ([0, 3], [0, 1, 2, 3]):
        calls.clear()
        with model.one_layer_each() if len(expected) == 2 else contextlib.nullcontext():
            hidden = model.forward(tokens, StepContext(NothingAttends(), tokens), aux_layers=(0, 2, 4))
        assert calls == expected and len(hidden.aux_states) == 3


def test_a_step_reads_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a GPU could capture."""
    assert not starcoder().reads_device
    monkeypatch.setattr("outrider.mixers.paged.torch_backend.TorchBackend", PlansMayRead)
    with Rig(starcoder(), overlap=False) as rig:
        guard = guard_steps(rig, MODES["inference_mode"])
        assert tokens_of(rig.run(ASKS)) == expected_tokens()
        assert guard.num_operations > 100 * len(rig.batches), "the steps did pass through the guard"


def test_code_that_waits_for_the_device_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its steps run uncaptured on a GPU, under a reason of their own."""
    modelling = import_module("transformers.models.arcee.modeling_arcee")
    forward = modelling.ArceeMLP.forward

    def reading(self: Any, x: torch.Tensor) -> torch.Tensor:
        return forward(self, x if x.sum() > 1e9 else x + 0)

    monkeypatch.setattr(modelling.ArceeMLP, "forward", reading)
    assert outlined("arcee").reads_device and not outlined("llama").reads_device



@pytest.mark.parametrize("name", ["FP8_DYNAMIC", pytest.param("W4A16", marks=pytest.mark.long)])
def test_quantised_files_keep_their_bits(name: str, tmp_path: Path) -> None:
    files.save_form(tmp_path / "quantised", files.FORMS[name])
    model, dense = (load_quantized(tmp_path / "quantised", model_impl="transformers", keep_quantized=keeps)
                    for keeps in (True, False))
    assert isinstance(model, BridgedModel)
    kept = [isinstance(linear.format, ScaledLinear) for linear in find_modules([model], Linear)]
    assert sum(kept) == 8, "all but the head"
    assert outcome(model) == outcome(dense)


@torch.no_grad()
def test_tables_are_computed_by_the_model_that_has_them(tmp_path: Path) -> None:
    """In Gemma 3n the model that makes hidden states knows sizes that the one around it does not."""
    import transformers

    config = transformers.Gemma3nTextConfig(**BASE | {
        "num_hidden_layers": 3, "head_dim": 16, "sliding_window": 16, "laurel_rank": 8, "num_kv_shared_layers": 1,
        "layer_types": ["sliding_attention", "full_attention", "full_attention"], "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": 256, "activation_sparsity_pattern": [0.0] * 3})
    torch.manual_seed(1)
    reference = transformers.Gemma3nForCausalLM(config).eval()
    for name, parameter in reference.named_parameters():
        torch.nn.init.normal_(parameter, mean=float("norm" in name), std=0.1)
    reference.save_pretrained(tmp_path)
    tokens = tokens_from(seed=1, count=40)
    assert (all_logits(load(tmp_path), tokens) - reference(tokens[None], use_cache=False).logits[0]).abs().max() < 1e-4
