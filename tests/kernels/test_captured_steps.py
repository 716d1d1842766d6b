"""Whole engines whose steps run as captured ones do: padded to a graph's size, with nothing of the host but its
integers, through Triton kernels alone. On the CPU, under the interpreter: a graph replays just this.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

pytest.importorskip("triton", reason="needs the triton package")

from outrider.cache import manager
from outrider.core import StepForm, Uncaptured
from outrider.core.outputs import RequestOutput
from outrider.core.params import SamplingParams
from outrider.kernels import ops
from outrider.kernels.gpu.attention import sharing as attention_sharing
from outrider.kernels.gpu.attention import splits as attention_splits
from outrider.mixers.paged import triton_backend
from outrider.mixers.paged.triton_backend import TritonBackend
from outrider.mixers.recurrent.triton_backend import TritonRecurrent
from outrider.models.base import Model
from outrider.models.mtp import MTPHead
from outrider.runner.graphs import keys
from outrider.runner.graphs.keys import SamplerForm
from outrider.sample.draw import draw_tokens
from outrider.sample.sampler import sample_chunk
from tests.drafters.blocks import FORMS, make_block
from tests.drafters.checkpoints import make_drafter
from tests.drafters.hybrid_rig import FAMILIES as HYBRIDS_WITH_MODULES
from tests.drafters.hybrid_rig import GLM5_NEXT, QWEN4_EXP, mtp_of, script_with_errors
from tests.drafters.latent_rig import FAMILIES, TOP_K, VOCAB
from tests.drafters.scripted_drafter import ScriptedDrafter
from tests.engine.captured import AsCaptured
from tests.engine.harness import Ask, Rig, choose_drafts, greedy, prompt_of, random_model, tiny_model, tokens_of
from tests.engine.recurrent_rig import HYBRIDS
from tests.engine.varied_drafts import UnequalDrafts, sizes_apart
from tests.models.gemma4 import save_assistant, save_target
from tests.models.oracle import load

K = 2
SETTINGS: dict[str, Any] = {"max_num_batched_tokens": 24, "max_num_seqs": 4, "max_model_len": 64, "overlap": True}
# Prompts in one chunk and in several, beside requests that already yield tokens; one drawn, one that ends at once.
ASKS = [
    Ask(prompt_of(1, 26), greedy(5)),
    Ask([5, 6, 7, 8] * 4, greedy(5)),
    Ask(prompt_of(2, 1), SamplingParams(temperature=1.0, seed=4, max_tokens=5)),
    Ask(prompt_of(3, 5), greedy(1)),
    Ask(prompt_of(4, 18), greedy(3)),
]


@contextmanager
def on_a_card(rig: Rig, form: StepForm = StepForm.WHOLE) -> Iterator[AsCaptured]:
    captured = AsCaptured(rig, form=form, takes_parameters=True)
    backend = TritonBackend(decode_kernel_max_query=1 + rig.engine.limits.max_drafts)
    rig.step.backend = backend
    for cached in (rig.step.cached, getattr(rig.step.drafter, "_cached", None)):
        for mixer in () if cached is None else cached.mixers:
            mixer.backend = backend  # type: ignore[attr-defined]
    if rig.step.recurrent.layers:
        rows = rig.step.recurrent
        rows.backend = TritonRecurrent(rows.backend.mixers, rows.layers, rows.pages)
    with ops.using("triton", ops.prepare_step, ops.commit_step, ops.store_drafts, ops.plan_draft_passes,
                   ops.plan_reading_pass, ops.plan_block_passes, ops.plan_first_slots, ops.forget_pages,
                   ops.count_runs, draw_tokens, sample_chunk):
        yield captured


@contextmanager
def by_lists() -> Iterator[None]:
    """Attention by lists of splits, as with many requests and long contexts."""
    patches: list[tuple[Any, str, Any]] = [
        (triton_backend, "pays_split_list", lambda num_requests, window: True),
        (triton_backend, "MIN_LAYERS_TO_LIST", 1),
        (attention_splits, "least_listed_split", lambda *shape: 16),
        (attention_splits, "decode_config", lambda *shape: attention_splits.DecodeConfig(block_n=16, max_rows=16)),
    ]
    with ExitStack() as stack:
        for module, name, value in patches:
            stack.enter_context(mock.patch.object(module, name, value))
        made = stack.enter_context(mock.patch.object(triton_backend, "list_splits", wraps=attention_splits.list_splits))
        yield
    assert made.call_count > 0


def both_ways(model: Model, way: AbstractContextManager[None] | None = None, form: StepForm = StepForm.WHOLE,
              **settings: Any) -> tuple[AsCaptured, Rig]:
    with Rig(model, **SETTINGS | settings) as rig:
        wanted = tokens_of(rig.run(ASKS))
    with Rig(model, **SETTINGS | settings) as rig, on_a_card(rig, form) as captured, way or nullcontext():
        assert tokens_of(rig.run(ASKS)) == wanted
    assert any(key.has_prompts for key in captured.met) and any(not key.has_prompts for key in captured.met)
    assert any(len(set(batch.num_known)) > 1 for batch in rig.batches), "prompts beside decoding"
    assert captured.turns == ([batch.step for batch in rig.batches] if form is StepForm.SPLIT else [])
    return captured, rig


@contextmanager
def sharing_pages() -> Iterator[list[attention_splits.SplitList]]:
    """Attention by lists, with short common beginnings worth sharing. Gives the lists that were made."""
    made: list[attention_splits.SplitList] = []
    make = attention_splits.list_splits

    def listed(*args: Any, **options: Any) -> attention_splits.SplitList:
        made.append(make(*args, **options))
        return made[-1]

    with (mock.patch.object(attention_splits, "list_splits", listed), by_lists(),
          mock.patch.object(attention_sharing, "LEAST_SHARED", 16), mock.patch.object(manager, "LEAST_SHARED", 16),
          mock.patch.object(manager, "FEWEST_SHARERS", 2), mock.patch.object(keys, "FEW", 2),
          mock.patch.object(attention_splits, "_LEAST_PACK_SPLIT", 16)):
        yield made


def config_of(drafter: str, family: str, folder: Path) -> dict[str, Any]:
    if drafter == "suffix":
        return {"method": "suffix", "num_speculative_tokens": K, "auto": False}
    if drafter == "ngram":
        return {"method": "ngram", "num_speculative_tokens": K, "prompt_lookup_min": 1, "auto": False}
    if drafter in FORMS:
        head_dim = {"llama": 8, "gemma3": 16}[family]
        return make_block(drafter, tiny_model(family, torch.float32), folder, head_dim).speculative(K)
    if drafter == "ngram+eagle3":
        return make_drafter("eagle3", family, folder).speculative(K) | {"method": ["ngram", "eagle3"],
                                                                        "prompt_lookup_min": 1}
    return make_drafter(drafter, family, folder).speculative(K) | {"auto": False}


def long(*values: Any) -> Any:
    return pytest.param(*values, marks=pytest.mark.long)


@pytest.mark.parametrize("drafts", [0, long(1)])
def test_pages_that_requests_share_are_read_once(device: torch.device, drafts: int) -> None:
    """Three requests with a common beginning and one that shares nothing. Steps with prompts read pages for each."""
    common = prompt_of(7, 34)
    asks = [Ask(common[: 34 - n] + prompt_of(n, 2), greedy(5)) for n in range(3)]
    asks.insert(1, Ask(prompt_of(9, 9), greedy(5)))
    settings = SETTINGS | {"max_num_batched_tokens": 48}
    if drafts:
        settings |= {"speculative_config": {"method": "ngram", "num_speculative_tokens": drafts,
                                            "prompt_lookup_min": 1, "auto": False}}
    model = tiny_model("llama", torch.float32)
    with Rig(model, **settings) as rig:
        wanted = tokens_of(rig.run(asks))
    with Rig(model, **settings) as rig, on_a_card(rig) as captured, sharing_pages() as made:
        assert tokens_of(rig.run(asks)) == wanted
    assert len(captured.met) == len(rig.batches)
    assert {key.shares_pages for key in captured.met} == {False, True}
    packed = [int((splits.packs.first_keys > 0).sum()) for splits in made if splits.packs is not None]
    assert max(packed) == 3, "all requests with the common beginning were in packs"


@pytest.mark.parametrize("family", ["llama", long("sliding"), long("gemma3")])
def test_steps_with_prompts_give_the_same_tokens(device: torch.device, family: str) -> None:
    captured, rig = both_ways(tiny_model(family, torch.float32))
    assert len(captured.met) == len(rig.batches), "no step of these needs the host"


@pytest.mark.parametrize(("kind", "family", "listed", "form"), [
    ("ngram", "llama", False, StepForm.WHOLE), ("ngram", "llama", False, StepForm.SPLIT),
    long("eagle3", "llama", False, StepForm.SPLIT), long("ngram", "llama", True, StepForm.WHOLE),
    ("eagle3", "gemma3", True, StepForm.WHOLE), long("dflash_sliding", "llama", False, StepForm.WHOLE),
    long("dspark", "gemma3", True, StepForm.WHOLE), long("ngram+eagle3", "llama", False, StepForm.WHOLE),
])
def test_with_drafts(device: torch.device, kind: str, family: str, listed: bool, form: StepForm,
                     tmp_path: Path) -> None:
    config = config_of(kind, family, tmp_path)
    way = by_lists() if listed else None
    captured, rig = both_ways(tiny_model(family, torch.float32), way, form=form, speculative_config=config)
    assert any(key.has_prompts and key.has_drafts for key in captured.met), "prompts beside drafts"
    assert any(part.num_drafted for result in rig.results for part in result.requests)


@pytest.mark.parametrize(("family", "drafts"), [("llama", False), ("gemma4", False), long("gemma4", True)])
def test_layers_that_only_logits_need_attend_for_logit_rows(device: torch.device, family: str, drafts: bool,
                                                            tmp_path: Path) -> None:
    """The last layer that writes a cache, and those behind it, which read the caches of others."""
    settings: dict[str, Any] = {}
    if family == "gemma4":
        model: Any = load(save_target("shared", tmp_path / "target"))
        if drafts:
            settings["speculative_config"] = {"method": "gemma4_assistant", "num_speculative_tokens": K, "auto": False,
                                              "model": str(save_assistant("shared", tmp_path / "assistant"))}
    else:
        model = tiny_model(family, torch.float32)
    with mock.patch.object(triton_backend, "prefill_attention", wraps=triton_backend.prefill_attention) as attended:
        captured, rig = both_ways(model, **settings)
    with_prompts = sum(key.has_prompts for key in captured.met)
    assert attended.call_count == with_prompts * model.last_writer
    assert model.last_writer < model.num_layers - 1 or family == "llama"


@pytest.mark.parametrize("family", ["mamba2", "gated_delta"])
@pytest.mark.parametrize("caching", [long(False), True])
def test_recurrent_layers(device: torch.device, family: str, caching: bool) -> None:
    """With checkpoints too: one of each request in a captured step."""
    captured, rig = both_ways(random_model(HYBRIDS[family], torch.float32, 3), enable_prefix_caching=caching)
    assert any(key.takes_checkpoints for key in captured.met) == caching
    assert caching == any(result.checkpoints for result in rig.results)


@pytest.mark.parametrize("family", ["nemotron_h", long("qwen3_next")])
def test_modules_of_hybrids(device: torch.device, family: str) -> None:
    """What lies behind the module's attention runs for the last tokens of prompts alone. The drafts stay the same."""
    model = random_model(HYBRIDS_WITH_MODULES[family], torch.float32, 4)
    asks = [Ask(prompt_of(seed, length, VOCAB), SamplingParams(temperature=3.0, seed=seed, max_tokens=7))
            for seed, length in ((1, 26), (5, 5))]  # by the noise that target and module share, drafts are accepted
    rows: list[int] = []

    def watch(head: Any, method: Any, *args: Any) -> Any:
        result = method(head, *args)
        rows.append(len(result[0]))
        return result

    settings = SETTINGS | {"max_num_seqs": 2}
    with Rig(model, drafter=mtp_of(model, K), **settings) as rig:
        wanted, accepted = tokens_of(rig.run(asks)), rig.engine.stats.num_accepted_tokens
    forward = MTPHead.forward
    with (Rig(model, drafter=mtp_of(model, K), **settings) as rig, on_a_card(rig) as captured,
          mock.patch.object(MTPHead, "forward", lambda head, *args: watch(head, forward, *args))):
        assert tokens_of(rig.run(asks)) == wanted
    assert rig.engine.stats.num_accepted_tokens == accepted > 0, "the same drafts"
    assert any(key.has_prompts for key in captured.met) and any(key.has_drafts for key in captured.met)
    assert max(rows) <= 2 * (1 + K), "no pass has results of a whole prompt"


