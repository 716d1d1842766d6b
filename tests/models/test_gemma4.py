"""Gemma 4 against transformers: logits and text of every shape, without pages and through the engine; its checkpoints;
and the pages it takes."""

from __future__ import annotations

import json
import shutil
from collections import deque
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from outrider.cache.groups import CacheLayout, LayerCache, plan_groups
from outrider.cache.kinds import FullSpec, SlidingSpec, pages_for
from outrider.cache.manager import CacheManager
from outrider.cache.pages import PagePool
from outrider.core import Finish, Limits, RequestResult, ScheduledBatch, StepResult
from outrider.core.params import SamplingParams
from outrider.layers import StepContext
from outrider.mixers import WantedRows
from outrider.models.config import ConfigError, ConfigReader
from outrider.models.gemma4_assistant import build_assistant
from outrider.models.registry import build_model
from outrider.models.sources.folder import eos_token_ids, read_config
from outrider.models.sources.model_source import WeightError
from outrider.sched.request import Request, State
from outrider.sched.scheduler import Scheduler
from outrider.speculation.draft_counts import FixedDrafts
from outrider.speculation.step_drafts import StepDrafts
from tests.engine.harness import Ask, Rig
from tests.engine.harness import greedy as greedy_params
from tests.engine.harness import tokens_of as outputs_of
from tests.models.gemma4 import NOT_UNIFIED, TARGETS, save_target, spread
from tests.models.oracle import DenseAttend, all_logits, hf_model, load, tokens_of
from tests.unit.made_requests import made_request
from tests.unit.test_cache_manager import pages_held

Folders = Callable[[str], Path]
ALL = pytest.mark.parametrize("name", TARGETS)
BENCH = Path(__file__).parents[2] / "bench" / "configs"


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    root = tmp_path_factory.mktemp("gemma4")
    return cache(lambda name: save_target(name, root / name))


@pytest.fixture(scope="module")
def theirs(folder_of: Folders) -> Callable[[str], Any]:
    return cache(lambda name: hf_model(folder_of(name)))


