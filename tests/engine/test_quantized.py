"""Models whose weights stay in the bits of a GGUF file, and layers done in one native call: the same numbers."""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from gguf.constants import GGMLQuantizationType
from gguf.quants import quantize

from outrider.config import EngineConfig
from outrider.formats import ExpertsDeclaration, ModelSize, StoredFormat
from outrider.formats.gguf import GgufLinear
from outrider.formats.gguf_experts import GgufExperts
from outrider.kernels import cpu as native
from outrider.kernels import moe
from outrider.kernels.gguf_kinds import KINDS
from outrider.kernels.quantized import ACTIVATION_BITS, QuantizedRows
from outrider.layers import NothingAttends, StepContext
from outrider.layers.base import find_modules
from outrider.layers.fuse import NativeDecoderLayer, prepare, use_activation_bits
from outrider.layers.linear import Linear
from outrider.layers.mlp import GatedMLP
from outrider.mixers.cached import CachedLayers
from outrider.mixers.paged.native_backend import NativeBackend
from outrider.models.base import Model
from outrider.models.head import DraftHead
from outrider.models.loader import declare_formats, fill_model, load_dummy, load_weights
from outrider.models.registry import build_model
from outrider.models.sources import resolve
from outrider.models.sources.gguf_tensors import KEPT_KINDS
from outrider.models.sources.model_source import WeightError
from tests.engine.harness import Ask, Rig, greedy
from tests.models.paged import PagedModel, Piece
from tests.unit.test_sources import write_gguf

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "vocab_size": 96, "hidden_size": 64, "intermediate_size": 96,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "rms_norm_eps": 1e-5,
    "max_position_embeddings": 128, "tie_word_embeddings": True,
}
QWEN3 = CONFIG | {"architectures": ["Qwen3ForCausalLM"], "tie_word_embeddings": False, "attention_bias": True}
MIXED = {"v_proj": "Q8_0", "embed": "Q8_0", "up_proj": "Q5_0"}  # q, k and v are one weight here, of two kinds


