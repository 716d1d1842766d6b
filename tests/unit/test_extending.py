"""The worked examples of docs/extending.md: each plugs a toy in from outside the package and touches no file of it."""

from __future__ import annotations

import json
import math
import multiprocessing
import os
import subprocess
import sys
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from outrider.cache.groups import Group, plan_groups
from outrider.cache.kinds import FullKind, PagedSpec, Part, register_kind
from outrider.cache.kinds import kind as kinds_base
from outrider.config import EngineConfig, SpeculativeConfig
from outrider.drafters.base import DraftBuild, Drafter, Drafts, Step
from outrider.drafters.registry import make_drafter
from outrider.formats import (
    EmbeddingFormat,
    ExpertsDeclaration,
    ExpertsFormat,
    FormatChoice,
    HeadLayout,
    InputShard,
    LinearDeclaration,
    OutputShard,
    PackedPart,
    Ranks,
    StoredFormat,
    StoredTensor,
    register_format,
)
from outrider.formats import registry as formats_registry
from outrider.kernels import ops
from outrider.kernels.moe import Routed
from outrider.layers import fuse
from outrider.layers.base import DecoderLayer, FormatModule, find_modules
from outrider.layers.decoder import PreNormLayer
from outrider.layers.fuse import prepare
from outrider.layers.linear import FusedLinear, Linear
from outrider.layers.moe import Experts
from outrider.mixers import cached
from outrider.mixers.batch import BatchView
from outrider.mixers.mixer import Mixer
from outrider.mixers.paged import registry as backends
from outrider.mixers.paged.backend import AttentionLayer, Backend, KeyValueCache, PagedMixer
from outrider.mixers.paged.masks import QueryMarks
from outrider.mixers.paged.torch_backend import TorchBackend
from outrider.mixers.pool import DevicePool
from outrider.models import registry as models_registry
from outrider.models.base import Model
from outrider.models.config import ConfigError
from outrider.models.head import load_head
from outrider.models.llama import Llama
from outrider.models.loader import blank_model, declare_formats, load_dummy, load_weights
from outrider.models.mtp import build_mtp_modules
from outrider.models.registry import build_model
from outrider.models.sources import quantization, resolve
from outrider.models.sources.model_source import WeightError
from outrider.runner.commands import Command
from outrider.runner.target import build_target, fill_target, load_target
from tests.engine.harness import SETTINGS, Ask, Rig, greedy
from tests.models.oracle import LOGIT_ROWS

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "vocab_size": 96, "hidden_size": 64, "intermediate_size": 96,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "rms_norm_eps": 1e-5,
    "max_position_embeddings": 128, "tie_word_embeddings": False,
}


# A weight format


@dataclass(frozen=True)
class Int8Rows:
    """A stored weight as a source yields it: whole numbers and one scale for each output feature."""

    values: torch.Tensor  # [outputs, inputs] int8
    scales: torch.Tensor  # [outputs, 1]
    kind: str = "int8_rows"

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.values.shape)

    def parts(self) -> dict[str, torch.Tensor]:
        return {"weight": self.values, "weight_scale": self.scales}

    def is_finite(self) -> bool:
        return bool(self.scales.isfinite().all())

    def dequantize(self) -> torch.Tensor:
        return self.values * self.scales


class Int8Linear(EmbeddingFormat):
    """Scales what comes out of the product, so that no dequantised weight is ever made."""

    def __init__(self, declared: LinearDeclaration, stored: Sequence[StoredFormat]) -> None:
        super().__init__(declared, stored)
        outputs, inputs, device = declared.num_outputs, declared.num_inputs, declared.device
        self._values = torch.empty(outputs, inputs, dtype=torch.int8, device=device)
        self._scales = torch.empty(outputs, 1, dtype=declared.dtype, device=device)

    @classmethod
    def serves(cls, declared: LinearDeclaration, stored: Sequence[StoredFormat], device: torch.device) -> bool:
        return declared.dtype == torch.float64

    def tensors(self) -> list[StoredTensor]:
        return [StoredTensor("weight", self._values, kind="int8_rows"),
                StoredTensor("weight_scale", self._scales, inputs_per_column=None)]

    def product(self, x: torch.Tensor) -> torch.Tensor:
        out = (x @ self._values.to(x.dtype).T) * self._scales.T
        return out if self._bias is None else out + self._bias

    def look_up(self, tokens: torch.Tensor) -> torch.Tensor:
        return self._values[tokens] * self._scales[tokens]