@pytest.mark.long
@pytest.mark.parametrize("family", ["llama", "mamba2", "gated_delta", "kda", "nemotron_h", "deepseek_v32"])
def test_unequal_numbers_of_drafts(device: torch.device, family: str) -> None:
    """Token rows that are no multiple of the requests, through the kernels of every kind of layer. Drafts are scripted,
    or those of a multi-token-prediction module, which must stay the same."""
    has_module = family in (*HYBRIDS_WITH_MODULES, *FAMILIES)
    if has_module:
        model = random_model((HYBRIDS_WITH_MODULES | FAMILIES)[family], torch.float32, 4)
    else:
        model = random_model(HYBRIDS[family], torch.float32, 3) if family in HYBRIDS else tiny_model(family,
                                                                                                     torch.float32)
    asks = [Ask(prompt_of(seed, length, VOCAB), SamplingParams(temperature=3.0, seed=seed, max_tokens=7))
            for seed, length in ((1, 7), (5, 5), (6, 2))]
    with Rig(model, **SETTINGS) as rig:
        wanted = tokens_of(rig.run(asks))
    right = {tuple(ask.prompt): run for ask, (run,) in zip(asks, wanted, strict=True)}
    found: list[int] = []
    for is_captured in (False, True):
        scripted = ScriptedDrafter(K, script_with_errors(right, range(1, K + 2)))
        with Rig(model, drafter=mtp_of(model, K) if has_module else scripted, **SETTINGS) as rig:
            choose_drafts(rig.scheduler, UnequalDrafts(K))
            with on_a_card(rig) if is_captured else nullcontext() as captured, sizes_apart(3):
                assert tokens_of(rig.run(asks)) == wanted
            found.append(rig.engine.stats.num_accepted_tokens)
    assert found[0] == found[1] > 0, "the same drafts"
    assert any(key.tokens % key.requests for key in captured.met if not key.has_prompts)


