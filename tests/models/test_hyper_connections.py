"""A layer with hyper-connections against transformers' modules and plain formulas, whole and for some token rows."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from outrider.kernels.streams import StreamRule
from outrider.layers import FeedForward, RMSNorm, StepContext, TokenMixer
from outrider.layers.hyper_connections import HyperConnection, HyperLayer
from outrider.mixers import WantedRows
from tests.models.oracle import LOGIT_ROWS

HIDDEN, STREAMS, TOKENS = 24, 4, 6
OPTIONS: dict[str, Any] = {"dtype": torch.float32, "device": torch.device("cpu")}
NAMES = [tuple(f"hc_{half}_{name}" for name in ("fn", "base", "scale")) for half in ("attn", "ffn")]


class Sums(TokenMixer):
    """A token row's sum over itself and all before it."""

    def __call__(self, x: torch.Tensor, angles: Any, context: StepContext) -> torch.Tensor:
        return x.cumsum(dim=0)


class Sines(FeedForward):
    def __call__(self, x: torch.Tensor, context: StepContext) -> torch.Tensor:
        return x.sin()


def make_layer(rule: StreamRule) -> HyperLayer:
    halves = [HyperConnection(HIDDEN, rule, names, **OPTIONS) for names in NAMES]  # type: ignore[arg-type]
    norms = [RMSNorm(HIDDEN, 1e-5, **OPTIONS) for _ in range(2)]
    layer = HyperLayer(halves[0], norms[0], Sums(), halves[1], norms[1], Sines())
    for seed, (_, slot) in enumerate(sorted(layer.weights().items())):
        slot.store(torch.randn(slot.shape, generator=torch.Generator().manual_seed(seed)) * 0.5)
    layer.finalize()
    return layer


@torch.no_grad()
@pytest.mark.parametrize("num_rounds", [20, 0], ids=["glm5_next", "hy_v4"])
def test_a_layer_is_what_transformers_modules_make(num_rounds: int) -> None:
    glm = pytest.importorskip("transformers.models.glm5_next.modeling_glm5_next")
    hy = pytest.importorskip("transformers.models.hy_v4.modeling_hy_v4")
    rule = StreamRule(STREAMS, 1e-5, 1e-6, 2.0 if num_rounds else 1.5, 0.0 if num_rounds else 1e-6, num_rounds)
    layer = make_layer(rule)
    assert {name for name in layer.weights() if name.startswith("hc_")} == {n for names in NAMES for n in names}
    config = SimpleNamespace(hc_mult=STREAMS, hc_sinkhorn_iters=num_rounds, hc_eps=rule.eps, rms_norm_eps=rule.rms_eps,
                             hidden_size=HIDDEN, hc_magnitude=rule.post_factor)
    streams = torch.randn(TOKENS, STREAMS * HIDDEN, generator=torch.Generator().manual_seed(9))
    wanted = streams.view(1, TOKENS, STREAMS, HIDDEN)
    halves = ((layer.mixer_streams, layer.input_norm, lambda x: x.cumsum(dim=1)),
              (layer.mlp_streams, layer.mlp_norm, torch.sin))
    for mine, norm, half in halves:
        theirs = glm.Glm5NextTextHyperConnection(config) if num_rounds else hy.HYV4HyperConnection(config)
        for name, tensor in (("fn", mine.matrix), ("base", mine.base), ("scale", mine.scale)):
            getattr(theirs, name).copy_(tensor)
        if num_rounds:
            post, mixing, read = theirs(wanted)
            kept = mixing.transpose(-1, -2) @ wanted
        else:
            (post, read), kept = theirs(wanted), wanted
        normed = read / (read.square().mean(-1, keepdim=True) + 1e-5).sqrt() * norm.weight
        wanted = post[..., None] * half(normed)[..., None, :] + kept
    delta, whole = layer(None, streams.clone(), None, LOGIT_ROWS)  # type: ignore[arg-type]
    assert delta is None
    torch.testing.assert_close(whole, wanted[0].flatten(1))
    rows = torch.tensor([4, 1])
    _, some = layer.for_rows(WantedRows(rows), None, streams.clone(), None, LOGIT_ROWS)
    torch.testing.assert_close(some, whole[rows])


@torch.no_grad()
def test_a_matrix_of_float32_loses_nothing_in_a_model_of_16_bits() -> None:
    rule = StreamRule(STREAMS, 1e-5, 1e-6, 1.5, 1e-6)
    streams = torch.randn(TOKENS, STREAMS * HIDDEN, generator=torch.Generator().manual_seed(9)).bfloat16()
    found = []
    for dtype, keeps_float32 in ((torch.float32, True), (torch.bfloat16, True), (torch.bfloat16, False)):
        made = HyperConnection(HIDDEN, rule, NAMES[0], dtype=dtype, device=OPTIONS["device"],  # type: ignore[arg-type]
                               keeps_float32=keeps_float32)
        for seed, slot in enumerate(made.weights().values()):
            slot.store(torch.randn(slot.shape, generator=torch.Generator().manual_seed(seed)) * 0.5)
        made.finalize()
        found.append(made.read(streams.to(dtype))[1].post)
    exact, kept, rounded = found
    assert (kept - exact).abs().max() < 5e-6 < 2e-4 < (rounded - exact).abs().max()
