"""Llama 4's own: chunks of a text across steps, drafts and backends, files of the first release, quantised experts.

`test_classics.py` compares logits, text, chunks of prompts, hits, preemption and drafts with transformers.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from outrider.adapters import LoRARequest
from outrider.cache.kinds import ChunkedSpec, FullSpec
from outrider.formats.scaled import ScaledExperts
from outrider.kernels import cpu as native
from outrider.layers import Experts, Router, find_modules
from outrider.llm import LLM
from outrider.models.config import ConfigError
from outrider.models.registry import build_model
from tests.adapters.folders import make_adapter, peft_greedy
from tests.drafters.scripted_drafter import ScriptedDrafter
from tests.engine.harness import Ask, Rig, greedy, prompt_of, tokens_of
from tests.models import quantized_files
from tests.models.oracle import all_logits, hf_config, hf_logits, load, make_folder
from tests.models.oracle import tokens_of as ids_of
from tests.models.test_oracle import edit_config
from tests.unit.test_cache_manager import pages_held

Folders = Callable[[str], Path]
CHUNK, PAGE = 24, 16  # of "llama4_dense": edges lie at the borders of pages and between them
SETTINGS: dict[str, Any] = {"max_model_len": 160, "max_num_batched_tokens": 40, "page_size": PAGE, "num_pages": 64}
PROMPTS = [prompt_of(1, 47), prompt_of(2, 5), prompt_of(3, 70)]
ASKS = [Ask(prompt, greedy(40, ignore_eos=True)) for prompt in PROMPTS]


def config_of(family: str, **changes: Any) -> dict[str, Any]:
    return hf_config(family).to_dict() | {"architectures": ["Llama4ForCausalLM"]} | changes


@pytest.fixture(scope="module")
def texts(folder_of: Folders) -> list[list[list[int]]]:
    """The texts of the requests one by one, their prompts whole, without drafts and without hits."""
    with Rig(load(folder_of("llama4_dense"), torch.float64), **SETTINGS | {"max_num_batched_tokens": 80},
             enable_prefix_caching=False) as rig:
        return tokens_of(rig.run_one_by_one(ASKS))


@pytest.mark.parametrize("every", [2, pytest.param(7, marks=pytest.mark.long)])
def test_drafts_may_cross_the_edge_of_a_chunk(folder_of: Folders, texts: Any, every: int) -> None:
    """Some drafts are right and some are wrong, on both sides of edges."""
    answers = {tuple(prompt): text for prompt, (text,) in zip(PROMPTS, texts, strict=True)}

    def script(prompt: tuple[int, ...], _: int) -> list[int]:
        return [token if (len(prompt) + at) % every else token ^ 1 for at, token in enumerate(answers[prompt])]

    with Rig(load(folder_of("llama4_dense"), torch.float64), drafter=ScriptedDrafter(5, script), **SETTINGS) as rig:
        for _ in range(2):
            assert tokens_of(rig.run(ASKS, after_step=rig.preempt)) == texts
        assert rig.scheduler.cache.stats.hit_tokens > 0 and rig.scheduler.stats.num_preemptions > 0
        assert any(part.num_drafted for result in rig.results for part in result.requests)


@pytest.mark.long
def test_a_draft_model_with_chunks_drafts_what_it_would_say(folder_of: Folders, texts: Any) -> None:
    """Its own text is accepted whole, also where the passes of one step lie in two chunks."""
    folder = str(folder_of("llama4_dense"))
    speculative = {"method": "draft_model", "model": folder, "num_speculative_tokens": 4, "auto": False}
    with LLM(folder, dtype="float64", device="cpu", skip_tokenizer_init=True, max_num_seqs=4,
             speculative_config=speculative, **SETTINGS | {"num_pages": 256}) as llm:
        for _ in range(2):
            done = llm.generate(PROMPTS, greedy(40, ignore_eos=True), use_tqdm=False)
            assert [[output.outputs[0].token_ids] for output in done] == texts
        first, *_, last = llm.engine.stats.accepted_per_position
        assert llm.engine.stats.num_hit_tokens > 0 and first >= 2 * 3 * 7 and last >= first - 2 * 3


def test_a_request_keeps_the_pages_of_its_chunk_alone(folder_of: Folders, texts: Any) -> None:
    held: list[int] = []

    def look() -> None:
        cache = rig.scheduler.cache
        chunked = [group.index for group in cache.groups if isinstance(group.spec, ChunkedSpec)]
        for request in rig.scheduler._running:
            if request.settled.at_least > 2 * CHUNK:
                pages = pages_held(cache, request.id)
                held.extend(pages[group] for group in chunked)
                assert max(pages) >= 4, "layers that see the whole text keep it"

    with Rig(load(folder_of("llama4_dense"), torch.float64), **SETTINGS) as rig:
        assert {type(claim.spec) for claim in rig.step.model.cache_layers()} == {ChunkedSpec, FullSpec}
        assert tokens_of(rig.run(ASKS[2:], after_step=look)) == texts[2:]
    assert held and max(held) <= 3 and min(held) <= 2


@pytest.mark.parametrize("backend", [pytest.param("flex", marks=pytest.mark.long), "native"])
def test_backends_agree(folder_of: Folders, texts: Any, backend: str) -> None:
    if backend == "native" and not native.available():
        pytest.skip(native.reason())
    dtype = torch.float32 if backend == "native" else torch.float64
    asks = ASKS if backend == "native" else [Ask(PROMPTS[0], greedy(12, ignore_eos=True))]  # flex reads the whole pool
    with Rig(load(folder_of("llama4_dense"), dtype), attention_backend=backend, **SETTINGS | {"num_pages": 48}) as rig:
        found = tokens_of(rig.run(asks))
    assert found == [[text[: len(own[0])] for text in wanted] for own, wanted in zip(found, texts, strict=False)]
    assert [len(own[0]) for own in found] == [ask.params.max_tokens for ask in asks]


# Files


def test_configs_of_the_first_release_mean_the_same(folder_of: Folders, tmp_path: Path) -> None:
    """Their list of layers without a rope is empty, the switch of tempered layers is a number, and theta and scaling
    are keys of their own."""
    folder, tokens = make_folder("llama4", tmp_path / "llama4"), ids_of(seed=4, count=60)
    before = all_logits(load(folder), tokens)
    rope = dict(config_of("llama4")["rope_parameters"])
    edit_config(folder, no_rope_layers=[], attn_temperature_tuning=4, moe_layers=None, layer_types=None,
                rope_theta=rope.pop("rope_theta"), rope_scaling=rope, rope_parameters=None, for_llm_compressor=False)
    assert torch.equal(all_logits(load(folder), tokens), before)


@pytest.mark.parametrize(("key", "value", "says"), [
    ("attention_chunk_size", None, "attention_chunk_size is missing"),
    ("attention_chunk_size", 0, "attention_chunk_size must be an integer from 1"),
    ("layer_types", ["sliding_attention"] * 4, "layer_types=.* layers: full_attention or chunked_attention"),
    ("layer_types", ["full_attention"] * 3, "layer_types=.* each of the 4 layers"),
    ("no_rope_layers", [1, 0], "no_rope_layers=.* one entry for each of the 4 layers"),
    ("num_experts_per_tok", 9, "num_experts_per_tok=9 .* at most num_local_experts .8"),
    ("rope_parameters", {"rope_type": "yarn", "factor": 4.0}, "rope_parameters=.* default, linear, llama3"),
    ("hidden_act", "gelu", "hidden_act='gelu' is not supported"),
    ("floor_scale", 0, "floor_scale must be an integer from 1"),
    ("sliding_window", 16, "sliding_window=16: Outrider does not read this"),
])
def test_unsupported_values_are_refused(key: str, value: Any, says: str) -> None:
    with pytest.raises(ConfigError, match=f"config.json: .*{says}"):
        build_model(config_of("llama4", **{key: value}), dtype=torch.float32, device="meta")


def test_quantised_files_hold_their_experts_one_by_one(tmp_path: Path) -> None:
    """As tools write them. The same numbers in the tensors of all experts are transformers' model."""
    form, tokens = quantized_files.FORMS["FP8_DYNAMIC"], ids_of(seed=1, count=60)
    folder = make_folder("llama4", tmp_path / "numbers")
    config = config_of("llama4", quantization_config=form.settings)
    numbers = quantized_files.save_form(tmp_path / "codes", form, config)
    stored = {name: numbers[name] for name in load_file(folder / "model.safetensors") if name in numbers}
    for layer in range(4):
        prefix = f"model.layers.{layer}.feed_forward.experts"
        gate, up, down = (torch.stack([numbers[f"{prefix}.{expert}.{part}_proj.weight"].T for expert in range(8)])
                          for part in ("gate", "up", "down"))
        stored |= {f"{prefix}.gate_up_proj": torch.cat((gate, up), dim=-1), f"{prefix}.down_proj": down}
    save_file({name: tensor.contiguous() for name, tensor in stored.items()}, folder / "model.safetensors",
              metadata={"format": "pt"})
    expected = hf_logits(folder, tokens)
    for keeps in (False, True):
        model = load(tmp_path / "codes", keep_quantized=keeps)
        assert {isinstance(experts.format, ScaledExperts) for experts in find_modules([model], Experts)} == {keeps}
        assert (all_logits(model, tokens) - expected).abs().max() < 1e-4 * expected.abs().max()