def assert_captured_with_module(model: Model, asks: list[Ask], settings: dict[str, Any],
                                *operations: ops.Operation[..., Any]) -> None:
    """Captured steps by the Triton kernels of these operations have the tokens and drafts of the references, with the
    model's multi-token-prediction module."""
    with Rig(model, drafter=mtp_of(model, K), **settings) as rig:
        wanted, accepted = tokens_of(rig.run(asks)), rig.engine.stats.num_accepted_tokens
    with Rig(model, drafter=mtp_of(model, K), **settings) as rig, on_a_card(rig) as captured:
        with ops.using("triton", *operations):
            assert tokens_of(rig.run(asks)) == wanted
    assert rig.engine.stats.num_accepted_tokens == accepted, "the same drafts"
    assert any(key.has_prompts for key in captured.met) and any(key.has_drafts for key in captured.met)


@pytest.mark.parametrize(("family", "is_shared"), [("deepseek_v32", False), long("deepseek_v3", False),
                                                   long("deepseek_v32", True), long("glm_moe_dsa", True),
                                                   long("deepseek_v32_fp8", False),
                                                   long("deepseek_v32_modules", False), long("hy_v4", False)])
def test_latent_layers(device: torch.device, family: str, is_shared: bool) -> None:
    """With their multi-token-prediction module, whose passes choose anew or share the first choice. One context crosses
    top-k while it is decoded."""
    changes: dict[str, Any] = {"num_hidden_layers": 2}
    if family != "deepseek_v3":  # which has no indexer
        changes |= {"indexer_types": ["full", "shared"], "index_share_for_mtp_iteration": is_shared}
    model = random_model(FAMILIES[family] | changes, torch.float32, 1)
    asks = [Ask(prompt_of(1, TOP_K - 3, VOCAB), greedy(7)),
            Ask(prompt_of(2, 3, VOCAB), SamplingParams(temperature=2.0, seed=4, max_tokens=6))]
    settings = SETTINGS | {"max_num_seqs": 2, "max_num_batched_tokens": 12, "max_model_len": 48}
    assert_captured_with_module(model, asks, settings, ops.visible_ranges, ops.write_latents, ops.rotate_queries,
                                ops.head_products, ops.choose_positions, ops.latent_attention,
                                ops.dense_latent_attention, ops.read_streams, ops.write_streams)


