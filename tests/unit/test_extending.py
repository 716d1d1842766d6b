"""The worked examples of docs/extending.md: each plugs a toy in from outside the package and touches no file of it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from outrider.cache.groups import Group, plan_groups
from outrider.cache.kinds import FullKind, PagedSpec, Part, register_kind
from outrider.cache.kinds import base as kinds_base
from outrider.drafters.base import Drafter, Drafts, Step
from outrider.formats import KeptFormat, StoredWeight, register_format
from outrider.formats import registry as formats_registry
from outrider.kernels import ops
from outrider.layers import fuse
from outrider.layers.base import DecoderLayer, find_modules
from outrider.layers.decoder import PreNormLayer
from outrider.layers.linear import Linear
from outrider.mixers import cached
from outrider.mixers.base import Mixer
from outrider.mixers.batch import BatchView
from outrider.mixers.paged import registry as backends
from outrider.mixers.paged.base import AttentionLayer, Backend, KeyValueCache, PagedMixer
from outrider.mixers.paged.masks import QueryMarks
from outrider.mixers.paged.torch_backend import TorchBackend
from outrider.mixers.pool import DevicePool
from outrider.models import registry as models_registry
from outrider.models.base import Model
from outrider.models.llama import Llama
from outrider.models.loader import load_weights
from outrider.models.registry import build_model
from tests.engine.harness import Ask, Rig, greedy

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "vocab_size": 96, "hidden_size": 64, "intermediate_size": 96,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "rms_norm_eps": 1e-5,
    "max_position_embeddings": 128, "tie_word_embeddings": False,
}  # fmt: skip


# A weight format


@dataclass(frozen=True)
class Int8Rows:
    """A weight as a source of tensors would yield it: whole numbers and one scale for each output feature."""

    values: torch.Tensor  # [outputs, inputs] int8
    scales: torch.Tensor  # [outputs, 1]
    kind: str = "int8_rows"

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.values.shape)

    def is_finite(self) -> bool:
        return bool(self.scales.isfinite().all())

    def dequantize(self) -> torch.Tensor:
        return self.values * self.scales


class Int8Linear(KeptFormat):
    """Scales what comes out of the product, so that no dequantised weight is ever made."""

    def __init__(self, values: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None) -> None:
        super().__init__(torch.empty(values.shape, dtype=scales.dtype, device="meta"), bias)
        self._values, self._scales = values, scales

    @classmethod
    def can_keep(cls, dtype: torch.dtype, device: torch.device) -> bool:
        return dtype == torch.float64

    @classmethod
    def from_parts(
        cls, parts: Sequence[StoredWeight], bias: torch.Tensor | None, shared: torch.Tensor | None
    ) -> Int8Linear | None:
        rows = [part for part in parts if isinstance(part, Int8Rows)]
        return cls(torch.cat([r.values for r in rows]), torch.cat([r.scales for r in rows]), bias)

    @property
    def weight_bytes(self) -> int:
        return self._values.nbytes + self._scales.nbytes

    def product(self, x: torch.Tensor) -> torch.Tensor:
        out = (x @ self._values.to(x.dtype).T) * self._scales.T
        return out if self._bias is None else out + self._bias


def int8_tensors(model: Model, keep: bool) -> Iterator[tuple[str, Any]]:
    """Random weights; those of linear layers as int8 rows, or as the numbers they stand for."""
    generator = torch.Generator().manual_seed(3)
    for name, slot in model.weights().items():
        if len(slot.shape) == 1 or "embed" in name:
            yield name, torch.randn(slot.shape, generator=generator, dtype=torch.float64) * 0.2 + 1
            continue
        values = torch.randint(-127, 128, slot.shape, generator=generator, dtype=torch.int8)
        scales = torch.rand(slot.shape[0], 1, generator=generator, dtype=torch.float64) / 256
        rows = Int8Rows(values, scales)
        yield name, rows if keep else rows.dequantize()


def loaded(keep: bool, dtype: torch.dtype = torch.float64) -> Model:
    model = build_model(CONFIG, dtype=dtype, device="cpu")
    load_weights(model, int8_tensors(model, keep))
    return model


def outcome(model: Model, **settings: Any) -> list[list[int]]:
    asks = [Ask(prompt, greedy(8, ignore_eos=True)) for prompt in ([3, 1, 4], [7] * 40)]
    with Rig(model, max_num_batched_tokens=32, max_model_len=96, **settings) as rig:
        return [list(output.outputs[0].token_ids) for output in rig.run(asks)]


@pytest.fixture
def int8_format(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(formats_registry, "_FORMATS", dict(formats_registry._FORMATS))
    register_format("int8_rows", Int8Linear)


@pytest.mark.usefixtures("int8_format")
def test_a_weight_format_needs_one_product_and_gives_the_tokens_of_its_numbers() -> None:
    kept, numbers = loaded(keep=True), loaded(keep=False)
    formats = [linear.format for linear in find_modules([kept], Linear)]
    assert all(isinstance(held, Int8Linear) for held in formats) and len(formats) == 4 * 2 + 1
    assert sum(slot.nbytes for slot in kept.weights().values()) < sum(s.nbytes for s in numbers.weights().values()) / 4
    assert outcome(kept) == outcome(numbers)


@pytest.mark.usefixtures("int8_format")
def test_a_format_that_cannot_serve_a_model_leaves_it_to_the_dense_one() -> None:
    model = loaded(keep=True, dtype=torch.float32)
    assert not any(isinstance(linear.format, Int8Linear) for linear in find_modules([model], Linear))
    assert outcome(model)


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
    load_weights(model, int8_tensors(model, keep=False))
    assert not any("post_attention_layernorm" in name for name in model.weights())
    whole = outcome(model)
    assert whole != outcome(loaded(keep=False)), "the layers are other ones"
    drafted = outcome(model, speculative_config={"method": "ngram", "num_speculative_tokens": 3, "auto": False})
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
from outrider.config import EngineConfig
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
        with LLM.around(start_engine(config, in_process=in_process), "toy") as llm:
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
