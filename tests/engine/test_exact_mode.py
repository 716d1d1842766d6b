"""Exact mode: tokens and log-probabilities have the same bits alone and in any batch, with drafts and without.

In float32, where another order of additions shows at once. Sizes are no multiples of vectors, so that the last elements
of a tensor, which libraries compute by other code, are elements of some token row. Every cell asserts that its
condition occurred.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from outrider import LLM, PoolingParams, cli
from outrider.benchmarks import exact_mode
from outrider.cache.kinds import FullSpec
from outrider.core.outputs import RequestOutput
from outrider.core.params import SamplingParams
from outrider.drafters.base import Drafter
from outrider.drafters.eagle import head_drafter
from outrider.drafters.ngram import NgramDrafter
from outrider.kernels import cpu as native
from outrider.kernels import ops
from outrider.kernels.cpu.products import CpuProduct
from outrider.mixers import cached
from outrider.mixers.batch import BatchView
from outrider.mixers.mixer import Mixer
from outrider.models.base import Model
from tests.drafters.scripted_drafter import ScriptedDrafter
from tests.engine.harness import CPU, Ask, Rig, greedy, prompt_of, random_model, save_folder

VOCAB, LENGTH, K = 203, 20, 3
SLIDING, FULL, LINEAR = "sliding_attention", "full_attention", "linear_attention"
_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 40, "intermediate_size": 72, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 512, "eos_token_id": 2,
}
_EXPERTS = {"num_experts": 5, "num_experts_per_tok": 3, "moe_intermediate_size": 13, "decoder_sparse_step": 1}
_GEMMA4 = _SIZES | {
    "architectures": ["Gemma4ForCausalLM"], "global_head_dim": 32, "num_global_key_value_heads": 1,
    "attention_k_eq_v": True, "hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0, "sliding_window": 20,
    "num_hidden_layers": 3, "layer_types": [SLIDING, SLIDING, FULL], "final_logit_softcapping": 3.0,
    "rope_parameters": {SLIDING: {"rope_type": "default", "rope_theta": 10000.0},
                        FULL: {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.25}},
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": _SIZES | {"architectures": ["LlamaForCausalLM"]},
    "gemma3": _SIZES | {"architectures": ["Gemma3ForCausalLM"], "query_pre_attn_scalar": 24, "sliding_window": 20,
                        "num_hidden_layers": 2, "layer_types": [SLIDING, FULL]},
    "gemma4": _GEMMA4 | {
        "num_hidden_layers": 4, "num_key_value_heads": 1, "num_global_key_value_heads": None, "attention_k_eq_v": False,
        "hidden_size_per_layer_input": 9, "vocab_size_per_layer_input": VOCAB, "num_kv_shared_layers": 2,
        "use_double_wide_mlp": True, "layer_types": [SLIDING, FULL, SLIDING, FULL],
    },
    "gemma4_moe": _GEMMA4 | {"enable_moe_block": True, "num_experts": 5, "top_k_experts": 2,
                             "moe_intermediate_size": 13},
    "qwen3_moe": _SIZES | _EXPERTS | {"architectures": ["Qwen3MoeForCausalLM"], "norm_topk_prob": True},
    "nemotron_h": _SIZES | {
        "architectures": ["NemotronHForCausalLM"], "hybrid_override_pattern": "M*EM-", "num_hidden_layers": 5,
        "ssm_state_size": 9, "mamba_num_heads": 6, "mamba_head_dim": 7, "n_groups": 2, "conv_kernel": 4,
        "n_routed_experts": 5, "num_experts_per_tok": 3, "moe_intermediate_size": 13,
        "moe_shared_expert_intermediate_size": 11,
    },
    "qwen3_next": _SIZES | _EXPERTS | {
        "architectures": ["Qwen3NextForCausalLM"], "num_hidden_layers": 3, "layer_types": [LINEAR, FULL, LINEAR],
        "linear_key_head_dim": 9, "linear_value_head_dim": 7, "linear_num_key_heads": 3, "linear_num_value_heads": 6,
        "linear_conv_kernel_dim": 4, "shared_expert_intermediate_size": 11,
    },
}
_LATENT = _SIZES | {
    "num_hidden_layers": 3, "q_lora_rank": 21, "kv_lora_rank": 19, "qk_rope_head_dim": 6, "qk_nope_head_dim": 7,
    "v_head_dim": 9, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1, "first_k_dense_replace": 1,
    "moe_intermediate_size": 13, "n_group": 2, "topk_group": 1, "index_topk": 48, "index_head_dim": 11,
    "index_n_heads": 5, "num_nextn_predict_layers": 1,
}
FAMILIES |= {  # some contexts have more positions than an indexer chooses, some fewer
    "deepseek_v3": {key: value for key, value in _LATENT.items() if not key.startswith("index_")}
    | {"architectures": ["DeepseekV3ForCausalLM"]},
    "deepseek_v32": _LATENT | {"architectures": ["DeepseekV32ForCausalLM"], "num_hidden_layers": 2},
    "glm_moe_dsa": _LATENT | {"architectures": ["GlmMoeDsaForCausalLM"], "indexer_types": ["full", "shared", "full"]},
    "hy_v4": _LATENT | {"architectures": ["HYV4ForCausalLM"], "num_hidden_layers": 2, "n_group": 1, "hc_mult": 2,
                        "indexer_types": ["full", "shared"], "swiglu_limit": 0.2},
}
FAMILIES["kimi_linear"] = _SIZES | {
    "architectures": ["KimiLinearForCausalLM"], "num_key_value_heads": 4, "num_hidden_layers": 3, "kv_lora_rank": 19,
    "layer_types": [LINEAR, FULL, LINEAR], "linear_head_dim": 9, "linear_num_heads": 3, "linear_conv_kernel_dim": 4,
    "qk_rope_head_dim": 6, "qk_nope_head_dim": 7, "v_head_dim": 9, "mlp_layer_types": ["dense", "sparse", "sparse"],
    "num_experts": 4, "num_experts_per_token": 2, "moe_intermediate_size": 13,
}
FAMILIES["qwen4_exp"] = _SIZES | _EXPERTS | {
    "architectures": ["Qwen4ExpForCausalLM"], "num_hidden_layers": 3, "layer_types": [LINEAR, FULL, LINEAR],
    "linear_key_head_dim": 9, "linear_value_head_dim": 7, "linear_num_key_heads": 3, "linear_num_value_heads": 6,
    "linear_conv_kernel_dim": 4, "shared_expert_intermediate_size": 11, "hc_count": 3, "hc_lowrank": 7,
    "ple_layer_ids": [3], "ple_embed_dim": 18, "heads_per_ngram": 3, "ngram_vocab_size_base": 50,
    "split_ngram_parts": 2, "make_ngram_vocab_size_divisible_by": 16, "indexer_n_heads": 5, "indexer_kv_heads": 1,
    "indexer_head_dim": 18, "indexer_budget": 32, "indexer_compress_ratio": 8, "eos_token_id": 2,
}
FAMILIES["glm5_next"] = _LATENT | {
    "architectures": ["Glm5NextForConditionalGeneration"], "num_key_value_heads": 4, "num_hidden_layers": 3,
    "layer_types": [LINEAR, FULL, LINEAR], "mlp_layer_types": ["dense", "sparse", "dense"], "linear_head_dim": 9,
    "linear_num_heads": 3, "qk_rope_head_dim": 0, "index_topk": 32, "index_kpool": 8, "swiglu_limit": 1.5, "hc_mult": 3,
}
SHARED = prompt_of(0, 32, VOCAB)
LOUD = SamplingParams(temperature=0.9, top_p=0.9, top_k=50, repetition_penalty=1.2, seed=13, max_tokens=LENGTH,
                      logprobs=VOCAB, ignore_eos=True)
PARAMS = [greedy(LENGTH, logprobs=VOCAB, ignore_eos=True),
          SamplingParams(temperature=1.0, seed=7, max_tokens=LENGTH, logprobs=VOCAB, ignore_eos=True), LOUD]
PROMPTS = [[*SHARED, *prompt_of(1, 41, VOCAB)], [*SHARED, *prompt_of(2, 13, VOCAB)], prompt_of(3, 7, VOCAB)]
ASKS = [Ask(prompt, params) for prompt, params in zip(PROMPTS, PARAMS, strict=True)]
SETTINGS: dict[str, Any] = {"exact": True, "max_num_seqs": 3, "max_model_len": 112, "max_num_batched_tokens": 112}

pytestmark = pytest.mark.skipif(not native.available(), reason="exact mode on a CPU needs the native kernels")


@functools.cache
def model_of(family: str) -> Model:
    return random_model(FAMILIES[family], torch.float32, seed=11)


def bits_of(outputs: Sequence[RequestOutput]) -> list[tuple[list[int], list[dict[int, float]]]]:
    """The tokens of every request, and the log-probability of every token of the vocabulary at each of its steps."""
    (samples,) = zip(*(output.outputs for output in outputs), strict=True)
    assert all(sample.error is None for sample in samples)
    return [(sample.token_ids, [{token: entry.logprob for token, entry in step.items()}
                                for step in sample.logprobs or []]) for sample in samples]


def rig_of(family: str, **settings: Any) -> Rig:
    return Rig(model_of(family), **SETTINGS | settings)


@functools.cache
def expected(family: str) -> list[tuple[list[int], list[dict[int, float]]]]:
    """Each request alone, in one chunk, with everything switched off."""
    with rig_of(family, enable_prefix_caching=False, overlap=False) as rig:
        return bits_of(rig.run_one_by_one(ASKS))


def scripted(family: str) -> Drafter:
    """The right continuations with every fifth token wrong."""
    right = {tuple(ask.prompt): tokens for ask, (tokens, _) in zip(ASKS, expected(family), strict=True)}

    def script(prompt: tuple[int, ...], index: int) -> list[int]:
        return [(token + 1) % VOCAB if i % 5 == 4 else token for i, token in enumerate(right[prompt])]

    return ScriptedDrafter(K, script)


def mtp(family: str) -> Drafter:
    from outrider.models.mtp import build_mtp_modules

    target = model_of(family)
    (head,) = build_mtp_modules(target, first_layer=target.num_layers, dtype=target.dtype, device=CPU)
    generator = torch.Generator().manual_seed(6)
    for slot in head.weights().values():
        slot.store(torch.empty(slot.shape, dtype=torch.float64).normal_(0.5, 0.25, generator=generator))
    head.finalize()
    return head_drafter("mtp", head, K)


@dataclass(frozen=True)
class Cell:
    name: str
    settings: dict[str, Any] = field(default_factory=dict)
    drafter: str = ""
    is_preempted: bool = False
    rounds: int = 1  # a second round finds pages of the first in the prefix cache

    def make_drafter(self, family: str) -> Drafter | None:
        match self.drafter:
            case "scripted":
                return scripted(family)
            case "ngram":
                return NgramDrafter(K, min_n=1, max_n=3)
            case "mtp":
                return mtp(family)
        return None


CELLS = [
    Cell("mates", {"overlap": True}),
    Cell("chunks", {"max_num_batched_tokens": 5, "pad_requests": (4,), "pad_tokens": (9, 33)}),
    Cell("preempted", {"max_num_batched_tokens": 33, "overlap": True}, is_preempted=True),
    Cell("scripted", {"max_num_batched_tokens": 29}, "scripted", is_preempted=True),
    Cell("ngram and hits", {"overlap": True}, "ngram", rounds=2),
]
MTP = Cell("mtp", {"max_num_batched_tokens": 40, "overlap": True}, "mtp")
MATES, CHUNKS, PREEMPTED, SCRIPTED, HITS = CELLS
SOME_CELLS = {  # latent attention is slow on a CPU
    "deepseek_v3": [SCRIPTED], "deepseek_v32": [CHUNKS, HITS], "glm_moe_dsa": [PREEMPTED, MTP],
    "qwen3_next": [*CELLS, MTP], "kimi_linear": [CHUNKS, SCRIPTED, HITS],
    "qwen4_exp": [SCRIPTED], "glm5_next": [SCRIPTED], "hy_v4": [MTP],
}
CASES = [pytest.param(family, cell, marks=pytest.mark.long if family == "hy_v4" else ())
         for family in FAMILIES for cell in SOME_CELLS.get(family, CELLS)]


@pytest.mark.parametrize(("family", "cell"), CASES, ids=lambda value: value if isinstance(value, str) else value.name)
def test_bits_are_a_function_of_the_request(family: str, cell: Cell) -> None:
    wanted = expected(family)
    with rig_of(family, drafter=cell.make_drafter(family), **cell.settings) as rig:
        for _ in range(cell.rounds):
            outputs = bits_of(rig.run(ASKS, after_step=rig.preempt if cell.is_preempted else None))
        stats = rig.scheduler.stats
        assert max(batch.num_requests for batch in rig.batches) > 1, "batch mates"
        assert (stats.num_preemptions > 0) == cell.is_preempted
        drafted = {part.num_accepted for result in rig.results for part in result.requests if part.num_drafted}
        assert drafted >= ({0, K} if cell.drafter == "scripted" else {0} if cell.drafter else set())
        assert rig.scheduler.cache.stats.hit_tokens > 0 or cell.rounds == 1
    for (tokens, logprobs), (wanted_tokens, wanted_logprobs) in zip(outputs, wanted, strict=True):
        assert tokens == wanted_tokens
        assert logprobs == wanted_logprobs


# Operations whose kernels compute token rows alone, and whose references hand many of them to a library at once.
INEXACT_REFERENCES = ("rms_norm", "add_rms_norm", "silu_mul", "gelu_tanh_mul", "sigmoid_scale", "gelu_scale",
                      "cap_logits", "rope_write", "paged_attention", "linear", "linear_wide", "gated_linear", "experts",
                      "route", "gated_norm", "write_latents", "head_products", "choose_positions", "latent_attention",
                      "dense_latent_attention", "write_pooled_keys")


@pytest.mark.parametrize("family", FAMILIES)
def test_no_inexact_reference_runs(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **options: Any) -> None:
        raise AssertionError("a reference ran in exact mode")

    for name in INEXACT_REFERENCES:
        monkeypatch.setattr(ops.operations()[name], "reference", refuse)
    with rig_of(family) as rig:
        outputs = rig.run([Ask(prompt, greedy(3)) for prompt in PROMPTS])
    assert [tokens for tokens, _ in bits_of(outputs)][0] == expected(family)[0][0][:3]


def test_log_probabilities_of_prompts_have_the_same_bits_in_every_batch() -> None:
    asks = [replace(ask, params=replace(ask.params, prompt_logprobs=VOCAB, max_tokens=2)) for ask in ASKS]

    def prompts_of(outputs: Sequence[RequestOutput]) -> list[list[dict[int, float]]]:
        return [[{token: entry.logprob for token, entry in (place or {}).items()} for place in output.prompt_logprobs]
                for output in outputs]

    with rig_of("llama") as together, rig_of("llama", max_num_batched_tokens=9) as alone:
        assert prompts_of(together.run(asks)) == prompts_of(alone.run_one_by_one(asks))


@pytest.mark.parametrize("num", [0, 4, VOCAB])
@pytest.mark.parametrize("cell", [PREEMPTED, SCRIPTED, HITS], ids=lambda cell: cell.name)
def test_sampled_tokens_have_the_log_probabilities_of_the_same_prompt(cell: Cell, num: int) -> None:
    """As bits: values, ranks and order, whether kernels report so many or the torch code does."""
    asks = [replace(ask, params=replace(ask.params, logprobs=num)) for ask in ASKS]
    with rig_of("llama", drafter=cell.make_drafter("llama"), **cell.settings) as rig:
        for _ in range(cell.rounds):
            answers = [output.outputs[0] for output in
                       rig.run(asks, after_step=rig.preempt if cell.is_preempted else None)]
        again = [Ask([*ask.prompt, *answer.token_ids], greedy(1, prompt_logprobs=num))
                 for ask, answer in zip(asks, answers, strict=True)]
    with rig_of("llama") as rig:
        prompts = [output.prompt_logprobs or [] for output in rig.run(again)]
    for ask, answer, places in zip(asks, answers, prompts, strict=True):
        assert answer.logprobs == places[len(ask.prompt) :]


@pytest.mark.parametrize("pooling", ["last", "mean"])
def test_embeddings_have_the_same_bits_however_prompts_are_cut(pooling: str, tmp_path: Path) -> None:
    folder, found = str(save_folder(tmp_path / "model", FAMILIES["llama"])), []
    for chunk, at_once in ((112, 1), (7, 3)):
        settings = SETTINGS | {"max_num_batched_tokens": chunk, "max_num_seqs": at_once}
        with LLM(folder, device="cpu", dtype="float32", num_pages=64, **settings) as llm:
            outputs = llm.encode([list(prompt) for prompt in PROMPTS], PoolingParams(pooling=pooling))
        found.append([torch.as_tensor(output.outputs.data).tolist() for output in outputs])
    assert found[0] == found[1]


def refusal(family: str = "llama", dtype: torch.dtype = torch.float32, **settings: Any) -> str:
    with pytest.raises(ValueError) as refused:
        Rig(random_model(FAMILIES[family], dtype, seed=11), **SETTINGS | settings)
    return str(refused.value)


def test_what_cannot_be_exact_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    rates = {"method": "ngram", "num_speculative_tokens": 2, "synthetic_rates": (0.5,)}
    assert "synthetic acceptance" in refusal(speculative_config=rates)
    assert "float64 adds in an order" in refusal(dtype=torch.float64)
    assert "bfloat16 adds in an order" in refusal(dtype=torch.bfloat16)
    assert "torch: it is not exact" in refusal(attention_backend="torch")
    monkeypatch.setitem(FAMILIES, "narrow", FAMILIES["llama"] | {"head_dim": 8})
    assert "the native attention kernel cannot compute layer 0" in refusal("narrow")
    monkeypatch.setattr(native, "available", lambda: False)
    assert "exact mode needs the native kernels" in refusal()


def test_a_mixer_from_outside_is_refused_until_it_declares(monkeypatch: pytest.MonkeyPatch) -> None:
    class OwnMixer(Mixer):
        def __init__(self, *_: Any) -> None: ...

        def bind(self, view: BatchView) -> dict[int, Any]:
            return {}

    monkeypatch.setitem(cached._MIXERS, FullSpec, OwnMixer)
    with pytest.raises(ValueError, match="exact=True: OwnMixer has no exact form, because it lacks a method set_exact"):
        rig_of("llama")


def test_a_model_that_was_exact_can_be_ordinary_again() -> None:
    model = model_of("qwen3_moe")
    with Rig(model, **SETTINGS) as exact:
        tokens = bits_of(exact.run(ASKS))
    with Rig(model, **SETTINGS | {"exact": False}) as ordinary:
        products = model.layers[0].mlp.experts.format._experts
        assert products.name == "experts" and bits_of(ordinary.run(ASKS))[2][0]
    assert tokens == expected("qwen3_moe")


def test_bench_exact_compares_both_modes(capsys: pytest.CaptureFixture[str], tmp_path: Path,
                                         monkeypatch: pytest.MonkeyPatch) -> None:
    folder = str(save_folder(tmp_path / "model", FAMILIES["llama"]))
    asked = ["bench", "exact", folder, "--device", "cpu", "--batch-sizes", "1,3", "--max-tokens", "4", "--rounds", "1"]
    assert cli.main([*asked, "--prompt-len", "70"]) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert [(cell["kind"], cell["batch"]) for cell in found["results"]] == [("decoding", 1), ("decoding", 3),
                                                                           ("prompts", 1)]
    assert all(cell["default_tok_s"] > 0 < cell["exact_tok_s"] for cell in found["results"])
    monkeypatch.setattr(exact_mode, "run_prompts", lambda *_: pytest.fail("something was timed before the refusal"))
    assert cli.main([*asked, "--dtype", "bfloat16"]) != 0
    assert "exact=True: on a CPU the arithmetic of bfloat16 adds in an order" in capsys.readouterr().err


def test_verify_demands_bits(capsys: pytest.CaptureFixture[str], tmp_path: Path,
                             monkeypatch: pytest.MonkeyPatch) -> None:
    folder = str(save_folder(tmp_path / "model", FAMILIES["llama"]))
    ngram = '{"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_min": 1}'
    asked = ["verify", folder, "--exact", "--quick", "--max-tokens", "8", "--device", "cpu"]
    assert cli.main([*asked, "--speculative-config", ngram]) == 0
    shown = capsys.readouterr().out
    assert re.search(r"^exact: \d+ tokens in 10 runs .* bit for bit$", shown, re.MULTILINE)
    product = CpuProduct._native

    def biased(self: CpuProduct, x: torch.Tensor) -> torch.Tensor:
        return product(self, x) * (1 + 1e-6 * (len(x) > 1))

    monkeypatch.setattr(CpuProduct, "_native", biased)
    assert cli.main(asked) == 1
    shown = capsys.readouterr().out
    assert "requests differ in bits" in shown and "the log-probability of token id" in shown