def test_experts_get_their_score_before_they_compute(folder_of: Folders) -> None:
    """An expert is not linear: the score of its result would make another model, and the text would still look fine."""
    tokens, expected = ids_of(seed=1, count=20), hf_logits(folder_of("llama4"), ids_of(seed=1, count=20))
    model = load(folder_of("llama4"))
    assert {router.rule.scoring for router in find_modules([model], Router)} == {"sigmoid"}
    for layer in model.layers:
        assert type(layer.mlp).__name__ == "ScaledInputMoE"
        layer.mlp.__class__ = layer.mlp.__class__.__mro__[1]  # the sum of weighted results
    assert (all_logits(model, tokens) - expected).abs().max() > 1e-2


def test_adapters_change_linear_layers_and_not_the_joint_experts(tmp_path: Path) -> None:
    folder, prompt = make_folder("llama4_dense", tmp_path / "model"), ids_of(seed=3, count=30).tolist()
    modules = [f"{name}_proj" for name in ("q", "k", "v", "o", "gate", "up", "down")]  # PEFT does not take the router
    linear = make_adapter(folder, tmp_path / "linear", 1, target_modules=modules)
    experts = make_adapter(folder, tmp_path / "experts", 2, target_modules=["q_proj"],
                           target_parameters=["feed_forward.experts.down_proj"])
    settings: dict[str, Any] = {"dtype": "float64", "device": "cpu", "enable_lora": True, "max_num_seqs": 2,
                                "num_pages": 64, "max_model_len": 64, "skip_tokenizer_init": True,
                                "lora_memory_bytes": 16 << 20}
    with LLM(str(folder), **settings) as llm:
        (done,) = llm.generate([prompt], greedy(8, ignore_eos=True), use_tqdm=False,
                               lora_request=LoRARequest("linear", 1, str(linear)))
        assert done.outputs[0].token_ids == peft_greedy(folder, linear, prompt, 8)
        with pytest.raises(ValueError, match="feed_forward.experts.*biases or transposed weights"):
            llm.generate([prompt], greedy(2), use_tqdm=False, lora_request=LoRARequest("experts", 2, str(experts)))