@pytest.mark.long
def test_chosen_blocks_and_streams(device: torch.device) -> None:
    """With the multi-token-prediction module. One context becomes too long to be chosen whole while it is decoded."""
    model = random_model(QWEN4_EXP, torch.float32, 4)
    asks = [Ask(prompt_of(1, 8, VOCAB), greedy(5)),
            Ask(prompt_of(2, 13, VOCAB), SamplingParams(temperature=3.0, seed=4, max_tokens=3))]
    settings = SETTINGS | {"max_num_seqs": 2, "max_num_batched_tokens": 16, "max_model_len": 32}
    assert_captured_with_module(model, asks, settings, ops.visible_ranges, ops.write_block_keys,
                                ops.write_keys_values, ops.choose_positions, ops.block_attention, ops.join_streams,
                                ops.stream_gates, ops.mix_streams)


@pytest.mark.long
def test_latent_attention_to_chosen_blocks(device: torch.device) -> None:
    """GLM5-Next with its module. One context becomes too long to be chosen whole while it is decoded."""
    model = random_model(GLM5_NEXT, torch.float32, 4)
    asks = [Ask(prompt_of(1, 8, VOCAB), greedy(5)),
            Ask(prompt_of(2, 13, VOCAB), SamplingParams(temperature=3.0, seed=4, max_tokens=3))]
    settings = SETTINGS | {"max_num_seqs": 2, "max_num_batched_tokens": 16, "max_model_len": 32}
    assert_captured_with_module(model, asks, settings, ops.visible_ranges, ops.write_latents, ops.write_pooled_keys,
                                ops.list_blocks, ops.rotate_queries, ops.head_products, ops.choose_positions,
                                ops.latent_attention, ops.dense_latent_attention, ops.read_streams, ops.write_streams,
                                ops.limited_silu_mul)