class Int8Checkpoint(quantization.Quantization):
    """The form of files whose config says `"quantization_config": {"quant_method": "int8_rows"}`."""

    beside = (".weight_scale",)

    def __init__(self, settings: Mapping[str, Any]) -> None:
        if settings.get("bits", 8) != 8:
            raise ValueError("bits must be 8")

    def stored_format(self, name: str) -> StoredFormat:
        return StoredFormat("int8_rows")

    def join(self, name: str, tensors: Mapping[str, torch.Tensor]) -> Int8Rows:
        return Int8Rows(tensors[".weight"], tensors[".weight_scale"])


def int8_tensors(config: dict[str, Any] = CONFIG) -> Iterator[tuple[str, torch.Tensor | Int8Rows]]:
    """Random weights, matrices as int8 rows."""
    generator = torch.Generator().manual_seed(3)
    for name, slot in build_model(config, dtype=torch.float64, device="meta").weights().items():
        if len(slot.shape) == 1:
            yield name, torch.randn(slot.shape, generator=generator, dtype=torch.float64) * 0.2 + 1
            continue
        values = torch.randint(-127, 128, slot.shape, generator=generator, dtype=torch.int8)
        scales = torch.rand(slot.shape[0], 1, generator=generator, dtype=torch.float64)
        yield name, Int8Rows(values, scales / (32 if "embed" in name else 256))


def loaded(keep: bool, dtype: torch.dtype = torch.float64) -> Model:
    model = build_model(CONFIG, dtype=dtype, device="cpu")
    if keep:
        declare_formats(model, lambda name: StoredFormat("int8_rows"))
    load_weights(model, int8_tensors())
    return model


def save_int8(path: Path, **settings: Any) -> Path:
    tensors: dict[str, torch.Tensor] = {}
    for name, stored in int8_tensors():
        parts = {"weight": stored} if isinstance(stored, torch.Tensor) else stored.parts()
        tensors |= {f"{name.removesuffix('.weight')}.{part}": tensor for part, tensor in parts.items()}
    path.mkdir()
    save_file(tensors, path / "model.safetensors")
    config = CONFIG | {"quantization_config": {"quant_method": "int8_rows"} | settings}
    (path / "config.json").write_text(json.dumps(config))
    return path


