"""Whole engines with an fp8 cache: their tokens are those of a plain reference whose keys and values are rounded alike,
however a request is divided into steps. Free pages hold NaN."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from outrider.config import EngineConfig
from outrider.core.params import SamplingParams
from outrider.kernels.fp8_cache import ScaleNumbers
from outrider.kernels.latent_inputs import RopeRows
from outrider.layers import StepContext
from outrider.mixers.latent.latent_mixer import LatentNorms
from outrider.models.base import Model
from outrider.models.sources import resolve
from outrider.runner.cache_plan import check_cache_types, find_cache_scales
from outrider.runner.target import load_target
from outrider.runner.worker import Worker
from tests.drafters.checkpoints import make_drafter
from tests.drafters.hybrid_rig import hybrid_of, mtp_of
from tests.drafters.latent_rig import FAMILIES as LATENT_FAMILIES
from tests.drafters.scripted_drafter import ScriptedDrafter
from tests.drafters.trained import runs_of, trained_asks, trained_rig, trained_target
from tests.engine.harness import (
    CONFIGS,
    Ask,
    Rig,
    greedy,
    prompt_of,
    random_model,
    save_folder,
    tiny_model,
    tokens_of,
)
from tests.models.oracle import LOGIT_ROWS, DenseAttend

DRAFTS, LENGTH = 3, 10
NGRAM = {"method": "ngram", "num_speculative_tokens": DRAFTS, "auto": False, "prompt_lookup_min": 1}
FAMILIES = ("llama", "gemma3", "nemotron_h", "qwen3_next", "deepseek_v3")
STEM = prompt_of(21, 20, vocab=24)
PROMPTS = [[*STEM, *STEM[:13], *prompt_of(22, 5, vocab=24)], prompt_of(23, 33, vocab=24), [7, 8, 9] * 9]
ASKS = [Ask(prompt, greedy(LENGTH)) for prompt in PROMPTS]
# What the reference cannot say: several samples of one prompt.
SAMPLED = Ask([*STEM, 5, 6], SamplingParams(n=2, temperature=0.9, seed=4, max_tokens=LENGTH, ignore_eos=True))
# Scales that spread keys over the numbers of fp8, one kv head unlike the other.
SCALES = {0: ScaleNumbers((0.013, 0.002), (0.005, 0.02)), 1: ScaleNumbers((0.01, 0.03), (0.004, 0.007))}


@functools.cache
def model_of(family: str) -> Model:
    if family in CONFIGS:
        return tiny_model(family)
    if family in LATENT_FAMILIES:
        return random_model(LATENT_FAMILIES[family], torch.float64, seed=9)  # its text varies
    return hybrid_of(family)


# The reference


def rounded(numbers: torch.Tensor, scale: torch.Tensor | float = 1.0) -> torch.Tensor:
    """Numbers as a cache in fp8 gives them back."""
    return (numbers / scale).clamp(-448, 448).to(torch.float8_e4m3fn).to(numbers.dtype) * scale


class RoundedAttend(DenseAttend):
    """Attention over keys and values that were rounded when they were made."""

    def __init__(self, model: Model, skipped: Sequence[int] = ()) -> None:
        super().__init__(model)
        self.scales, self.skipped = model.cache_scales, skipped
        self.entries: dict[int, torch.Tensor] = {}

    def mixer(self, layer: int) -> Any:
        own = self.layers.get(layer)
        return super().mixer(layer) if own is None or hasattr(own, "head_dim") else LatentLayer(self, layer)

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor | None, v: torch.Tensor | None) -> torch.Tensor:
        if k is not None and v is not None and layer not in self.skipped:
            numbers = self.scales.get(layer, ScaleNumbers((1.0,), (1.0,)))
            # As the engine has them: in float32.
            k, v = (rounded(x, torch.tensor(own, dtype=torch.float32)[:, None].double())
                    for x, own in zip((k, v), numbers, strict=True))
        return super().attend(layer, q, k, v)


class LatentLayer:
    """One latent layer that attends everywhere: entries are rounded when they are made."""

    def __init__(self, dense: RoundedAttend, layer: int) -> None:
        self._dense, self._layer = dense, layer

    def write(self, compressed: torch.Tensor, norms: LatentNorms, rope: RopeRows) -> tuple[torch.Tensor, torch.Tensor]:
        layer: Any = self._dense.layers[self._layer]
        q, latent, key = compressed.split((compressed.shape[1] - layer.latent_dim - layer.rope_dim, layer.latent_dim,
                                           layer.rope_dim), dim=1)
        latent = torch.nn.functional.rms_norm(latent, latent.shape[1:], norms.latent, norms.eps)
        made = rounded(torch.cat((latent, rope.turn(key[:, None], in_pairs=True)[:, 0]), dim=1))
        before = self._dense.entries.get(self._layer, made[:0])
        self._dense.entries[self._layer] = torch.cat((before, made))
        assert norms.q is not None
        return torch.nn.functional.rms_norm(q, q.shape[1:], norms.q, norms.eps), q[:, :0]

    def values(self, *_: Any) -> None:
        return None

    def __call__(self, q: torch.Tensor) -> torch.Tensor:
        layer: Any = self._dense.layers[self._layer]
        entries = self._dense.entries[self._layer]
        position = torch.arange(len(entries))
        scores = torch.einsum("qhd,kd->hqk", q, entries) * layer.scale
        hidden = position > position[-len(q) :, None]
        shares = scores.masked_fill(hidden, -torch.inf).softmax(dim=-1)
        return torch.einsum("hqk,kd->qhd", shares, entries[:, : layer.latent_dim])


def continuation(model: Model, prompt: list[int], attend: DenseAttend) -> list[int]:
    known, computed = list(prompt), 0
    for _ in range(LENGTH):
        context = StepContext(attend, torch.arange(computed, len(known)))
        hidden = model.forward(torch.tensor(known[computed:]), context).final
        computed = len(known)
        known.append(int(model.logits(hidden[-1:], LOGIT_ROWS).argmax()))
    return known[len(prompt) :]


@functools.cache
def expected(family: str) -> list[list[list[int]]]:
    model = model_of(family)
    return [[continuation(model, prompt, RoundedAttend(model))] for prompt in PROMPTS]


# The engines


def run(model: Model, asks: Sequence[Ask] = ASKS, *, preempts: bool = False,
        **settings: Any) -> tuple[list[list[list[int]]], Rig]:
    with Rig(model, **{"kv_cache_dtype": "fp8"} | settings) as rig:
        return tokens_of(rig.run(asks, after_step=rig.preempt if preempts else None)), rig


@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_are_those_of_the_rounded_reference(family: str) -> None:
    model = model_of(family)
    tokens, _ = run(model, overlap=False, enable_prefix_caching=False)
    assert tokens == expected(family)
    assert tokens != run(model, kv_cache_dtype="auto")[0], "the cache rounds"


@pytest.mark.parametrize("family", FAMILIES)
def test_chunks_hits_and_preemption_change_no_token(family: str) -> None:
    model = model_of(family)
    asks = [*ASKS, SAMPLED]
    alone = [run(model, [ask], enable_prefix_caching=False)[0][0] for ask in asks]
    assert alone[:3] == expected(family)
    chunked, rig = run(model, asks, max_num_batched_tokens=13, preempts=True)
    assert chunked == alone and rig.scheduler.stats.num_preemptions > 0
    with Rig(model, kv_cache_dtype="fp8_e4m3", pad_requests=(4, 8), pad_tokens=(16, 64)) as rig:
        assert tokens_of(rig.run(asks)) == alone
        assert tokens_of(rig.run(asks)) == alone and rig.scheduler.cache.stats.hit_tokens > 0


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kind", ["ngram", "scripted", "mtp"])
def test_drafts_change_no_token(family: str, kind: str) -> None:
    """Drafts that are right, and wrong ones among them: their keys are read as they are stored, too."""
    model = model_of(family)
    right = {tuple(ask.prompt): answer for ask, (answer,) in zip(ASKS, expected(family), strict=True)}
    settings: dict[str, Any] = {"speculative_config": NGRAM}
    if kind == "scripted":
        settings = {"drafter": ScriptedDrafter(DRAFTS, lambda prompt, _: [5 if i % 4 == 2 else token for i, token
                                                                           in enumerate(right[prompt])])}
    elif kind == "mtp":
        if family in CONFIGS:
            pytest.skip("has no prediction module of its own")
        settings = {"drafter": mtp_of(model, DRAFTS)}
    tokens, rig = run(model, **settings)
    assert tokens == expected(family) and rig.engine.stats.num_draft_tokens > 0
    assert kind != "scripted" or rig.engine.stats.num_accepted_tokens > 0


@pytest.mark.parametrize("kind", ["eagle", "mtp", "draft_model"])
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_drafters_caches_follow(family: str, kind: str, tmp_path: Path) -> None:
    tokens, rig = run(model_of(family), speculative_config=make_drafter(kind, family, tmp_path).speculative(DRAFTS))
    assert tokens == expected(family) and rig.engine.stats.num_draft_tokens > 0
    assert {group.spec.cache_type.name for group in rig.step.pool.layout.groups} == {"fp8"}


@pytest.mark.parametrize("skipped", [(), pytest.param(("sliding_window",), marks=pytest.mark.long)])
def test_the_gemma_4_assistant_reads_the_targets_pages(skipped: tuple[str, ...]) -> None:
    """Its drafts stay good, and change no token; with sliding layers in fp8, and left out."""
    asks = trained_asks(21, (9, 40), max_tokens=9)
    settings: dict[str, Any] = {"kv_cache_dtype": "fp8", "kv_cache_dtype_skip_layers": skipped}
    with Rig(trained_target(), enable_prefix_caching=False, overlap=False, **settings) as rig:
        alone = tokens_of(rig.run(asks))
    with trained_rig(max_num_batched_tokens=19, **settings) as rig:
        assert tokens_of(rig.run(asks)) == alone
        assert sum(runs_of(rig)) > 2 * len(runs_of(rig))


@pytest.mark.parametrize(("family", "kept"), [("deepseek_v32", torch.float64),
                                              ("deepseek_v32_fp8", torch.float8_e4m3fn)])
def test_index_keys_keep_their_own_type_beside_latents(family: str, kept: torch.dtype) -> None:
    model = model_of(family)
    alone, rig = run(model, ASKS[:2], enable_prefix_caching=False, overlap=False)
    parts = rig.step.pool.layer(0)
    assert (parts["latent"].dtype, parts["index_key"].dtype) == (torch.float8_e4m3fn, kept)
    assert run(model, ASKS[:2], max_num_batched_tokens=13, drafter=mtp_of(model, 2), preempts=True)[0] == alone


# Scales


def scaled_model() -> Model:
    model = random_model(CONFIGS["llama"], torch.float64, seed=8)
    model.cache_scales = SCALES
    return model


def test_scales_belong_to_heads() -> None:
    model = scaled_model()
    wanted = [[continuation(model, prompt, RoundedAttend(model))] for prompt in PROMPTS]
    assert run(model)[0] == wanted == run(model, max_num_batched_tokens=13, speculative_config=NGRAM)[0]
    model.cache_scales = {}
    assert run(model)[0] != wanted, "scales matter"


@pytest.mark.parametrize("names", ["k_proj.k_scale v_proj.v_scale", "k_scale v_scale"])
def test_scales_come_from_the_file(names: str, tmp_path: Path) -> None:
    folder = save_folder(tmp_path, CONFIGS["llama"], seed=8)
    tensors = load_file(folder / "model.safetensors")
    for layer, own in SCALES.items():
        for name, scale in zip(names.split(), own, strict=True):
            tensors[f"model.layers.{layer}.self_attn.{name}"] = torch.tensor(scale)
    save_file(tensors, folder / "model.safetensors")
    config = EngineConfig(str(folder), kv_cache_dtype="fp8", dtype="float64", device="cpu")
    model = load_target(config, resolve(folder))
    assert {layer: [tuple(map(pytest.approx, part)) for part in own] for layer, own in SCALES.items()} == {
        layer: list(own) for layer, own in model.cache_scales.items()}
    plain = load_target(EngineConfig(str(folder), dtype="float64", device="cpu"), resolve(folder))
    assert not plain.cache_scales, "without an fp8 cache they are passed over"


def scales_in(folder: Path, section: dict[str, Any] | None = None, **scales: Any) -> dict[int, ScaleNumbers]:
    """The scales of a model whose files have these for layer 1."""
    model = tiny_model("llama")
    save_file({f"model.layers.1.self_attn.{name}": torch.tensor(value) for name, value in scales.items()},
              folder / "model.safetensors")
    (folder / "config.json").write_text("{}")
    source = resolve(folder)
    source.config["quantization_config"] = section or {}
    return find_cache_scales(EngineConfig("m", kv_cache_dtype="fp8"), source, model)


def test_forms_of_scales(tmp_path: Path) -> None:
    assert scales_in(tmp_path, kv_scale=0.5) == {1: ((0.5, 0.5), (0.5, 0.5))}
    assert scales_in(tmp_path, k_scale=[[0.5], [2.0]]) == {1: ((0.5, 2.0), (1.0, 1.0))}
    fp8 = {"kv_cache_scheme": {"type": "float", "num_bits": 8, "strategy": "tensor"}}
    assert scales_in(tmp_path, fp8, v_scale=[4.0], k_scale=2.0) == {1: ((2.0, 2.0), (4.0, 4.0))}
    assert scales_in(tmp_path, q_scale=3.0) == {}
    for wrong in ([1.0, 2.0, 3.0], -1.0, float("nan")):
        with pytest.raises(ValueError, match="cache scales of layer 1 .* must be one positive number, or 2"):
            scales_in(tmp_path, k_scale=wrong)
    with pytest.raises(ValueError, match="kv_cache_scheme is .*int.*, and the engine reads scales of an fp8 cache"):
        scales_in(tmp_path, {"kv_cache_scheme": {"type": "int", "num_bits": 8}}, k_scale=0.5)


# Layers that are left out, and memory


def test_sliding_layers_may_be_left_out() -> None:
    model = model_of("gemma3")
    wanted = [[continuation(model, prompt, RoundedAttend(model, skipped=(0, 1)))] for prompt in PROMPTS]
    assert wanted != expected("gemma3")
    for skipped in (("sliding_window",), ("0", "1")):
        tokens, rig = run(model, kv_cache_dtype_skip_layers=skipped, speculative_config=NGRAM)
        assert tokens == wanted
        assert [rig.step.pool.layer(index)["k"].dtype for index in range(3)] == [torch.float64] * 2 + [
            torch.float8_e4m3fn]


def test_a_number_that_is_no_layer_is_refused(tmp_path: Path) -> None:
    folder = save_folder(tmp_path, CONFIGS["llama"])
    config = EngineConfig(str(folder), device="cpu", kv_cache_dtype="fp8", kv_cache_dtype_skip_layers=("2",))
    with pytest.raises(ValueError, match="kv_cache_dtype_skip_layers: '2' must be 'sliding_window' or .*0, 1"):
        Worker.load(config, resolve(folder))


def test_eight_times_as_many_pages_fit(caplog: pytest.LogCaptureFixture) -> None:
    """As float64 numbers have; a model in 16 bits gets twice as many."""
    sizes = {}
    for name in ("auto", "fp8"):
        rig = run(tiny_model("llama"), ASKS[:1], kv_cache_dtype=name, num_pages=None, kv_cache_memory_bytes=1 << 20)[1]
        sizes[name] = rig.scheduler.cache.pool.num_pages
    assert sizes["fp8"] == 8 * sizes["auto"]
    with caplog.at_level("INFO", logger="outrider"):
        run(model_of("gemma3"), ASKS[:1], kv_cache_dtype_skip_layers=("sliding_window",))
    assert "2 layers in the model's dtype, 1 layers in fp8" in caplog.text


def test_another_fp8_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="kv_cache_dtype 'fp8_e5m2': did you mean 'fp8_e4m3'"):
        EngineConfig("m", kv_cache_dtype="fp8_e5m2")


@pytest.mark.parametrize(("family", "said", "served"), [
    ("llama", "layer 0 has heads of 8 numbers, .* multiple of 16 from 64 to 512", {"head_dim": 64}),
    ("deepseek_v3", "layer 0 has latents of 8 numbers, .* multiple of 64 from 256 to 512", {"latent_dim": 512}),
])
def test_a_gpu_serves_sizes_that_were_compared_there(monkeypatch: pytest.MonkeyPatch, family: str, said: str,
                                                     served: dict[str, int]) -> None:
    """Layers that are left out keep the model's dtype, in which every size is served."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    config, model = EngineConfig("m", kv_cache_dtype="fp8"), model_of(family)
    with pytest.raises(ValueError, match=f"kv_cache_dtype='fp8': {said}: name the layer"):
        check_cache_types(config, model, torch.device("cuda"))
    skipped = tuple(str(layer.index) for layer in model.attention_layers)
    check_cache_types(replace(config, kv_cache_dtype_skip_layers=skipped), model, torch.device("cuda"))
    monkeypatch.setattr(model, "attention_layers", [replace(layer, **served) for layer in model.attention_layers])
    check_cache_types(config, model, torch.device("cuda"))