# Sampling parameters

BIAS = {token: (-1) ** token * 3.0 for token in range(40, 90)}
PARAMETERS: dict[str, dict[str, Any]] = {
    "filters": {"top_k": 20, "top_p": 0.8, "min_p": 0.01},
    "top-p": {"top_p": 0.6},
    "top-k": {"top_k": 5},
    "penalties": {"repetition_penalty": 1.4, "presence_penalty": 0.5, "frequency_penalty": 0.3},
    "lists": {"logit_bias": BIAS, "bad_words_token_ids": ((5,), (7, 8), (6, 9, 11)), "min_tokens": 6,
              "stop_token_ids": [3, 4, 9]},
    "allowed": {"allowed_token_ids": [6, 7, 8], "temperature": 0.0},
    "logprobs": {"logprobs": 4},
}


def asks_with(*names: str, max_tokens: int = 6) -> list[Ask]:
    """One request for each, one that asks for all of them, and two that ask for nothing."""
    every = [PARAMETERS[name] for name in names]
    every.append({key: value for params in every for key, value in params.items()})
    asked = [SamplingParams(**{"temperature": 0.9, "seed": i, "max_tokens": max_tokens} | params)
             for i, params in enumerate(every)]
    prompts = [[5, 6, 7, 8] * 4, *(prompt_of(i, 3 + 2 * i) for i in range(1, len(asked)))]
    plain = [Ask(prompt_of(9, 11), greedy(max_tokens)),
             Ask([9, 8, 7] * 4, SamplingParams(temperature=1.0, seed=4, max_tokens=max_tokens))]
    return [Ask(prompt, params) for prompt, params in zip(prompts, asked, strict=True)] + plain


def logprobs_of(outputs: list[RequestOutput]) -> list[dict[int, float]]:
    """The log-probabilities of every token of every output that has any."""
    samples = [sample for output in outputs for sample in output.outputs if sample.logprobs is not None]
    return [{token: entry.logprob for token, entry in named.items()} for one in samples for named in one.logprobs]