class Allocated(TorchDispatchMode):
    """Counts all bytes of memory that torch's operations allocate, freed or not: an upper bound of the peak."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        given = {t.untyped_storage().data_ptr() for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
        for tensor in tree_leaves(made):
            if isinstance(tensor, torch.Tensor) and not tensor.is_meta:
                storage = tensor.untyped_storage()
                self.bytes += storage.nbytes() if storage.data_ptr() not in given else 0
        return made


def outcome(model: Model, **settings: Any) -> list[list[int]]:
    asks = [Ask(prompt, greedy(8, ignore_eos=True)) for prompt in ([3, 1, 4], [7] * 40)]
    with Rig(model, max_num_batched_tokens=32, max_model_len=96, **settings) as rig:
        return [list(output.outputs[0].token_ids) for output in rig.run(asks)]


DRAFTS: dict[str, Any] = {"method": "ngram", "num_speculative_tokens": 3, "auto": False}


@pytest.fixture
def int8_format(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(formats_registry, "_FORMATS", {use: dict(t) for use, t in formats_registry._FORMATS.items()})
    monkeypatch.setattr(quantization, "_METHODS", dict(quantization._METHODS))
    register_format("int8_rows", Int8Linear)
    quantization.register_quantization("int8_rows", Int8Checkpoint)


@pytest.mark.usefixtures("int8_format")
def test_a_weight_format_serves_a_whole_engine_without_a_dense_copy(tmp_path: Path) -> None:
    """From the config of a folder to tokens: these are the tokens of the dequantised model."""
    folder = save_int8(tmp_path / "int8")
    source = resolve(folder)
    tokens, allocated, held = [], [], []
    for keep in (True, False):
        config = EngineConfig(str(folder), **(SETTINGS | {"dtype": "float64", "keep_quantized": keep}))
        with Allocated() as counted:
            model = load_target(config, source)
        allocated.append(counted.bytes)
        held.append(sum(slot.nbytes for slot in model.weights().values()))
        tokens.append([outcome(model), outcome(model, speculative_config=DRAFTS)])
        formats = [module.format for module in find_modules([model], FormatModule)]
        assert len(formats) == 4 * 2 + 2 and all(isinstance(made, Int8Linear) == keep for made in formats)
    assert tokens[0] == tokens[1] and tokens[0][0] == tokens[0][1]
    numbers = sum(math.prod(t.shape) for _, t in int8_tensors() if not isinstance(t, torch.Tensor))
    assert held[0] < 2 * numbers < held[1] / 3
    assert allocated[0] < 3 * numbers < 8 * numbers <= allocated[1], "of float64 numbers each takes eight bytes"


class Int8Experts(ExpertsFormat):
    """Experts of int8 rows, made numbers of for each call."""

    def __init__(self, declared: ExpertsDeclaration, stored: Sequence[StoredFormat]) -> None:
        super().__init__(declared, stored)
        self._values, self._scales = [], []
        for projection in declared.projections:
            shape = declared.num_experts, projection.num_outputs
            self._values.append(torch.empty(*shape, projection.num_inputs, dtype=torch.int8, device=declared.device))
            self._scales.append(torch.empty(*shape, 1, dtype=declared.dtype, device=declared.device))

    def tensors(self) -> Any:
        return [[StoredTensor("weight", values, kind="int8_rows"),
                 StoredTensor("weight_scale", scales, inputs_per_column=None)]
                for values, scales in zip(self._values, self._scales, strict=True)]

    def mix(self, x: torch.Tensor, routed: Routed, activation: str, added: torch.Tensor | None = None) -> torch.Tensor:
        numbers = [values * scales for values, scales in zip(self._values, self._scales, strict=True)]
        return ops.experts(x, routed.ids, routed.weights, *numbers, activation, added)


@pytest.mark.usefixtures("int8_format")
def test_experts_have_formats_by_the_same_table() -> None:
    register_format("int8_rows", Int8Experts)
    config = CONFIG | {"architectures": ["Qwen3MoeForCausalLM"], "num_experts": 4, "num_experts_per_tok": 2,
                       "moe_intermediate_size": 32, "norm_topk_prob": True}
    models = [build_model(config, dtype=torch.float64, device="cpu") for _ in range(2)]
    declare_formats(models[0], lambda name: StoredFormat("int8_rows"))
    for model in models:
        load_weights(model, int8_tensors(config))
    kept, numbers = (find_modules([model], Experts)[0].format for model in models)
    assert isinstance(kept, Int8Experts) and kept.weight_bytes < numbers.weight_bytes / 5
    assert outcome(models[0], speculative_config=DRAFTS) == outcome(models[1])


@pytest.mark.usefixtures("int8_format")
def test_drafters_keep_formats_too(tmp_path: Path) -> None:
    """A draft model, and a prediction module whose tensors lie in the target's own files."""
    folder, target = save_int8(tmp_path / "int8"), loaded(keep=True)
    speculative = DRAFTS | {"method": "draft_model", "model": str(folder)}
    config = SpeculativeConfig(**speculative)
    build = DraftBuild(target, torch.float64, torch.device("cpu"), 96)
    for keep in (True, False):
        drafter = make_drafter(config, replace(build, keep_quantized=keep))
        assert drafter is not None
        formats = [linear.format for linear in find_modules(drafter.modules(), Linear)]
        assert formats and all(isinstance(made, Int8Linear) == keep for made in formats)
    assert outcome(target, speculative_config=speculative) == outcome(target)

    class ModuleSource(type(resolve(folder))):  # type: ignore[misc]
        def stored_format(self, name: str) -> StoredFormat:
            return StoredFormat("int8_rows")

        def read(self) -> Iterator[tuple[str, torch.Tensor | Int8Rows]]:
            for name, slot in outline.weights().items():
                rows = Int8Rows(torch.ones(slot.shape, dtype=torch.int8), torch.ones(slot.shape[0], 1))
                yield name, rows if len(slot.shape) == 2 else torch.ones(slot.shape)

    outline, module = (build_mtp_modules(target, first_layer=2, dtype=torch.float64, device=torch.device(device))[0]
                       for device in ("meta", "cpu"))
    source = ModuleSource(**{key: getattr(resolve(folder), key) for key in ("name", "path", "config", "eos_token_ids")})
    load_head(module, lambda: source, load_format="auto", seed=0, keep_quantized=True)
    assert all(isinstance(linear.format, Int8Linear) for linear in find_modules([module], Linear))