@pytest.fixture(autouse=True)
def need_native(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bits are kept whatever a busy machine measures."""
    if not native.available():
        pytest.skip(native.reason())
    monkeypatch.setattr("outrider.formats.gguf.kept_bits_are_fast", lambda: True)


def kind_of(name: str, kinds: dict[str, str]) -> str:
    """The kind of the first part of a name that fits, else Q4_1."""
    return next((kind for part, kind in kinds.items() if part in name), "Q4_1")


def in_blocks(values: torch.Tensor, kind: str) -> torch.Tensor:
    return torch.from_numpy(quantize(values.numpy(), GGMLQuantizationType[kind]))


def stored(config: dict[str, Any], kinds: dict[str, str],
           make: Callable[[torch.Tensor, str], torch.Tensor] = in_blocks,
           ) -> Iterator[tuple[str, torch.Tensor | QuantizedRows]]:
    """Random weights: matrices in their kinds, of which `make` gives the blocks, vectors as numbers."""
    for name, slot in build_model(config, dtype=torch.float32, device="meta").weights().items():
        values = torch.randn(slot.shape, generator=torch.Generator().manual_seed(zlib.crc32(name.encode()))) * 0.2
        if len(slot.shape) == 1:
            yield name, values + 1
            continue
        kind = kind_of(name, kinds)
        yield name, QuantizedRows(kind, make(values, kind))


def build(config: dict[str, Any], kinds: dict[str, str], keep: bool, dtype: torch.dtype = torch.float32) -> Model:
    model = build_model(config, dtype=dtype, device="cpu")
    if keep:
        declare_formats(model, lambda name: StoredFormat(kind_of(name, kinds)))
    load_weights(model, stored(config, kinds))
    return model


def outcome(model: Model, max_num_batched_tokens: int = 32) -> list[Any]:
    """Tokens and log-probabilities of three prompts that share steps."""
    asks = [Ask(prompt, greedy(12, logprobs=3, ignore_eos=True)) for prompt in ([3, 1, 4], [7] * 40, [5, 9, 2, 6])]
    with Rig(model, max_num_batched_tokens=max_num_batched_tokens, max_model_len=96) as rig:
        completions = [output.outputs[0] for output in rig.run(asks)]
    return [(c.token_ids, [{t: x.logprob for t, x in step.items()} for step in c.logprobs or ()]) for c in completions]


@pytest.mark.parametrize("config", [CONFIG, QWEN3], ids=["tied", "qwen3"])
@pytest.mark.parametrize("kinds", [{}, {"": "Q8_0"}, MIXED], ids=["Q4_1", "Q8_0", "mixed"])
@pytest.mark.parametrize(("max_num_batched_tokens", "bits"), [(32, 32), (64, 32), (64, 16)])
def test_kept_bits_give_the_tokens_of_dequantised_weights(
    config: dict[str, Any], kinds: dict[str, str], max_num_batched_tokens: int, bits: int
) -> None:
    kept, numbers = build(config, kinds, keep=True), build(config, kinds, keep=False)
    use_activation_bits(kept, bits)
    for (tokens, logprobs), (expected, theirs) in zip(*(outcome(model, max_num_batched_tokens)
                                                        for model in (kept, numbers)), strict=True):
        assert tokens == expected
        for step, other in zip(logprobs, theirs, strict=True):
            assert step == pytest.approx(other, abs=1e-4 if bits == 32 else 5e-3)
    assert all(isinstance(linear.format, GgufLinear) for linear in find_modules([kept], Linear))
    assert not any(isinstance(linear.format, GgufLinear) for linear in find_modules([numbers], Linear))


def test_kept_weights_take_the_memory_of_their_bits() -> None:
    kept, numbers = build(CONFIG, {}, keep=True), build(CONFIG, {}, keep=False)
    vectors = sum(slot.nbytes for slot in numbers.weights().values() if len(slot.shape) == 1)
    matrices = [slot for slot in numbers.weights().values() if len(slot.shape) == 2]
    bits = sum(slot.nbytes for slot in matrices) // 4 * 24 // 32  # 20 bytes in the file, with scales in float16
    assert sum(slot.nbytes for slot in kept.weights().values()) == vectors + bits
    assert prepare([kept], allow_copies=True) == 0
    down, dense = (find_modules([model], GatedMLP)[0].down.format for model in (kept, numbers))
    assert torch.equal(down.dense(), dense.dense()) and down.weight_bytes == dense.weight_bytes // 4 * 24 // 32


def test_rows_of_a_kept_embedding_are_those_of_its_numbers() -> None:
    kept, numbers = build(CONFIG, {}, keep=True).embed_tokens, build(CONFIG, {}, keep=False).embed_tokens
    assert isinstance(kept.format, GgufLinear) and kept.format.table is None
    assert torch.equal(kept.weight, numbers.weight)
    tokens = torch.tensor([5, 0, 95, 5])
    assert torch.equal(kept.look_up(tokens), numbers.weight[tokens])
    head, context = SimpleNamespace(embedding=kept), StepContext(NothingAttends(), tokens)
    rows, table, scale = DraftHead._table(head, tokens, 2.0, context)  # type: ignore[arg-type]
    assert torch.equal(table[rows], 2 * numbers.weight[tokens]) and scale is None, "a draft head reads the same"


def test_dummy_bits_are_finite_and_run() -> None:
    model = build_model(CONFIG, dtype=torch.float32, device="cpu")
    declare_formats(model, lambda name: StoredFormat("Q4_1"))
    load_dummy(model, seed=3)
    assert all(slot.target.unique().numel() > 200 for slot in model.weights().values() if slot.kind is not None)
    assert all(linear.format.dense().isfinite().all() for linear in find_modules([model], Linear))
    assert outcome(model)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_types_get_numbers(dtype: torch.dtype) -> None:
    kept, numbers = build(CONFIG, {}, True, dtype), build(CONFIG, {}, False, dtype)
    for name, slot in kept.weights().items():
        assert torch.equal(slot.target, numbers.weights()[name].target), name


def test_bits_that_hold_infinity_are_refused() -> None:
    model = build_model(CONFIG, dtype=torch.float32, device="cpu")
    declare_formats(model, lambda name: StoredFormat("Q4_1"))
    tensors = dict(stored(CONFIG, {}))
    rows = tensors["model.layers.1.mlp.up_proj.weight"]
    assert isinstance(rows, QuantizedRows)
    rows.data[5, :2] = torch.tensor([0, 0x7C], dtype=torch.uint8)
    with pytest.raises(WeightError, match=r"layers.1.mlp.up_proj.weight holds NaN or Inf"):
        load_weights(model, tensors.items())


@pytest.mark.parametrize("config", [CONFIG, QWEN3], ids=["tied", "qwen3"])
def test_native_layers_give_the_bits_of_their_parts(config: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    model = build(config, {}, keep=False)
    calls: list[bool] = []
    counts: list[int] = []
    decoder_layer = native.decoder_layer

    def watched(bound: native.BoundLayer, *args: Any) -> torch.Tensor | None:
        added = decoder_layer(bound, *args)
        calls.append(added is not None)
        counts.append(bound.count)
        return added

    monkeypatch.setattr(native, "decoder_layer", watched)
    fused = outcome(model)
    assert all(isinstance(layer, NativeDecoderLayer) for layer in model.layers)
    assert calls and all(calls)
    assert max(counts) == len(model.layers), "all layers are one call where nothing is wanted between them"
    assert outcome(model) == fused, "another engine has another cache"
    monkeypatch.setattr(native, "decoder_layer", lambda *args: None)
    assert outcome(model) == fused


@pytest.mark.parametrize(("bits", "most", "far"), [(8, 1e-2, 0.1), (16, 1e-4, 1e-3)])
def test_fewer_activation_bits_stay_close_and_tell_their_error(bits: int, most: float, far: float) -> None:
    exact, rounded = build(QWEN3, {}, keep=True), build(QWEN3, {}, keep=True)
    assert "is 0 of its largest" in use_activation_bits(exact, 32)
    told = re.fullmatch(rf"activation_bits={bits}: 9 of 9 weights .* rounded to {bits} bits; .* is (\S+) of its "
                        "largest result", use_activation_bits(rounded, bits))
    assert told is not None and most / 100 < float(told[1]) < most
    first_steps = [[steps[0] for _, steps in outcome(model)] for model in (exact, rounded)]
    assert first_steps[0] != first_steps[1], "nothing was rounded"
    for logprobs, close in zip(*first_steps, strict=True):
        shared = logprobs.keys() & close.keys()
        assert shared and all(abs(logprobs[token] - close[token]) < far for token in shared)


def test_products_have_the_activation_bits_of_the_default_by_themselves() -> None:
    assert EngineConfig.activation_bits == ACTIVATION_BITS
    default, asked = build(QWEN3, {}, keep=True), build(QWEN3, {}, keep=True)
    use_activation_bits(asked, ACTIVATION_BITS)
    assert outcome(default) == outcome(asked)


def test_experts_obey_eight_activation_bits() -> None:
    close, rounded = (dummy_experts() for _ in range(2))
    error = rounded.use_activation_bits(8)
    x, ids = torch.randn(5, 64, generator=torch.Generator().manual_seed(1)), torch.tensor([[0, 1]]).expand(5, 2)
    routed = moe.Routed(ids, torch.full((5, 2), 0.5))
    made, near = (experts.mix(x, routed, "silu") for experts in (rounded, close))
    assert error is not None and 0 < error < 0.05
    assert not torch.equal(made, near) and (made - near).abs().max() < 0.1 * near.abs().max()


def dummy_experts() -> GgufExperts:
    sizes = 2, ModelSize(64), ModelSize(32)
    declared = ExpertsDeclaration(*sizes, True, False, torch.float32, torch.device("cpu"))
    experts = GgufExperts(declared, [StoredFormat("Q8_0")] * 6)
    for number, slot in enumerate(experts.slots("").values()):
        slot.draw(slot.target, torch.Generator().manual_seed(number))
    experts.finalize()
    return experts


def test_eight_activation_bits_need_kept_bits() -> None:
    with pytest.raises(ValueError, match="activation_bits=8 finds no weights that it could be used with"):
        use_activation_bits(build(CONFIG, {}, keep=False), 8)


@pytest.mark.parametrize("tied", [False, True])
def test_an_outline_takes_the_bytes_that_loading_keeps(tmp_path: Path, tied: bool) -> None:
    write_gguf(tmp_path / "m.gguf", "Q8_0", tied=tied)
    source = resolve(tmp_path / "m.gguf")
    assert KEPT_KINDS == tuple(KINDS), "a source names the kinds without torch"
    planned, kept, numbers = (build_model(source.config, dtype=torch.float32, device=device)
                              for device in ("meta", "cpu", "cpu"))
    declare_formats(planned, source.stored_format, torch.device("cpu"))
    declare_formats(kept, source.stored_format)
    taken = []
    for model in (kept, numbers):
        fill_model(model, source)
        taken.append(sum(slot.nbytes for slot in model.weights().values()) + prepare([model], False))
    assert sum(slot.nbytes for slot in planned.weights().values()) == taken[0] < taken[1]


def test_taps_lie_within_the_one_call_of_all_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hidden states between layers are the same, whether the layers around them are done in one call or one by one."""
    counts: list[int] = []
    decoder_layer = native.decoder_layer
    monkeypatch.setattr(native, "decoder_layer", lambda bound, *args: counts.append(bound.count) or decoder_layer(
        bound, *args))

    def aux_states(model: Model) -> list[torch.Tensor]:
        pages = PagedModel(model)
        pages.cached = CachedLayers(model.attention_layers, pages.pool, NativeBackend())
        view = pages.view([Piece(0, [3, 1, 4, 1, 5]), Piece(1, [9, 2])])
        hidden = model.forward(view.token_ids, StepContext(pages.cached.bind(view), view.positions), aux_layers=(0, 2,
                                                                                                                 3))
        return [*hidden.aux_states, hidden.final]

    fused, plain = (build(CONFIG | {"num_hidden_layers": 5}, {}, keep=True) for _ in range(2))
    prepare([fused], allow_copies=False)
    expected, found = aux_states(plain), aux_states(fused)
    assert counts == [5]
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))


