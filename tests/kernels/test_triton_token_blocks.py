"""The kernels of attention to chosen blocks against their torch twins: several requests with any number of token
rows, dead token rows, blocks that begin at position 1, and NaN wherever nothing may be read."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="needs the triton package")

from outrider.kernels import latent
from outrider.kernels import token_blocks as twins
from outrider.kernels.gpu.index import choice as index_choice
from outrider.kernels.gpu.index import token_blocks as kernels
from outrider.kernels.gpu.pages.cache_write import cache_write
from outrider.kernels.latent_inputs import RopeRows
from outrider.kernels.token_blocks import TokenBlocks
from tests.kernels.test_triton_latent import TOLERANCE, make_cache, make_contexts, spread

# (token rows, first visible position, length) of each request; pages have 4 tokens
LENS = [(1, 0, 19), (5, 0, 23), (3, 3, 9), (2, 0, 1), (1, 5, 5), (7, 2, 30), (1, 0, 2), (1, 1, 3)]


def naive(q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, first: int, stop: int, places: list[int],
          blocks: TokenBlocks, scale: float) -> torch.Tensor:
    """One token row over plain lists of its request's keys and values [positions, kv heads, dim]."""
    size, anchor = blocks
    seen = [anchor + (place - blocks.shift) * size + i for place in places for i in range(size)]
    seen += [p for p in range(anchor + max(stop - anchor, 0) // size * size, stop) if p >= first]
    out = torch.zeros_like(q)
    for head in range(len(q) if seen else 0):
        own = head * keys.shape[1] // len(q)
        out[head] = (keys[seen, own] @ q[head] * scale).softmax(0) @ values[seen, own]
    return out


@pytest.mark.parametrize(("blocks", "splits"), [(TokenBlocks(4, 0), 1), (TokenBlocks(2, 1), 3)], ids=str)
def test_choice_and_attention(device: torch.device, dtype: torch.dtype, blocks: TokenBlocks, splits: int) -> None:
    contexts = make_contexts(device, LENS, columns=8)
    count, heads, kv_heads, dim, top = len(contexts.first), 6, 2, 12, 3
    index_keys = make_cache(contexts, 16, dtype)
    k_cache, v_cache = (make_cache(contexts, kv_heads * dim, dtype).unflatten(2, (kv_heads, dim)) for _ in range(2))
    v_cache = v_cache * 2 + 1
    index_q = spread(count, 16, 16, device=device, dtype=dtype)
    weights = torch.ones(count, 16, device=device)
    seen = blocks.visible(contexts)
    chosen, wanted = (torch.full((count, top), -9, dtype=torch.int32, device=device) for _ in range(2))
    latent.choose_positions(index_q, weights, blocks.keys(index_keys), seen, wanted)
    index_choice.choose_positions(index_q, weights, blocks.keys(index_keys), seen, chosen, pdl=False)
    assert torch.equal(chosen, wanted) and (wanted >= 0).sum() > 20
    q = spread(count, heads, dim, device=device, dtype=dtype, seed=5)
    expected = twins.block_attention(q, k_cache, v_cache, contexts, wanted, 0.3, blocks)
    out = kernels.block_attention(q, k_cache, v_cache, contexts, wanted, 0.3, blocks, num_splits=splits, pdl=False)
    near = {"atol": TOLERANCE[dtype], "rtol": TOLERANCE[dtype]}
    torch.testing.assert_close(out, expected, **near)
    for row in range(0, count, 3):
        pages = contexts.page_table[contexts.request_of[row]].long()
        keys, values = (cache[pages].flatten(0, 1).float() for cache in (k_cache, v_cache))
        places = [place for place in wanted[row].tolist() if place >= 0]
        span = int(contexts.first[row]), int(contexts.stop[row])
        alone = naive(q[row].float(), keys, values, *span, places, blocks, 0.3)
        torch.testing.assert_close(expected[row].float(), alone, **near)
    assert (out[contexts.stop <= contexts.first] == 0).all()


@pytest.mark.parametrize("blocks", [TokenBlocks(4, 0), TokenBlocks(4, 1)], ids=str)
def test_keys_of_blocks(device: torch.device, dtype: torch.dtype, blocks: TokenBlocks) -> None:
    """A text of 23 tokens in steps of several sizes: every cell is a token's own key, or that of its whole block. A
    draft is written and rejected in every step."""
    dim, turning, length, page = 12, 8, 23, 4
    table = torch.tensor([[5, 2, 7, 1, 3, 6, 4]], dtype=torch.int32, device=device)
    rope = spread(64, turning, device=device, dtype=torch.float32, seed=1)
    gain, raw = spread(dim, device=device, dtype=torch.float32, seed=2), spread(length, dim, device=device, dtype=dtype)
    caches = [torch.full((8, page, dim + 3), torch.nan, device=device, dtype=dtype)[..., :dim] for _ in range(2)]

    def write(begin: int, keys: torch.Tensor, num_dead: int = 0) -> None:
        live = len(keys) - num_dead
        at = torch.arange(begin, begin + len(keys), device=device)
        slots = table[0, at // page].long() * page + at % page
        slots[live:] = -1
        none = torch.zeros(len(keys), dtype=torch.int64, device=device)
        contexts = latent.TokenContexts(table, none, none, at + 1)
        for function, cache in zip((twins.write_block_keys, kernels.write_block_keys), caches, strict=True):
            function(keys, gain, 1e-6, RopeRows(at, rope), slots, at - begin, contexts, cache, blocks)

    begin = 0
    for count in (1, 6, 2, 1, 9, 4):
        write(begin, torch.cat((raw[begin : begin + count], raw[:2] + 7)), num_dead=1)  # a draft, and a dead token row
        begin += count
    write(0, raw[:0])
    mine, theirs = (cache[table[0].long()].flatten(0, 1)[:length] for cache in reversed(caches))
    near = {"atol": TOLERANCE[dtype], "rtol": TOLERANCE[dtype]}
    torch.testing.assert_close(mine, theirs, **near)
    num_whole = 0
    for position in range(length):
        start = position - blocks.size + 1
        if start < blocks.anchor or (start - blocks.anchor) % blocks.size:
            assert torch.equal(theirs[position], raw[position])
            continue
        mean = raw[start : position + 1].float().mean(0)
        key = mean / (mean.square().mean() + 1e-6).sqrt() * gain
        a, b, (cos, sin) = key[: turning // 2], key[turning // 2 : turning], rope[start].chunk(2)
        turned = torch.cat((a * cos - b * sin, b * cos + a * sin, key[turning:]))
        torch.testing.assert_close(theirs[position].float(), turned, **near)
        num_whole += 1
    assert num_whole == (length - blocks.anchor) // blocks.size


def test_rows_that_disagree_are_refused(device: torch.device) -> None:
    contexts = make_contexts(device, LENS, columns=8)
    cache, chosen = torch.zeros(4, 4, 2, 16, device=device), torch.zeros(3, 2, dtype=torch.int32, device=device)
    with pytest.raises(ValueError, match="same number of token rows: queries 3"):
        kernels.block_attention(torch.zeros(3, 4, 16, device=device), cache, cache, contexts, chosen, 1.0,
                                TokenBlocks(2, 0))


def test_keys_and_values(device: torch.device, dtype: torch.dtype) -> None:
    """Rows without a slot write nothing."""
    k, v = (spread(5, 2, 12, device=device, dtype=dtype, seed=seed) for seed in (3, 4))
    slots = torch.tensor([6, -1, 5, 11, -1], device=device)  # page 0 belongs to no request
    mine, theirs = ([torch.full((3, 4, 2, 12), 9.0, device=device, dtype=dtype) for _ in range(2)] for _ in range(2))
    cache_write(k, v, slots, *mine)
    twins.write_keys_values(k, v, slots, *theirs)
    for own, other in zip(mine, theirs, strict=True):
        assert torch.equal(own, other) and int((own != 9.0).flatten(2).any(-1).sum()) == 3
