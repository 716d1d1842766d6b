"""Hyper-connections: the torch twins against transformers' modules, and the kernels against the twins."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton", reason="needs the triton package")

from outrider.kernels import streams as twins
from outrider.kernels.gpu.elements import hyper_streams as kernels
from outrider.kernels.streams import StreamRule

MIXING = StreamRule(4, 1e-5, 1e-6, post_factor=2.0, num_rounds=20)
PLAIN = StreamRule(4, 1e-5, 1e-6, post_factor=1.7, post_eps=1e-6)
END = StreamRule(4, 1e-5, 1e-6, post_factor=1.7, writes=False)
HIDDEN = 24
NEAR = {torch.float32: 2e-5, torch.bfloat16: 3e-2}


def drawn(*shape: int, seed: int, scale: float = 1.0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale).to(dtype)


@torch.no_grad()
@pytest.mark.parametrize("rule", [MIXING, PLAIN], ids=["glm5_next", "hy_v4"])
def test_the_twins_are_transformers_modules(rule: StreamRule) -> None:
    glm = pytest.importorskip("transformers.models.glm5_next.modeling_glm5_next")
    hy = pytest.importorskip("transformers.models.hy_v4.modeling_hy_v4")
    config = SimpleNamespace(hc_mult=4, hc_sinkhorn_iters=20, hc_eps=rule.eps, rms_norm_eps=rule.rms_eps,
                             hidden_size=HIDDEN, hc_magnitude=rule.post_factor)
    theirs = glm.Glm5NextTextHyperConnection(config) if rule.num_rounds else hy.HYV4HyperConnection(config)
    for seed, parameter in enumerate(theirs.parameters()):
        parameter.copy_(drawn(*parameter.shape, seed=seed, scale=0.5))
    streams, x = drawn(5, 4 * HIDDEN, seed=7), drawn(5, HIDDEN, seed=8)
    before = streams.view(1, 5, 4, HIDDEN).clone()
    if rule.num_rounds:
        post, mixing, read = theirs(before)
        written = post[..., None] * x.view(1, 5, 1, HIDDEN) + mixing.transpose(-1, -2) @ before
    else:
        post, read = theirs(before)
        written = post[..., None] * x.view(1, 5, 1, HIDDEN) + before
    mine = twins.read_streams(streams, streams @ theirs.fn.T, theirs.scale, theirs.base, rule)
    torch.testing.assert_close(mine[0], read[0])
    torch.testing.assert_close(mine[1], post[0])
    twins.write_streams(streams, x, *mine[1:])
    torch.testing.assert_close(streams, written[0].flatten(1))


@torch.no_grad()
def test_streams_end_as_in_transformers() -> None:
    hy = pytest.importorskip("transformers.models.hy_v4.modeling_hy_v4")
    theirs = hy.HYV4HyperHead(SimpleNamespace(hc_mult=4, hc_eps=END.eps, rms_norm_eps=END.rms_eps, hidden_size=HIDDEN))
    for seed, parameter in enumerate(theirs.parameters()):
        parameter.copy_(drawn(*parameter.shape, seed=seed, scale=0.5))
    streams = drawn(5, 4 * HIDDEN, seed=7)
    read, *weights = twins.read_streams(streams, streams @ theirs.hc_fn.T, theirs.hc_scale, theirs.hc_base, END)
    torch.testing.assert_close(read, theirs(streams.view(1, 5, 4, HIDDEN))[0])
    assert not any(weight.numel() for weight in weights), "nothing is added to streams that end"


@pytest.mark.parametrize("hidden", [24, 1030])
@pytest.mark.parametrize("rule", [MIXING, PLAIN, END], ids=["mixing", "plain", "end"])
def test_the_kernels_are_the_twins(device: torch.device, dtype: torch.dtype, rule: StreamRule, hidden: int) -> None:
    near = {"atol": NEAR[dtype], "rtol": NEAR[dtype]}
    wide = torch.full((3, 4 * hidden + 5), torch.nan)
    wide[:, 2:-3] = drawn(3, 4 * hidden, seed=1)
    streams = wide.to(device, dtype)[:, 2:-3]
    logits, base = (drawn(*shape, seed=2).to(device) for shape in ((3, rule.num_logits), (rule.num_logits,)))
    scale = drawn(len(rule.parts), seed=3).to(device)
    mine = kernels.read_streams(streams, logits, scale, base, rule, pdl=False)
    theirs = twins.read_streams(streams, logits, scale, base, rule)
    for own, other in zip(mine, theirs, strict=True):
        torch.testing.assert_close(own, other, **near)
    if rule.num_rounds:
        sums = mine[2].view(3, 4, 4).sum(dim=1)
        torch.testing.assert_close(sums, torch.ones_like(sums), atol=1e-4, rtol=0.0)
    rest = drawn(3, rule.num_logits, seed=9).to(device)  # of logits in two parts
    halves = kernels.read_streams(streams, torch.cat((logits - rest, rest), dim=1), scale, base, rule, pdl=False)
    for own, other in zip(halves, theirs, strict=True):
        torch.testing.assert_close(own, other, **near)
    if not rule.writes:
        return
    x, written = drawn(3, hidden, seed=4).to(device, dtype), streams.clone()
    twins.write_streams(written, x, *theirs[1:])
    kernels.write_streams(streams, x, *theirs[1:], pdl=False)
    torch.testing.assert_close(streams, written, **near)
    alone = kernels.read_streams(streams[1:2], logits[1:2], scale, base, rule, pdl=False)
    whole = kernels.read_streams(streams, logits, scale, base, rule, pdl=False)
    assert all(torch.equal(own[0], other[1]) for own, other in zip(alone, whole, strict=True))


def test_rows_that_disagree_are_refused(device: torch.device) -> None:
    streams, base = torch.zeros(3, 96, device=device), torch.zeros(8, device=device)
    with pytest.raises(ValueError, match="read_streams: logits has shape"):
        kernels.read_streams(streams, torch.zeros(2, 8, device=device), base[:2], base, PLAIN)
    x, post = torch.zeros(2, 24, device=device), torch.zeros(3, 4, device=device)
    with pytest.raises(ValueError, match="write_streams: x has shape"):
        kernels.write_streams(streams, x, post, base[None, :0])