@pytest.mark.usefixtures("int8_format")
def test_a_kept_format_starts_blank_and_takes_dummy_weights(tmp_path: Path) -> None:
    config = EngineConfig(str(save_int8(tmp_path / "int8")), **(SETTINGS | {"dtype": "float64"}))
    source = resolve(config.model)
    model = build_target(config, source)
    blank_model(model)
    prepare([model], allow_copies=False)
    fill_target(model, config, source, None)
    assert outcome(model) == outcome(loaded(keep=True)), "weights that come later are the same weights"
    (tmp_path / "int8" / "model.safetensors").unlink()
    dummy = load_target(replace(config, load_format="dummy"), source.without_keys(()))
    assert all(isinstance(module.format, Int8Linear) for module in find_modules([dummy], Linear)) and outcome(dummy)


@pytest.mark.usefixtures("int8_format")
def test_what_a_format_cannot_take_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="quantization_config.* bits must be 8"):
        load_target(EngineConfig(str(folder := save_int8(tmp_path / "int4", bits=4)), **SETTINGS), resolve(folder))
    model = build_model(CONFIG, dtype=torch.float64, device="cpu")
    declare_formats(model, lambda name: StoredFormat("int8_rows"))
    tensors = dict(int8_tensors())
    name = "model.layers.1.mlp.up_proj"
    rows = tensors[f"{name}.weight"]
    assert isinstance(rows, Int8Rows)
    with pytest.raises(WeightError, match=f"{name}.weight has dtype torch.float64, and a weight stored as int8_rows"):
        load_weights(model, (tensors | {f"{name}.weight": rows.dequantize()}).items())
    with pytest.raises(WeightError, match=f"{name}.weight holds NaN or Inf"):
        load_weights(model, (tensors | {f"{name}.weight": Int8Rows(rows.values, rows.scales / 0)}).items())
    with pytest.raises(WeightError, match=f"missing: {name}.weight_scale"):
        load_weights(model, (tensors | {f"{name}.weight": rows.values}).items())


@pytest.mark.usefixtures("int8_format")
def test_a_format_that_cannot_serve_a_model_leaves_it_to_the_dense_one() -> None:
    model = loaded(keep=True, dtype=torch.float32)
    assert not any(isinstance(module.format, Int8Linear) for module in find_modules([model], FormatModule))
    assert outcome(model)


# A part of a layer for each of two ranks


@pytest.mark.usefixtures("int8_format")
def test_slots_of_a_rank_load_exactly_its_part() -> None:
    options: dict[str, Any] = {"dtype": torch.float64, "device": torch.device("cpu")}
    stored = {"q": 8, "k": 4, "by_head": 12, "packed": 11}
    layouts = {"by_head": HeadLayout(2, (4, 2), is_reversed=True)}
    files = {f"{name}.weight": torch.randn(size, 6, dtype=torch.float64) for name, size in stored.items()}
    files |= {f"{name}.bias": torch.randn(size, dtype=torch.float64) for name, size in stored.items()}

    def layer(shard: Any) -> FusedLinear:
        made = FusedLinear(6, stored, bias=True, layouts=layouts, shard=shard, **options)
        for name, slot in made.weights().items():
            assert slot.shape == tuple(files[name].shape), "errors name the file's shape"
            slot.store(files[name])
        return made

    x = torch.randn(3, 6, dtype=torch.float64)
    # Of heads the second part comes first. The packed tensor holds a matrix of 8 features, which are sharded, and one
    # of 3, which every rank has.
    q, k, v, gate, sharded, copied = layer(None)(x, LOGIT_ROWS).split((8, 4, 4, 8, 8, 3), dim=1)
    for rank in range(2):
        part = layer(OutputShard(Ranks(rank, 2), pieces={"k": 1}, packed={"packed": [PackedPart(8), PackedPart(3, 1)]}))
        assert part.out_features == 21 and sum(slot.nbytes for slot in part.weights().values()) == 21 * 7 * 8
        mine, *others = (whole.chunk(2, dim=1)[rank] for whole in (q, v, gate, sharded))
        torch.testing.assert_close(part(x, LOGIT_ROWS), torch.cat((mine, k, *others, copied), dim=1))
    with pytest.raises(ValueError, match="8 features cannot be sharded into 3 equal parts"):
        layer(OutputShard(Ranks(0, 3)))
    with pytest.raises(ValueError, match="4 pieces cannot be held by 2 ranks"):
        layer(OutputShard(Ranks(0, 2), pieces={"k": 4}))


