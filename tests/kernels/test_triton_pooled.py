"""The kernels of latent attention to blocks, and of latents without a rotating part, against their torch twins:
several requests, dead token rows, blocks that begin at position 1, and NaN wherever nothing may be read."""

from __future__ import annotations

import json

import pytest
import torch

pytest.importorskip("triton", reason="needs the triton package")

from outrider.kernels import latent, latent_inputs
from outrider.kernels import pooled_keys as twins
from outrider.kernels.gpu.index import choice as index_choice
from outrider.kernels.gpu.index import pooled_keys as kernels
from outrider.kernels.gpu.latent import attention as latent_attention
from outrider.kernels.gpu.latent import inputs as inputs_kernel
from outrider.kernels.latent import TokenContexts
from outrider.kernels.latent_inputs import RopeRows
from outrider.kernels.pooled_keys import PoolCells, PoolWeights
from outrider.kernels.token_blocks import TokenBlocks
from tests.kernels.compiled import compiling, found_without_interpreter
from tests.kernels.test_triton_latent import TOLERANCE, make_cache, make_contexts, spread

# (token rows, first visible position, length) of each request; pages have 4 tokens
LENS = [(1, 0, 19), (5, 0, 23), (3, 3, 9), (2, 0, 1), (1, 5, 5), (7, 2, 30), (1, 0, 2), (1, 1, 3)]


@pytest.mark.parametrize("blocks", [TokenBlocks(4, 0), TokenBlocks(2, 1)], ids=str)
def test_choice_and_attention(device: torch.device, dtype: torch.dtype, blocks: TokenBlocks) -> None:
    """Positions of chosen blocks are those of a plain loop, and attention to them is the twin's. Entries have no
    rotating part."""
    contexts = make_contexts(device, LENS, columns=8)
    count, heads, dim, top = len(contexts.first), 6, 20, 3
    index_q, weights = spread(count, 16, 16, device=device, dtype=dtype), torch.rand(count, 16, device=device)
    seen, keys = blocks.visible(contexts), blocks.keys(make_cache(contexts, 16, dtype))
    chosen, wanted = (torch.full((count, top), -9, dtype=torch.int32, device=device) for _ in range(2))
    latent.choose_positions(index_q, weights, keys, seen, wanted)
    index_choice.choose_positions(index_q, weights, keys, seen, chosen, pdl=False)
    assert torch.equal(chosen, wanted)
    listed = twins.list_blocks(contexts, wanted, blocks)
    assert torch.equal(kernels.list_blocks(contexts, chosen, blocks, pdl=False), listed)
    num_long, most = 0, (top + 1) * blocks.size - 1
    for row, (first, stop) in enumerate(zip(contexts.first.tolist(), contexts.stop.tolist(), strict=True)):
        expected = list(range(first, stop))
        if stop - first > most:
            begins = [blocks.anchor + (place - blocks.shift) * blocks.size for place in wanted[row].tolist()]
            tail = blocks.anchor + (stop - blocks.anchor) // blocks.size * blocks.size
            expected = [begin + i for begin in begins for i in range(blocks.size)] + list(range(tail, stop))
            num_long += 1
        assert listed[row].tolist() == expected + [-1] * (most - len(expected))
    assert 3 < num_long < count - 3
    cache = make_cache(contexts, dim, dtype)
    q = spread(count, heads, dim, device=device, dtype=dtype, seed=5)
    out = latent_attention.latent_attention(q, cache, contexts, listed, 0.3, dim, pdl=False)
    near = {"atol": TOLERANCE[dtype], "rtol": TOLERANCE[dtype]}
    torch.testing.assert_close(out, latent.latent_attention(q, cache, contexts, listed, 0.3, dim), **near)
    assert (out[contexts.stop <= contexts.first] == 0).all()