def test_layers_that_one_call_does_follow_the_pool_and_the_aux_states() -> None:
    """One model serves one pool after another, and is asked for other hidden states between: what was kept of the call
    before must not be used."""

    def states(model: Model, pages: PagedModel, aux_layers: tuple[int, ...]) -> list[torch.Tensor]:
        view = pages.view([Piece(0, [3, 1, 4, 1, 5]), Piece(1, [9, 2])])
        hidden = model.forward(view.token_ids, StepContext(pages.cached.bind(view), view.positions),
                               aux_layers=aux_layers)
        return [*hidden.aux_states, hidden.final]

    fused, plain = (build(CONFIG | {"num_hidden_layers": 5}, {}, keep=True) for _ in range(2))
    prepare([fused], allow_copies=False)
    first, second, expected = PagedModel(fused), PagedModel(fused), PagedModel(plain)
    for pages in (first, second, expected):
        pages.cached = CachedLayers(pages.model.attention_layers, pages.pool, NativeBackend())
    for pages, aux_layers in ((first, ()), (first, (2,)), (second, (2,))):
        assert all(torch.equal(a, b) for a, b in zip(states(plain, expected, aux_layers), states(fused, pages,
                                                                                                 aux_layers),
                                                     strict=True))
    for layer in fused.attention_layers:
        written = second.pool.layer(layer.index)
        for name, tensor in expected.pool.layer(layer.index).items():
            torch.testing.assert_close(written[name], tensor, rtol=0, atol=0, equal_nan=True)  # free pages are NaN