@pytest.mark.parametrize("is_joint", [True, False], ids=["joint", "by expert"])
def test_parts_of_experts_add_up(is_joint: bool) -> None:
    def experts(rank: int | None) -> Experts:
        shard = None if rank is None else InputShard(Ranks(rank, 2), lambda partial: partial)
        made = Experts(3, 4, 6, activation="silu", is_fused=is_joint, dtype=torch.float64, device=torch.device("cpu"),
                       shard=shard)
        for name, slot in made.weights("experts").items():
            seed = torch.Generator().manual_seed(zlib.crc32(name.encode()))
            slot.store(torch.randn(slot.shape, generator=seed, dtype=torch.float64))
        return made

    x, routed = torch.randn(5, 4, dtype=torch.float64), Routed(torch.arange(10).view(5, 2) % 3, torch.rand(5, 2))
    whole, *parts = (experts(rank) for rank in (None, 0, 1))
    assert [p.format.weight_bytes * 2 for p in parts] == [whole.format.weight_bytes] * 2
    assert {n: s.shape for n, s in parts[1].weights().items()} == {n: s.shape for n, s in whole.weights().items()}
    torch.testing.assert_close(parts[0](x, routed, LOGIT_ROWS) + parts[1](x, routed, LOGIT_ROWS, x),
                               whole(x, routed, LOGIT_ROWS, x))


@pytest.mark.usefixtures("int8_format")
def test_a_format_from_outside_can_be_cut_by_input_features() -> None:
    rows = Int8Rows(torch.randint(-127, 128, (5, 6), dtype=torch.int8), torch.rand(5, 1, dtype=torch.float64))
    x, total = torch.randn(2, 6, dtype=torch.float64), torch.zeros(2, 5, dtype=torch.float64)
    for rank in range(2):
        layer = Linear(6, 5, bias=False, dtype=torch.float64, device=torch.device("cpu"),
                       shard=InputShard(Ranks(rank, 2), lambda partial: partial))
        layer.declare_formats(FormatChoice(lambda name: StoredFormat("int8_rows"), torch.device("cpu")))
        slots = layer.weights("x")
        assert {name: slot.shape for name, slot in slots.items()} == {"x.weight": (5, 6), "x.weight_scale": (5, 1)}
        slots["x.weight"].store(rows.values)
        slots["x.weight_scale"].store(rows.scales)
        total += layer(x.chunk(2, dim=1)[rank], LOGIT_ROWS)
    torch.testing.assert_close(total, x @ rows.dequantize().T)


def two_layers(up_shard: Any, down_shard: Any) -> tuple[Linear, Linear]:
    options: dict[str, Any] = {"bias": True, "dtype": torch.float64, "device": torch.device("cpu")}
    up, down = Linear(8, 12, shard=up_shard, **options), Linear(12, 8, shard=down_shard, **options)
    generator = torch.Generator().manual_seed(1)
    for slot in (*up.weights().values(), *down.weights().values()):  # whole numbers: sums are not rounded
        slot.store(torch.randint(-9, 10, slot.shape, generator=generator).double())
    return up, down


def run_mlp(up: Linear, down: Linear, x: torch.Tensor) -> torch.Tensor:
    residual = x.clone()
    down.add_to(residual, up.activated(x, "relu2", LOGIT_ROWS), LOGIT_ROWS)
    return residual