def both_ways_with(asks: list[Ask], preempts: bool = False, uncaptured: Collection[Uncaptured] = (),
                   **settings: Any) -> tuple[AsCaptured, Rig]:
    """The reference's tokens and log-probabilities, by captured steps alone but for the named reasons."""
    model = tiny_model("llama", torch.float32)
    with Rig(model, **SETTINGS | settings) as rig:
        wanted = rig.run(asks)
    with Rig(model, **SETTINGS | settings) as rig, on_a_card(rig) as captured:
        made = rig.run(asks, after_step=rig.preempt if preempts else None)
        assert tokens_of(made) == tokens_of(wanted)
        for one, other in zip(logprobs_of(made), logprobs_of(wanted), strict=True):
            assert one.keys() == other.keys()
            assert list(one.values()) == pytest.approx(list(other.values()), abs=1e-4)
    assert captured.reasons.keys() <= set(uncaptured), "none of these runs uncaptured"
    return captured, rig


@pytest.mark.parametrize(("drafter", "preempts"), [long("none", True), ("ngram", True), long("eagle3", False)])
def test_every_parameter_in_captured_steps(device: torch.device, drafter: str, preempts: bool, tmp_path: Path) -> None:
    """Each alone and all together, beside requests that ask for nothing."""
    settings: dict[str, Any] = {"max_num_seqs": 8, "max_num_batched_tokens": 64}
    if drafter != "none":
        settings["speculative_config"] = config_of(drafter, "llama", tmp_path)
    captured, rig = both_ways_with(asks_with(*PARAMETERS), preempts, **settings)
    assert {key.sampler for key in captured.met} >= {SamplerForm.FULL}
    assert (rig.scheduler.stats.num_preemptions > 0) == preempts
    drafted = sum(part.num_drafted for result in rig.results for part in result.requests)
    assert (drafted > 0) == (drafter != "none")
    if drafter == "ngram":
        assert any(part.num_accepted for result in rig.results for part in result.requests)


@pytest.mark.parametrize("drafter", [long("suffix"), long("draft_model"), "eagle3", long("eagle"), long("mtp")])
def test_all_parameters_with_other_drafters(device: torch.device, drafter: str, tmp_path: Path) -> None:
    """In two requests, preempted, beside one that asks for nothing. The sampler is the one of n-gram drafts; heads and
    draft models draw with a request's temperature too. A preempted request that finds its pages again has slots of a
    head to fill, before a step that is captured like all others."""
    every = asks_with(*(name for name in PARAMETERS if name != "allowed"))[-3]
    allowed = asks_with("allowed")[0]  # few tokens, so that lookups find some
    plain = Ask([9, 8, 7] * 4, SamplingParams(temperature=1.0, seed=4, max_tokens=5))
    config = config_of(drafter, "llama", tmp_path)
    captured, rig = both_ways_with([every, allowed, plain], True, max_num_seqs=3,
                                   overlap=drafter != "suffix", speculative_config=config)
    assert any(key.sampler is SamplerForm.FULL and key.has_drafts for key in captured.met)
    assert rig.scheduler.stats.num_preemptions > 0
    assert any(part.num_drafted for result in rig.results for part in result.requests)


def test_penalties_across_preemption(device: torch.device) -> None:
    """Counts are built anew when a request resumes, with its settled outputs."""
    captured, rig = both_ways_with(asks_with("penalties"), preempts=True)
    assert rig.scheduler.stats.num_preemptions > 0
    assert any(key.sampler is SamplerForm.FULL for key in captured.met)


def test_a_mates_parameters_change_no_token(device: torch.device) -> None:
    """Requests that ask for nothing have the same tokens whichever sampler their mates make the step take."""
    plain = asks_with()[-2:]
    found = []
    for mates in ([], [Ask(prompt_of(5, 4), SamplingParams(max_tokens=9, top_p=0.5, presence_penalty=0.5, seed=1))]):
        with Rig(tiny_model("llama", torch.float32), **SETTINGS) as rig, on_a_card(rig) as captured:
            found.append(tokens_of(rig.run([*plain, *mates]))[:2])
        found.append([key.sampler for key in captured.met if not key.has_prompts][0])
    assert found[0] == found[2] and found[1::2] == [*SamplerForm]