def hf_logits(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return model(tokens[None]).logits[0]


def edited(folder: Path, path: Path, change: Callable[[dict[str, Any]], dict[str, Any]],
           rename: Callable[[str], str] = str, **tensors: torch.Tensor) -> Path:
    """A copy of a checkpoint with another config, other names and more tensors."""
    path.mkdir()
    (path / "config.json").write_text(json.dumps(change(json.loads((folder / "config.json").read_text()))))
    held = {rename(name): tensor for name, tensor in load_file(folder / "model.safetensors").items()}
    save_file(held | tensors, path / "model.safetensors")
    return path


# Arithmetic


@ALL
def test_logits_equal_transformers(folder_of: Folders, theirs: Callable[[str], Any], name: str) -> None:
    tokens = tokens_of(seed=1, count=80)  # five windows
    logits = all_logits(load(folder_of(name)), tokens)
    assert logits.dtype == torch.float32
    assert (logits - hf_logits(theirs(name), tokens)).abs().max() < 1e-4


@ALL
def test_chunked_equals_whole(folder_of: Folders, name: str) -> None:
    model, tokens = load(folder_of(name), torch.float64), tokens_of(seed=2, count=60)
    whole, chunked = all_logits(model, tokens), all_logits(model, tokens, chunks=(1, 15, 1, 2, 30))
    assert whole.dtype == torch.float64
    assert (whole - chunked).abs().max() < 1e-11


@ALL
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
def test_text_through_the_engine_equals_transformers(folder_of: Folders, theirs: Callable[[str], Any], name: str,
                                                     dtype: torch.dtype) -> None:
    """Pages, chunks, hits and batch mates; prompts of one token to several windows, texts across the window's edge."""
    prompts = [tokens_of(seed, count).tolist() for seed, count in ((3, 1), (4, 12), (5, 15), (6, 50))]
    expected = []
    for prompt in prompts:
        text = theirs(name).generate(torch.tensor([prompt]), max_new_tokens=24, do_sample=False, eos_token_id=None)
        expected.append([text[0, len(prompt) :].tolist()])
    assert all(len(set(text)) > 6 for (text,) in expected), "a constant text would hide mistakes"
    asks = [Ask(prompt, greedy_params(24)) for prompt in prompts]
    with Rig(load(folder_of(name), dtype), max_num_batched_tokens=13, max_num_seqs=3, num_pages=100) as rig:
        assert outputs_of(rig.run(asks)) == expected
        assert outputs_of(rig.run(asks)) == expected
        assert rig.scheduler.cache.stats.hit_tokens > 0
        assert any(not all(batch.samples) for batch in rig.batches) and max(b.num_requests for b in rig.batches) == 3


@ALL
def test_bfloat16_is_near_float64(folder_of: Folders, name: str) -> None:
    """The tiny models amplify rounding, so transformers' own error is the yardstick; over several texts, since a near
    tie between experts changes a token row altogether."""
    exact, narrow = load(folder_of(name), torch.float64), load(folder_of(name), torch.bfloat16)
    reference, ours, theirs = hf_model(folder_of(name), torch.bfloat16), 0.0, 0.0
    for seed in range(5, 10):
        tokens = tokens_of(seed, count=40)
        wanted, logits = all_logits(exact, tokens), all_logits(narrow, tokens)
        assert logits.dtype == torch.float32
        ours += (logits - wanted).abs().median().item()
        theirs += (hf_logits(reference, tokens) - wanted).abs().median().item()
    assert ours < 1.2 * theirs


@ALL
def test_taps_are_the_residual_stream(folder_of: Folders, theirs: Callable[[str], Any], name: str) -> None:
    tokens = tokens_of(seed=4, count=40)
    with torch.no_grad():
        states = theirs(name).model(tokens[None], output_hidden_states=True).hidden_states
    model = load(folder_of(name))
    last = model.num_layers
    hidden = model.forward(tokens, StepContext(DenseAttend(model), torch.arange(40)), aux_layers=(0, 2, last - 1, last))
    for state, layer in zip(hidden.aux_states, (0, 2, last - 1), strict=False):
        torch.testing.assert_close(state, states[layer][0], atol=1e-3, rtol=1e-4)
    assert torch.equal(hidden.aux_states[3], hidden.before_norm)
    torch.testing.assert_close(hidden.final, states[last][0], atol=1e-4, rtol=1e-4)  # their last is after the norm


@ALL
def test_some_token_rows_of_the_last_layer_are_those_of_all(folder_of: Folders, name: str) -> None:
    model, tokens, rows = load(folder_of(name)), tokens_of(seed=5, count=30), torch.tensor([29, 3, 3, 11])
    whole = model.forward(tokens, StepContext(DenseAttend(model), torch.arange(30)))
    hidden = model.forward(tokens, StepContext(DenseAttend(model), torch.arange(30)), rows=WantedRows(rows))
    torch.testing.assert_close(hidden.final, whole.final[rows])
    torch.testing.assert_close(hidden.before_norm, whole.before_norm[rows])


@ALL
@pytest.mark.parametrize("from_aux", [False, True])
def test_layers_behind_the_last_cache_are_computed_for_the_wanted_rows(
    folder_of: Folders, name: str, from_aux: bool
) -> None:
    """Unless an auxiliary state asks for all token rows of them."""
    model, tokens, rows = load(folder_of(name)), tokens_of(seed=5, count=30), torch.tensor([27, 28, 29])
    last = model.num_layers - 1
    aux_layers, readers = (last,) if from_aux else (), range(model.last_writer + 1, model.num_layers)
    whole = model.forward(tokens, StepContext(DenseAttend(model), torch.arange(30)), aux_layers)
    attend = DenseAttend(model)
    seen: dict[int, int] = {}

    def watched(layer: int) -> Callable[..., Any]:
        def mix(q: torch.Tensor, k: torch.Tensor | None, v: torch.Tensor | None) -> torch.Tensor:
            seen[layer] = len(q)
            return attend.attend(layer, q, k, v)

        mix.fused = mix.read_fused = lambda *_: None  # type: ignore[attr-defined]
        return mix

    hidden = model.forward(tokens, StepContext(attend, torch.arange(30)), aux_layers,
                           WantedRows(rows, lambda: {layer: watched(layer) for layer in readers}))
    torch.testing.assert_close(hidden.final, whole.final[rows])
    torch.testing.assert_close(hidden.before_norm, whole.before_norm[rows])
    for state, wanted in zip(hidden.aux_states, whole.aux_states, strict=True):
        assert torch.equal(state, wanted)
    assert seen == ({} if from_aux else dict.fromkeys(readers, 3))
    assert len(readers) == sum(layer.reads is not None for layer in model.cache_layers())


def test_suppressed_tokens_are_never_said(folder_of: Folders, tmp_path: Path) -> None:
    folder = shutil.copytree(folder_of("dense"), tmp_path / "suppressed")
    prompt = tokens_of(seed=3, count=12).tolist()
    model = hf_model(folder)
    options = {"max_new_tokens": 16, "do_sample": False, "eos_token_id": None}
    free = model.generate(torch.tensor([prompt]), **options)[0, 12:].tolist()
    suppressed = sorted(set(free))[:4]
    (folder / "generation_config.json").write_text(json.dumps({"suppress_tokens": suppressed}))
    text = model.generate(torch.tensor([prompt]), suppress_tokens=suppressed, **options)[0, 12:].tolist()
    ours = load(folder)
    with Rig(ours) as rig:
        assert outputs_of(rig.run([Ask(prompt, greedy_params(16))])) == [[text]]
    assert not set(text) & set(suppressed)
    assert all_logits(ours, torch.tensor(prompt))[:, suppressed].isneginf().all()


# Checkpoints


def multimodal(config: dict[str, Any]) -> dict[str, Any]:
    return {"architectures": ["Gemma4ForConditionalGeneration"], "model_type": "gemma4", "text_config": config,
            "vision_config": {"hidden_size": 8}}


def under_language_model(name: str) -> str:
    return name.replace("model.", "model.language_model.", 1)


def test_the_language_part_of_a_multimodal_checkpoint(folder_of: Folders, tmp_path: Path) -> None:
    others = {"model.vision_tower.encoder.weight": torch.ones(2), "model.embed_audio.projection.weight": torch.ones(2)}
    folder = edited(folder_of("shared"), tmp_path / "multimodal", multimodal, under_language_model, **others)
    tokens = tokens_of(seed=1, count=40)
    assert torch.equal(all_logits(load(folder), tokens), all_logits(load(folder_of("shared")), tokens))
    assert eos_token_ids(folder) == (2,), "as its text config says"
    save_file({"model.tower.weight": torch.ones(2), **load_file(folder / "model.safetensors")},
              folder / "model.safetensors")
    with pytest.raises(WeightError, match="left over: model.tower.weight"):
        load(folder)


@pytest.mark.parametrize("whole", [False, True], ids=["text", "multimodal"])
def test_unified_checkpoints(tmp_path: Path, whole: bool) -> None:
    import transformers as tf

    text = tf.Gemma4UnifiedTextConfig(**{k: v for k, v in TARGETS["dense"].items() if k not in NOT_UNIFIED})
    if whole:
        vision = tf.Gemma4UnifiedVisionConfig(mm_embed_dim=64, mm_posemb_size=8, output_proj_dims=64, patch_size=4)
        audio = tf.Gemma4UnifiedAudioConfig(audio_embed_dim=16)
        config = tf.Gemma4UnifiedConfig(text_config=text, vision_config=vision, audio_config=audio)
        model = tf.Gemma4UnifiedForConditionalGeneration(config)
    else:
        model = tf.Gemma4UnifiedForCausalLM(text)
    spread(model, "unified")
    model.eval().save_pretrained(tmp_path)
    tokens = tokens_of(seed=1, count=60)
    assert (all_logits(load(tmp_path), tokens) - hf_logits(model, tokens)).abs().max() < 1e-4


def test_a_multimodal_checkpoint_as_transformers_saves_it(tmp_path: Path) -> None:
    import transformers as tf

    heads = {"num_attention_heads": 2, "num_hidden_layers": 1, "hidden_size": 16}
    vision = tf.Gemma4VisionConfig(intermediate_size=16, num_key_value_heads=2, head_dim=8, **heads)
    audio = tf.Gemma4AudioConfig(output_proj_dims=16, **heads)
    config = tf.Gemma4Config(text_config=tf.Gemma4TextConfig(**TARGETS["dense"]), vision_config=vision,
                             audio_config=audio)
    model = tf.Gemma4ForConditionalGeneration(config)
    spread(model.model.language_model, "whole")
    model.eval().save_pretrained(tmp_path)
    tokens = tokens_of(seed=1, count=40)
    assert (all_logits(load(tmp_path), tokens) - hf_logits(model, tokens)).abs().max() < 1e-4


def test_configs_with_the_older_keys(folder_of: Folders, tmp_path: Path) -> None:
    def older(config: dict[str, Any]) -> dict[str, Any]:
        dropped = ("per_layer_config", "rope_parameters")
        return {k: v for k, v in config.items() if k not in dropped} | {
            "global_head_dim": 32, "num_global_key_value_heads": 1}

    folder = edited(folder_of("dense"), tmp_path / "older", older)
    tokens = tokens_of(seed=1, count=40)
    assert torch.equal(all_logits(load(folder), tokens), all_logits(load(folder_of("dense")), tokens))


def test_projections_of_layers_that_read_another_are_ignored(folder_of: Folders, tmp_path: Path) -> None:
    extra = {"model.layers.4.self_attn.k_proj.weight": torch.ones(16, 64),
             "model.layers.5.self_attn.k_norm.weight": torch.ones(32)}
    folder = edited(folder_of("shared"), tmp_path / "extra", dict, **extra)
    tokens = tokens_of(seed=1, count=20)
    assert torch.equal(all_logits(load(folder), tokens), all_logits(load(folder_of("shared")), tokens))
    owner = {"model.layers.2.self_attn.v_norm.weight": torch.ones(16)}
    with pytest.raises(WeightError, match="left over: model.layers.2"):
        load(edited(folder_of("shared"), tmp_path / "owner", dict, **owner))


REFUSED: dict[str, dict[str, Any]] = {
    "use_bidirectional_attention": {"use_bidirectional_attention": "all"},
    "hidden_activation": {"hidden_activation": "silu"},
    "top_k_experts": {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 5, "moe_intermediate_size": 8},
    "num_kv_shared_layers": {"num_kv_shared_layers": 5},
    "head_count": {"per_layer_config": {"3": {"head_count": 2}}},
    "vocab_size_per_layer_input": {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 100},
    "layer_types": {"layer_types": ["sliding_attention"]},
}


@pytest.mark.parametrize("key", REFUSED)
def test_what_is_not_supported_is_refused_by_name(folder_of: Folders, key: str) -> None:
    with pytest.raises(ConfigError, match=key):
        build_model(read_config(folder_of("dense")) | REFUSED[key], dtype=torch.float32, device="cpu")


# Memory


def test_layers_say_what_they_keep_and_whose_they_read(folder_of: Folders) -> None:
    sliding, full = SlidingSpec(2, 16, 4, 16), FullSpec(1, 32, 4)
    dense = load(folder_of("dense")).cache_layers()
    assert dense == [*(LayerCache(i, sliding) for i in range(3)), LayerCache(3, full)]
    shared = load(folder_of("shared"))
    assert [layer.reads for layer in shared.cache_layers()] == [None, None, None, None, 2, 3]
    assert [layer.writes for layer in shared.attention_layers] == [True] * 4 + [False] * 2
    groups = plan_groups(shared.cache_layers())
    assert groups.places[4] == groups.places[2] and groups.places[5] == groups.places[3]
    assert sorted(i for group in groups.groups for i in group.layers) == [0, 1, 2, 3]


def large_layout() -> CacheLayout:
    """The layout of the 4B shapes with their assistant, without their weights."""
    options: dict[str, Any] = {"dtype": torch.bfloat16, "device": torch.device("meta"), "max_len": 16}
    target = build_model(read_config(BENCH / "gemma4-4b"), **options)
    config = ConfigReader(read_config(BENCH / "gemma4-4b-assistant"))
    assistant = build_assistant(config, target, first_layer=30, **options)  # type: ignore[arg-type]
    layout = plan_groups(target.cache_layers() + assistant.cache_layers())
    assert [layout.places[30 + i] for i in range(4)] == [layout.places[28]] * 3 + [layout.places[29]]
    return layout


def test_little_of_a_page_is_padding(folder_of: Folders) -> None:
    assert large_layout().padding < 0.10
    for name in TARGETS:
        assert plan_groups(load(folder_of(name)).cache_layers()).padding < 0.10


class FakeRunner:
    """Answers one step late that every draft but the last was right, until the request is as long as it may be."""

    def __init__(self, scheduler: Scheduler, request: Request) -> None:
        self.scheduler, self.known, self.end_len = scheduler, request.prompt_len, request.end_len
        self._queue: deque[ScheduledBatch] = deque()

    def step(self, look: Callable[[], None]) -> None:
        """look: when a step is scheduled and none of the results out has been read."""
        batch = self.scheduler.schedule()
        if batch is not None:
            self._queue.append(batch)
        look()
        if batch is None or len(self._queue) > 1:
            self.scheduler.update(self._answer(self._queue.popleft()))

    def _answer(self, batch: ScheduledBatch) -> StepResult:
        (drafts,), (samples,) = batch.num_drafts, batch.samples
        accepted = min(max(0, drafts - 1), self.end_len - self.known - 1)
        run = [7] * (1 + accepted) if samples and self.known < self.end_len else []
        self.known += len(run)
        finish = Finish.LENGTH if self.known >= self.end_len else Finish.NO
        computed = batch.num_known[0] + accepted if run or not samples else 0
        part = RequestResult(0, batch.epochs[0], run, computed, drafts, accepted, 3, finish=finish)
        return StepResult(batch.step, [part])


def test_a_long_context_holds_the_pages_of_its_capacity_and_no_more() -> None:
    """32k tokens: the sliding groups hold their window and what is unsettled, the full ones everything."""
    layout, limits = large_layout(), Limits(2, 2044, 32768, 3, 262144, steps_in_flight=2)
    manager = CacheManager(layout, PagePool(4_000), limits, enable_prefix_caching=False)
    scheduler = Scheduler(manager, limits, speculation=StepDrafts(FixedDrafts(3)))
    request = Request(0, made_request([5] * 32_000, SamplingParams(max_tokens=None)), 32_500)
    scheduler.add(request)
    runner, peak = FakeRunner(scheduler, request), [0] * len(layout.groups)
    is_sliding = [isinstance(group.spec, SlidingSpec) for group in layout.groups]

    def look() -> None:
        if request.state is not State.RUNNING:
            return
        scheduler.check_integrity()
        held = pages_held(manager, 0)
        for i, group in enumerate(layout.groups):
            first = group.kind.first_needed(request.settled.at_least)
            assert held[i] == pages_for(request.bound.at_most, group.page_tokens) - first, "not what its kind says"
            peak[i] = max(peak[i], held[i])
            if is_sliding[i] and request.settled.at_least > 32_100:  # a window, and four tokens in each of two steps
                assert held[i] <= pages_for(511 + 8 - 1, group.page_tokens) + 1 < 40

    while scheduler.has_work:
        runner.step(look)
    assert any(is_sliding) and not all(is_sliding)
    for i, group in enumerate(layout.groups):
        capacity = group.kind.capacity(limits).max_pages
        assert peak[i] == (capacity if is_sliding[i] else pages_for(32_500, group.page_tokens))
    assert request.state is State.FINISHED and manager.usage() == 0


def test_the_assistant_takes_no_pages(folder_of: Folders) -> None:
    layers = load(folder_of("dense")).cache_layers()
    reader = LayerCache(4, layers[3].spec, reads=3)
    assert plan_groups([*layers, reader]).groups == plan_groups(layers).groups