def run_rank(ranks: Ranks, x: list[list[float]], other: Any, answer: Any) -> None:
    """The process of one rank. other: the pipe to the other rank."""

    def sum_over_ranks(partial: torch.Tensor) -> torch.Tensor:
        other.send(partial.tolist())
        parts = [partial, torch.tensor(other.recv(), dtype=partial.dtype)]
        return parts[ranks.rank] + parts[1 - ranks.rank]  # in the order of ranks, so that both have the same bits

    torch.set_num_threads(1)
    up, down = two_layers(OutputShard(ranks), InputShard(ranks, sum_over_ranks))
    result = run_mlp(up, down, torch.tensor(x, dtype=torch.float64))
    answer.send((up.out_features, down.in_features, result.tolist()))


def test_two_processes_add_up_to_the_whole_layer() -> None:
    x = (torch.arange(24.0, dtype=torch.float64) - 11).view(3, 8)
    context = multiprocessing.get_context("fork")  # a process that imports torch anew takes seconds
    pipes, answers = context.Pipe(), [context.Pipe() for _ in range(2)]
    processes = [context.Process(target=run_rank, args=(Ranks(rank, 2), x.tolist(), pipes[rank], answers[rank][1]))
                 for rank in range(2)]
    for process in processes:
        process.start()
    results = [answer.recv() if answer.poll(60) else None for answer, _ in answers]
    for process in processes:
        process.join()
    assert results == [(6, 6, run_mlp(*two_layers(None, None), x).tolist())] * 2


# A fused layer


class CountingLayer(fuse.FusedLayer):
    calls = 0

    def __call__(self, *args: Any) -> tuple[Any, torch.Tensor]:
        CountingLayer.calls += 1
        return self.plain(*args)


def test_a_fused_layer_takes_the_place_of_those_it_is_built_from(monkeypatch: pytest.MonkeyPatch) -> None:
    def try_build(plain: DecoderLayer) -> DecoderLayer | None:
        return CountingLayer(plain) if plain is model.layers[1] else None

    model = loaded(keep=False)
    monkeypatch.setattr(fuse, "_REPLACEMENTS", list(fuse._REPLACEMENTS))
    names = model.weights().keys()
    wanted = outcome(model)
    assert not any(isinstance(layer, fuse.FusedLayer) for layer in model.layers), "nothing serves float64"
    fuse.register_fused_layer(try_build)
    assert outcome(model) == wanted and CountingLayer.calls > 0
    assert [isinstance(layer, CountingLayer) for layer in model.layers] == [False, True]
    assert model.weights().keys() == names


# A cache kind, with the mixer of its layers


@dataclass(frozen=True)
class JoinedSpec(PagedSpec):
    """Keys and values of a token side by side in one part: no pair of tensors anywhere."""

    num_kv_heads: int
    head_dim: int
    itemsize: int

    @property
    def parts(self) -> tuple[Part, ...]:
        return (Part("joined", (2, self.num_kv_heads, self.head_dim), self.itemsize),)


class JoinedLayer:
    """What the model calls: one layer in one step."""

    def __init__(self, backend: TorchBackend, layer: AttentionLayer, joined: torch.Tensor, plan: Any) -> None:
        self._backend, self._layer, self._plan = backend, layer, plan
        self._cache = KeyValueCache(joined[:, :, 0], joined[:, :, 1])

    def __call__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        JoinedMixer.calls += 1
        return self._backend.run(self._layer, self._cache, q, k, v, self._plan)

    def fused(self, qkv: torch.Tensor, rope: Any, norms: Any) -> None:
        return None


class JoinedMixer(Mixer):
    calls = 0

    def __init__(self, layers: Sequence[AttentionLayer], pool: DevicePool, backend: Backend) -> None:
        self._backend = TorchBackend()
        self._layers = [(layer, pool.layer(layer.index)["joined"]) for layer in layers]
        (self._group,) = {group for layer in layers for group in pool.layout.groups_of(layer.index)}

    def bind(self, view: BatchView) -> dict[int, JoinedLayer]:
        plan = self._backend.plan(view, self._group)
        return {layer.index: JoinedLayer(self._backend, layer, joined, plan) for layer, joined in self._layers}


