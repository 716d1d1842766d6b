"""Latent attention and the indexer on the card in the sizes of DeepSeek-V3.2, in bf16: 32 heads, entries of 512 + 64,
64 index heads of 128, the best 2048 positions. Everything that nobody may see is NaN.
"""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="needs the triton package")

from outrider.kernels import latent, ops
from outrider.kernels.fp8_cache import to_fp8
from outrider.kernels.gpu.latent.exact_latent import exact_dense_latent_attention
from outrider.kernels.latent import NOT_CHOSEN, TokenContexts

TOP_K, PAGE = 2048, 16
pytestmark = [pytest.mark.gpu, pytest.mark.together("latent")]


def make(device: torch.device, requests: list[tuple[int, int]], width: int) -> tuple[TokenContexts, torch.Tensor]:
    """requests: (token rows, length). The last of several token rows is dead. Returns contexts and a cache in bf16."""
    columns = max(length for _, length in requests) // PAGE + 2
    generator = torch.Generator(device=device).manual_seed(0)
    table = 1 + torch.randperm(len(requests) * columns, device=device, generator=generator).view(len(requests), columns)
    cache = torch.full((1 + table.numel(), PAGE, width), torch.nan, dtype=torch.bfloat16, device=device)
    request_of, stop = [], []
    for request, (rows, length) in enumerate(requests):
        request_of += [request] * rows
        stop += [length - rows + 2 + row for row in range(rows - 1)] + [0] if rows > 1 else [length]
        at = torch.arange(length, device=device)
        values = torch.randn(length, width, device=device, generator=generator).bfloat16()
        cache[table[request, at // PAGE], at % PAGE] = values
    first = torch.zeros(len(stop), dtype=torch.int64, device=device)
    return TokenContexts(table.int(), torch.tensor(request_of, device=device), first,
                         torch.tensor(stop, device=device)), cache


BATCHES = {
    "decoding": [(1, 5000), (1, 300), (1, 2048), (1, 9001)],
    "checking": [(5, 5000), (4, 700), (5, 2050)] * 4,
    "prompts": [(180, 2500), (90, 90), (1, 3000)],
    "a long prompt": [(387, 9000), (41, 2100)],
}


@pytest.mark.parametrize("heads", [32, 16, 40])
@pytest.mark.parametrize("name", BATCHES)
def test_attention(device: torch.device, name: str, heads: int) -> None:
    contexts, cache = make(device, BATCHES[name], 576)
    tokens = len(contexts.first)
    generator = torch.Generator(device=device).manual_seed(1)
    q = torch.randn(tokens, heads, 576, device=device, generator=generator).bfloat16()
    draws = torch.rand(tokens, int(contexts.stop.max()), device=device, generator=generator)
    chosen = torch.full((tokens, TOP_K), NOT_CHOSEN, dtype=torch.int32, device=device)
    for row, stop in enumerate(contexts.stop.tolist()):
        best = draws[row, :stop].topk(min(stop, TOP_K)).indices.sort().values
        chosen[row, : len(best)] = best
    wanted = latent.latent_attention(q.float(), cache.float(), contexts, chosen.long(), 0.07, 512)
    torch.testing.assert_close(ops.latent_attention(q, cache, contexts, chosen, 0.07, 512).float(), wanted, atol=2e-2,
                               rtol=2e-2)
    longest = int(contexts.stop.max())
    wanted = latent.dense_latent_attention(q.float(), cache.float(), contexts, longest, 0.07, 512)
    torch.testing.assert_close(ops.dense_latent_attention(q, cache, contexts, longest, 0.07, 512).float(), wanted,
                               atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("heads", [16, 40])
@pytest.mark.parametrize("name", ["decoding", "prompts"])
def test_attention_over_fp8(device: torch.device, name: str, heads: int) -> None:
    contexts, cache = make(device, BATCHES[name], 576)
    stored, longest = to_fp8(cache), int(contexts.stop.max())
    generator = torch.Generator(device=device).manual_seed(1)
    q = torch.randn(len(contexts.first), heads, 576, device=device, generator=generator).bfloat16()
    wanted = latent.dense_latent_attention(q.float(), stored.float(), contexts, longest, 0.07, 512)
    for attend in (ops.dense_latent_attention, exact_dense_latent_attention):
        out = attend(q, stored, contexts, longest, 0.07, 512)
        torch.testing.assert_close(out.float(), wanted, atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("name", BATCHES)
def test_choice(device: torch.device, name: str) -> None:
    """Choices differ only among positions whose scores are close to the last chosen one."""
    contexts, keys = make(device, BATCHES[name], 128)
    tokens = len(contexts.first)
    generator = torch.Generator(device=device).manual_seed(2)
    q = torch.randn(tokens, 64, 128, device=device, generator=generator).bfloat16()
    weights = torch.randn(tokens, 64, device=device, generator=generator)
    chosen = torch.full((tokens, TOP_K), -99, dtype=torch.int32, device=device)
    ops.choose_positions(q, weights, keys, contexts, chosen)
    again = torch.full_like(chosen, -99)
    ops.choose_positions(q, weights, keys, contexts, again)
    assert torch.equal(chosen, again)
    for row, (request, stop) in enumerate(zip(contexts.request_of.tolist(), contexts.stop.tolist(), strict=True)):
        count = min(stop, TOP_K)
        own = chosen[row, :count].long()
        assert (chosen[row, count:] == NOT_CHOSEN).all() and (own.diff() > 0).all()
        at = torch.arange(stop, device=device)
        entries = keys[contexts.page_table[request].long()[at // PAGE], at % PAGE].double()
        scores = weights[row].double() @ (q[row].double() @ entries.T).relu()
        if count:
            assert 0 <= own[0] and own[-1] < stop
            last = scores.topk(count).values[-1]
            left = torch.ones(stop, dtype=torch.bool, device=device)
            left[own] = False
            assert scores[own].min() > last - 1e-3 * scores.abs().max()
            assert not left.any() or scores[left].max() < last + 1e-3 * scores.abs().max()


def test_equal_scores(device: torch.device) -> None:
    """Every score is the same: there are more candidates than any list has room for."""
    contexts, keys = make(device, [(3, 20000)], 128)
    keys = torch.where(keys.isnan(), keys, 1.0)
    q, weights = torch.ones(3, 64, 128, device=device).bfloat16(), torch.ones(3, 64, device=device)
    chosen = torch.full((3, TOP_K), -99, dtype=torch.int32, device=device)
    ops.choose_positions(q, weights, keys, contexts, chosen)
    assert torch.equal(chosen[:2], torch.arange(TOP_K, dtype=torch.int32, device=device).expand(2, -1))