@pytest.mark.parametrize("blocks", [TokenBlocks(4, 0), TokenBlocks(4, 1)], ids=str)
def test_keys_of_blocks(device: torch.device, dtype: torch.dtype, blocks: TokenBlocks) -> None:
    """A text of 23 tokens in steps of several sizes: every cell is a token's own key, or that of its whole block. A
    draft is written and rejected in every step."""
    dim, heads, length, page = 12, 3, 23, 4
    table = torch.tensor([[5, 2, 7, 1, 3, 6, 4]], dtype=torch.int32, device=device)
    wide = {"device": device, "dtype": torch.float32}
    weights = PoolWeights(spread(dim, seed=1, **wide), spread(dim, seed=2, **wide), spread(4, dim, seed=3, **wide),
                          1e-6, 0.25)
    packed = spread(length, 2 * dim + heads + 5, device=device, dtype=dtype)[:, : 2 * dim + heads]
    caches = [[torch.full((8, page, dim + 3), torch.nan, device=device, dtype=dtype)[..., :dim] for _ in range(2)]
              for _ in range(2)]
    near = {"atol": TOLERANCE[dtype], "rtol": TOLERANCE[dtype]}

    def write(begin: int, rows: torch.Tensor, num_dead: int = 0) -> None:
        at = torch.arange(begin, begin + len(rows), device=device)
        slots = table[0, at // page].long() * page + at % page
        slots[len(rows) - num_dead :] = -1
        none = torch.zeros(len(rows), dtype=torch.int64, device=device)
        contexts = TokenContexts(table, none, none, at + 1)
        made = [function(rows, weights, PoolCells(slots, at, at - begin, *cells), contexts, blocks)
                for function, cells in zip((twins.write_pooled_keys, kernels.write_pooled_keys), caches, strict=True)]
        torch.testing.assert_close(made[0].float(), rows[:, dim : dim + heads].float() * 0.25)
        torch.testing.assert_close(made[1], made[0].float())

    begin = 0
    for count in (1, 6, 2, 1, 9, 4):
        write(begin, torch.cat((packed[begin : begin + count], packed[:2] + 7)), num_dead=1)  # a draft, a dead row
        begin += count
    write(0, packed[:0])
    (theirs, gates), mine = ([cache[table[0].long()].flatten(0, 1)[:length] for cache in own] for own in caches)
    torch.testing.assert_close(mine[0], theirs, **near)
    assert torch.equal(mine[1], gates) and torch.equal(gates, packed[:, dim + heads :])
    keys = torch.nn.functional.layer_norm(packed[:, :dim].float(), (dim,), weights.norm_weight, weights.norm_bias, 1e-6)
    num_whole = 0
    for position in range(length):
        start = position - 3
        wanted = keys[position]
        if start >= blocks.anchor and (start - blocks.anchor) % 4 == 0:
            shares = (gates[start : position + 1].float() + weights.place_bias).softmax(0)
            wanted = (shares * keys[start : position + 1]).sum(0)
            num_whole += 1
        torch.testing.assert_close(theirs[position].float(), wanted, **near)
    assert num_whole == (length - blocks.anchor) // 4


def test_latents_without_a_rotating_part(device: torch.device, dtype: torch.dtype) -> None:
    """Whole contexts, the write of latents, and queries of heads and indexer, all with a rope of no dimensions."""
    contexts = make_contexts(device, LENS, columns=8)
    count, rope = len(contexts.first), RopeRows(torch.zeros(len(contexts.first), dtype=torch.int64, device=device),
                                                torch.zeros(1, 0, device=device))
    cache, q = make_cache(contexts, 20, dtype), spread(count, 3, 20, device=device, dtype=dtype)
    near = {"atol": TOLERANCE[dtype], "rtol": TOLERANCE[dtype]}
    torch.testing.assert_close(latent_attention.dense_latent_attention(q, cache, contexts, 32, 0.3, 20, pdl=False),
                               latent.dense_latent_attention(q, cache, contexts, 32, 0.3, 20), **near)
    compressed, slots = spread(5, 36, device=device, dtype=dtype)[:, :32], torch.tensor([6, -1, 5, 11, -1])
    norms = [spread(size, device=device, dtype=torch.float32, seed=size) for size in (12, 20)]
    written = [torch.full((3, 4, 20), 9.0, device=device, dtype=dtype) for _ in range(2)]
    own = rope._replace(positions=rope.positions[:5])
    writers = latent_inputs.write_latents, inputs_kernel.write_latents
    queries = [write(compressed, *norms, 1e-5, own, slots.to(device), cells, None)[0]
               for write, cells in zip(writers, written, strict=True)]
    torch.testing.assert_close(queries[1], queries[0], **near)
    torch.testing.assert_close(written[1], written[0], **near)
    assert int((written[1] != 9.0).any(-1).sum()) == 3
    given, made = spread(count, 3 * 8 + 4 * 6, device=device, dtype=dtype), []
    for rotate in (latent_inputs.rotate_queries, inputs_kernel.rotate_queries):
        into, index_q = (torch.full((count, heads, size), 9.0, device=device, dtype=dtype)
                         for heads, size in ((3, 20), (4, 6)))
        rotate(given, rope, into, 8, index_q, True)
        assert (into == 9.0).all(), "nothing of the heads rotates"
        made.append(index_q)
    assert torch.equal(*made) and torch.equal(made[0].flatten(1), given[:, 24:])


def test_rows_that_disagree_are_refused(device: torch.device) -> None:
    contexts = make_contexts(device, LENS, columns=8)
    with pytest.raises(ValueError, match="list_blocks: first"):
        kernels.list_blocks(contexts, torch.zeros(3, 2, dtype=torch.int32, device=device), TokenBlocks(2, 0))


@pytest.mark.long
@pytest.mark.skipif(torch.cuda.is_available(), reason="the other tests compile them")
def test_the_compiler_takes_every_kernel() -> None:
    """At sizes of GLM-5.3-Flash, for an H200 that is not there."""
    found = set(found_without_interpreter(__file__))
    assert found == {"_write_pooled_kernel", "_list_kernel", "_latent_attention_kernel", "_merge_kernel",
                     "_write_latents_kernel", "_rotate_queries_kernel", "_gated_kernel"}


def compile_kernels() -> list[str]:
    from outrider.kernels.gpu.elements.activation import limited_silu_mul

    tokens, dim, heads, page = 8, 128, 32, 64
    ints = torch.zeros(tokens, dtype=torch.int64)
    contexts = TokenContexts(torch.zeros(2, 64, dtype=torch.int32), ints, ints, ints)
    rope = RopeRows(ints, torch.zeros(1, 0))
    with compiling() as found:
        for dtype in (torch.bfloat16, torch.float32):
            def made(*shape: int, dtype: torch.dtype = dtype) -> torch.Tensor:
                return torch.zeros(*shape, dtype=dtype)

            limited_silu_mul(made(tokens, 4096), 10.0, pdl=False)
            weights = PoolWeights(made(dim), made(dim), made(16, dim), 1e-6, 0.1)
            cells = PoolCells(ints, ints, ints, made(4, page, dim), made(4, page, dim))
            for blocks in (TokenBlocks(16, 0), TokenBlocks(16, 1)):
                kernels.write_pooled_keys(made(tokens, 2 * dim + heads), weights, cells, contexts, blocks, pdl=False)
                chosen = torch.zeros(tokens, 128, dtype=torch.int32)
                listed = kernels.list_blocks(contexts, chosen, blocks, pdl=False)
            cache = made(4, page, 512)
            latent_attention.latent_attention(made(tokens, 64, 512), cache, contexts, listed, 0.1, 512, pdl=False)
            inputs_kernel.write_latents(made(tokens, 2048), made(1536), made(512), 1e-5, rope, ints, cache, None,
                                        pdl=False)
            inputs_kernel.rotate_queries(made(tokens, 64 * 256 + heads * dim), rope, made(tokens, 64, 512), 256,
                                         made(tokens, heads, dim), False, pdl=False)
    return found


if __name__ == "__main__":
    print(json.dumps(compile_kernels()))