def test_a_cache_kind_and_its_mixer_serve_the_layers_that_declare_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kinds_base, "_KINDS", dict(kinds_base._KINDS))
    monkeypatch.setattr(cached, "_MIXERS", dict(cached._MIXERS))
    register_kind(JoinedSpec, FullKind)
    cached.register_mixer(JoinedSpec, JoinedMixer)
    model = loaded(keep=False)
    wanted = outcome(model)
    claims = [replace(claim, spec=JoinedSpec(2, 16, 8)) for claim in model.cache_layers()]
    monkeypatch.setattr(model, "cache_layers", lambda: claims)
    assert outcome(model) == wanted and JoinedMixer.calls > 0


# An attention backend


class CountingBackend(TorchBackend):
    name = "counting"
    plans = 0

    def plan(self, view: BatchView, group: Group) -> Any:
        CountingBackend.plans += 1
        return super().plan(view, group)


def test_a_backend_is_asked_for_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    def refusal(device: torch.device, dtype: torch.dtype) -> str | None:
        return None if dtype == torch.float64 else "it counts in float64"

    monkeypatch.setattr(backends, "_BACKENDS", dict(backends._BACKENDS))
    backends.register_backend(backends.BackendEntry("counting", refusal, lambda max_drafts: CountingBackend()))
    try:
        model = loaded(keep=False)
        wanted = outcome(model)
        assert CountingBackend.plans == 0
        assert outcome(model, attention_backend="counting") == wanted and CountingBackend.plans > 0
        with pytest.raises(ValueError, match="does not serve torch.float32 on cpu .counting: it counts in float64"):
            backends.make_backend("counting", torch.device("cpu"), torch.float32)
        del backends._BACKENDS["counting"]  # as in a worker's process that never heard of it
        with pytest.raises(ValueError, match="attention_backend='counting' is not registered in the worker's process"):
            outcome(model, attention_backend="counting")
    finally:
        backends.SETTINGS.remove("counting")


# A mask


@dataclass(frozen=True)
class EveryOther:
    step: int = 2

    def __call__(self, causal: torch.Tensor, query: QueryMarks, key_positions: torch.Tensor) -> torch.Tensor:
        return causal & ((query.positions - key_positions) % self.step == 0)


def test_a_mask_is_a_value_on_the_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    model = loaded(keep=False)
    plain = outcome(model)
    layers = [replace(layer, mask=EveryOther()) for layer in model.attention_layers]
    monkeypatch.setattr(model, "attention_layers", layers)
    masked = outcome(model)
    assert masked != plain and outcome(model, attention_backend="flex", num_pages=64) == masked
    with pytest.raises(ValueError, match="layer 0 has the mask EveryOther, which attention_backend='triton'"):
        PagedMixer(layers, DevicePool(plan_groups(model.cache_layers()), 4, torch.float64, torch.device("cpu")),
                   type("Other", (TorchBackend,), {"name": "triton", "takes_masks": False})())


# A model family


class ParallelLayer(PreNormLayer):
    """Attention and MLP read the same norm and add to the residual stream together."""

    def __call__(
        self, delta: torch.Tensor | None, residual: torch.Tensor, angles: Any, context: Any
    ) -> tuple[torch.Tensor | None, torch.Tensor]:
        x, residual = self.input_norm.add_norm(delta, residual)
        return self.mixer(x, angles, context) + self.mlp(x, context), residual

    def parts(self) -> Sequence[tuple[str, Any]]:
        return [part for part in super().parts() if part[0] != self.names.mlp_norm]


class ParallelLlama(Llama):
    def __init__(self, config: Any, **options: Any) -> None:
        super().__init__(config, **options)
        plain: Any = self.layers
        self.layers = [ParallelLayer(layer.input_norm, layer.mixer, layer.mlp_norm, layer.mlp) for layer in plain]


