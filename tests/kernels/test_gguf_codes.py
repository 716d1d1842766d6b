"""GGUF weights as codes for products on a GPU: what the codes stand for, their products, and models that keep them."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="needs the triton package")

from gguf.constants import GGMLQuantizationType
from gguf.quants import dequantize

from outrider.formats import StoredFormat, gguf_codes
from outrider.formats.scaled import ScaledExperts, ScaledLinear
from outrider.formats.stacked import StackedLinear
from outrider.kernels.gguf_codes import FORMS, to_codes
from outrider.kernels.gguf_kinds import KINDS
from outrider.kernels.gpu.linear.scaled import exact_scaled_linear, scaled_linear
from outrider.layers.base import find_modules
from outrider.layers.linear import Linear
from outrider.layers.moe import Experts
from outrider.models.base import Model
from outrider.models.loader import declare_formats, load_weights
from outrider.models.registry import build_model
from tests.engine.test_quantized import QWEN3, kind_of, stored
from tests.kernels.test_quantized import make
from tests.models.oracle import all_logits, tokens_of

WIDE = QWEN3 | {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64, "num_hidden_layers": 1}
Q4_K_M = {"v_proj": "Q6_K", "down_proj": "Q6_K", "lm_head": "Q6_K", "": "Q4_K"}


@pytest.mark.parametrize("kind", KINDS)
def test_codes_stand_for_the_weights_of_the_library(kind: str) -> None:
    torch.manual_seed(0)
    rows, want = make(kind, 20, 512)
    made = to_codes(kind, rows.data)
    assert made.shape == (20, 512) and made.code == FORMS[kind].code and made.group == FORMS[kind].group
    bound = (made.numbers() - (0 if made.offsets is None else made._by_column(made.offsets))).abs()
    bound += 0 if made.offsets is None else made._by_column(made.offsets).abs()
    error = (made.numbers().double() - want.double()).abs()
    assert bool((error <= 2.0**-8 * 1.01 * bound.double()).all())


def test_large_weights_are_made_some_outputs_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    rows, _ = make("Q4_K", 70, 256)
    whole = to_codes("Q4_K", rows.data)
    monkeypatch.setattr("outrider.kernels.scaled.MAX_NUMBERS", 16 * 144)
    assert torch.equal(to_codes("Q4_K", rows.data).numbers(), whole.numbers())


@pytest.mark.parametrize("kind", ["Q4_K", "Q6_K", "Q8_0", *(pytest.param(kind, marks=pytest.mark.long)
                                                          for kind in KINDS if kind not in ("Q4_K", "Q6_K", "Q8_0"))])
def test_products(device: torch.device, dtype: torch.dtype, kind: str) -> None:
    """Products are those of the library's weights; a token row has the same bits among others in exact mode."""
    torch.manual_seed(1)
    rows, _ = make(kind, 50, 512)
    weight = torch.from_numpy(dequantize(rows.data.numpy(), GGMLQuantizationType[kind])).to(device).double()
    codes, x = to_codes(kind, rows.data.to(device)), torch.randn(70, 512).to(device, dtype)
    for num_rows in (1, 9, 64, 70):
        out, wanted = scaled_linear(x[:num_rows], codes).double(), x[:num_rows].double() @ weight.T
        assert float((out - wanted).norm() / wanted.norm()) < 5e-3 + 2 * torch.finfo(dtype).eps
    assert torch.equal(exact_scaled_linear(x[:3], codes), exact_scaled_linear(x, codes)[:3])


@pytest.fixture
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """GGUF weights become codes on the CPU too, and are not packed for native products."""
    made = gguf_codes.as_codes
    monkeypatch.setattr("outrider.formats.registry.as_codes", lambda held, device: made(held, torch.device("cuda")))
    monkeypatch.setattr("outrider.formats.scaled.is_on_host", lambda declared: False)


def build(config: dict[str, Any], kinds: dict[str, str], keep: bool) -> Model:
    model = build_model(config, dtype=torch.float32, device="cpu")
    if keep:
        declare_formats(model, lambda name: StoredFormat(kind_of(name, kinds)))
    load_weights(model, stored(config, kinds, as_blocks))
    return model


def as_blocks(values: torch.Tensor, kind: str) -> torch.Tensor:
    """Random blocks with small scales: the library codes few kinds."""
    scale = {"Q4_K": 2e-3, "Q6_K": 1e-4}[kind]
    return make(kind, *values.shape, scale=scale)[0].data


def test_a_model_of_several_kinds(as_on_a_gpu: None, caplog: pytest.LogCaptureFixture) -> None:
    torch.manual_seed(2)
    state = torch.get_rng_state()
    with caplog.at_level(logging.INFO, "outrider"):
        kept = build(WIDE, Q4_K_M, keep=True)
    assert "MiB in int4 groups of Q4_K" in caplog.text and "MiB in int8 groups of Q6_K" in caplog.text
    torch.set_rng_state(state)
    expanded = build(WIDE, Q4_K_M, keep=False)
    formats = [type(linear.format) for linear in find_modules([kept], Linear)]
    assert set(formats) == {ScaledLinear, StackedLinear} and formats.count(StackedLinear) == 1, "q, k and v"
    for ours, plain in zip(find_modules([kept], Linear), find_modules([expanded], Linear), strict=True):
        assert ours.format.weight_bytes < 0.3 * plain.format.weight_bytes
        made, wanted = ours.format.dense(), plain.format.dense()
        assert made is not None and wanted is not None and float((made - wanted).norm() / wanted.norm()) < 4e-3
    with torch.no_grad():
        tokens = tokens_of(1, 20) % 96
        logits, wanted = all_logits(kept, tokens), all_logits(expanded, tokens)
    assert float((logits - wanted).norm() / wanted.norm()) < 0.02


def test_experts_whose_projections_are_of_two_kinds(as_on_a_gpu: None) -> None:
    config = WIDE | {"architectures": ["Qwen3MoeForCausalLM"], "num_experts": 4, "num_experts_per_tok": 2,
                     "moe_intermediate_size": 256, "norm_topk_prob": True, "attention_bias": False}
    logits = []
    for keep in (True, False):
        torch.manual_seed(3)
        model = build(config, Q4_K_M, keep)
        for experts in find_modules([model], Experts):
            assert isinstance(experts.format, ScaledExperts) == keep
        with torch.no_grad():
            logits.append(all_logits(model, tokens_of(1, 20) % 96))
    assert float((logits[0] - logits[1]).norm() / logits[1].norm()) < 0.02