def test_a_model_family_is_a_class_and_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models_registry, "_ARCHITECTURES", dict(models_registry._ARCHITECTURES))
    models_registry.register("ParallelLlamaForCausalLM", ParallelLlama)
    config = CONFIG | {"architectures": ["ParallelLlamaForCausalLM"]}
    model = build_model(config, dtype=torch.float64, device="cpu")
    load_weights(model, int8_tensors(config))
    assert not any("post_attention_layernorm" in name for name in model.weights())
    whole = outcome(model)
    assert whole != outcome(loaded(keep=False)), "the layers are other ones"
    drafted = outcome(model, speculative_config=DRAFTS)
    assert drafted == whole


# A drafter


class RepeatLast(Drafter):
    """Guesses that the last token goes on."""

    name = "repeat-last"
    calls = 0

    def __init__(self, num_speculative_tokens: int, target: Any) -> None:
        self.max_drafts = num_speculative_tokens

    def propose(self, step: Step) -> Drafts:
        RepeatLast.calls += 1
        rows = step.batch.padded.rows
        last = step.tokens[rows, (step.known[rows] - 1).clamp_min(0)]
        return Drafts(last[:, None].expand(-1, step.num_wanted).contiguous(), torch.full_like(last, step.num_wanted))


def test_a_drafter_is_named_by_its_import_path() -> None:
    method = f"{__name__}:{RepeatLast.__name__}"
    model = loaded(keep=False)
    drafted = outcome(model, speculative_config={"method": method, "num_speculative_tokens": 2, "auto": False})
    assert drafted == outcome(model)
    assert sys.modules[__name__].RepeatLast.calls > 0


# A kernel


@dataclass(frozen=True)
class LargestWeight(Command[float]):
    name: str

    def carry_out(self, worker: Any) -> float:
        return float(worker.device_step.model.weights()[self.name].target.abs().max())


def test_a_command_says_what_the_worker_does_with_it() -> None:
    model = build_model(CONFIG, dtype=torch.float32, device="cpu")
    load_dummy(model, 1)
    with Rig(model) as rig:
        found = rig.engine.command(LargestWeight("model.norm.weight"))
        assert found == float(model.weights()["model.norm.weight"].target.abs().max()) > 0


def test_a_kernel_goes_before_those_of_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
        calls.append(gate_up.shape)
        return ops.silu_mul.reference(gate_up)

    monkeypatch.setattr(ops.silu_mul, "kernels", ops.silu_mul.kernels)
    wanted = outcome(loaded(keep=False))
    ops.silu_mul.add(ops.Kernel("mine", "cpu", silu_mul, dtypes=(torch.float64,)))
    try:
        assert outcome(loaded(keep=False)) == wanted and calls
    finally:
        monkeypatch.undo()
        ops.silu_mul.force("")  # forgets what it chose


# In a worker's process


PROGRAM = """
import sys
from outrider import LLM, SamplingParams
from outrider.config import EngineConfig, SpeculativeConfig
from outrider.engine.start import start_engine
from outrider.mixers.paged.registry import BackendEntry, register_backend
from outrider.models.registry import register
from tests.unit.test_extending import CountingBackend, ParallelLlama

register_backend(BackendEntry("counting", lambda device, dtype: None, lambda max_drafts: CountingBackend()))
register("ParallelLlamaForCausalLM", ParallelLlama)

if __name__ == "__main__":
    drafts = {"method": "tests.unit.test_extending:RepeatLast", "num_speculative_tokens": 2, "auto": False}
    config = EngineConfig(sys.argv[1], dtype="float64", device="cpu", num_pages=40, load_format="dummy",
                          attention_backend="counting", speculative_config=drafts)
    for in_process in (False, True):
        with LLM.around(start_engine(config, in_process=in_process)) as llm:
            params = SamplingParams(temperature=0, max_tokens=12)
            print([o.outputs[0].token_ids for o in llm.generate([[5, 6, 7], [8] * 20], params, use_tqdm=False)])
"""


def test_registrations_of_the_main_module_reach_a_worker_process(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | {"architectures": ["ParallelLlamaForCausalLM"]}))
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    program = subprocess.run([sys.executable, str(tmp_path / "program.py"), str(tmp_path)], env=environment,
                             capture_output=True, text=True)
    assert program.returncode == 0, program.stderr
    in_thread, in_process = program.stdout.splitlines()
    assert in_thread == in_process and in_thread.count(",") == 2 * 12 - 1
