"""Exact mode, operation by operation: a token row has the same bits alone and among any others, at any place.

`SHOWN` has a call for every operation of the table that claims to compute token rows alone, and for those that replace
others. On a machine with a card the same calls run there in bfloat16.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import outrider.runner.worker  # noqa: F401  so that all packages have declared their operations
from outrider.formats.scaled import ScaledFormat
from outrider.kernels import cpu as native
from outrider.kernels import moe, ops, scaled
from outrider.kernels.adapter_products import ExpertTargets, HeadColumns
from outrider.kernels.cpu.packed import PackedMatrix
from outrider.kernels.delta_tables import ALIGNMENT, DeltaTables, RowSlots, TargetRange
from outrider.kernels.gguf_kinds import KINDS
from outrider.kernels.latent import TokenContexts
from outrider.kernels.latent_inputs import IndexInputs, RopeRows
from outrider.kernels.ops import Exactness, NotExact, Operation
from outrider.kernels.pooled_keys import PoolCells, PoolWeights
from outrider.kernels.quantized import QuantizedRows
from outrider.kernels.sampling_keys import SamplingKeys
from outrider.kernels.streams import StreamRule
from outrider.kernels.token_blocks import TokenBlocks

ON_CARD = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_CARD else "cpu")
DTYPE = torch.bfloat16 if ON_CARD else torch.float32
Call = Callable[[torch.Tensor], Any]  # of [tokens] int64, the numbers of the token rows to compute
ROWS, WIDTH = 140, 75  # more token rows than any tile has; a width that no vector divides
RULE = moe.RouteRule(7, 3)
pytestmark = pytest.mark.skipif(not (ON_CARD or native.available()), reason="needs the native kernels, or a card")


def random(*shape: int, seed: int = 0, dtype: torch.dtype = DTYPE, scale: float = 1.0) -> torch.Tensor:
    drawn = torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale
    return drawn.to(DEVICE, dtype)


def product(operation: Operation[..., Any], *options: Any, bias: bool = False) -> Call:
    x, weight = random(ROWS, WIDTH), random(66, WIDTH, seed=1)
    more = (random(66, seed=2),) if bias else ()
    return lambda rows: operation(x[rows], weight, *options, *more)


def scaled_product(operation: Operation[..., Any], rounding: int = 0) -> Call:
    weights = scaled.to_fp8_rows(random(66, 96, seed=1)), scaled.to_int4_groups(random(66, 96, seed=1), 32)
    return lambda rows: torch.cat([operation(random(ROWS, 96)[rows], weight, rounding=rounding) for weight in weights])


def prepared_product(rows: torch.Tensor) -> torch.Tensor:
    made = ops.prepare_linear.variant(exact=True)(random(66, WIDTH, seed=1), random(66, seed=2))
    assert made is not None
    return made(random(ROWS, WIDTH)[rows])


def linear_add(rows: torch.Tensor) -> torch.Tensor:
    residual = random(ROWS, 66, seed=3)[rows]
    ops.linear_add.variant(exact=True)(residual, random(ROWS, WIDTH)[rows], random(66, WIDTH, seed=1))
    return residual


def add_adapters(rows: torch.Tensor) -> torch.Tensor:
    """Token rows have adapters of two ranks, or none."""
    out, ranks = random(ROWS, 66, seed=3)[rows], (5, 20)
    room = 128 * max(ranks)  # of each factor: a multiple of the alignment, and enough
    assert room % ALIGNMENT == 0 and room >= max(ranks) * max(WIDTH, 66)
    places = [[[2 * place * room, (2 * place + 1) * room, rank]] for place, rank in enumerate(ranks)]
    tables = DeltaTables(random(4 * room, seed=1), torch.tensor(places, device=DEVICE),
                           torch.full((2, 1), 0.5, device=DEVICE), torch.tensor([[0, 66]], device=DEVICE), max_rank=20)
    slots = RowSlots.from_slots((torch.arange(ROWS, device=DEVICE) % 3 - 1)[rows])
    inner = ops.reduce_adapters(random(ROWS, WIDTH)[rows], slots, tables, range(1))
    ops.add_adapters(inner, out, 0, slots, tables, TargetRange(0, (66,)))
    return out


def adapters_of(rows: torch.Tensor, sizes: list[tuple[int, int]],
                bounds: list[int]) -> tuple[RowSlots, DeltaTables]:
    """Token rows of two adapters or none, and their tables. sizes: of both factors of each target, by rank."""
    ranks, places, size = (5, 20), list[list[list[int]]](), 0
    for rank in ranks:
        places.append([])
        for a, b in sizes:
            first, second = (-(-rank * count // ALIGNMENT) * ALIGNMENT for count in (a, b))
            places[-1].append([size, size + first, rank])
            size += first + second
    tables = DeltaTables(random(size, seed=1, scale=0.2), torch.tensor(places, device=DEVICE),
                           torch.full((2, len(sizes)), 0.5, device=DEVICE),
                           torch.tensor([[0, bound] for bound in bounds], device=DEVICE), max_rank=20)
    return RowSlots.from_slots((torch.arange(ROWS, device=DEVICE) % 3 - 1)[rows]), tables


def add_adapters_gated(rows: torch.Tensor) -> torch.Tensor:
    named = adapters_of(rows, [(WIDTH, 33), (WIDTH, 33)], [33, 66])
    named[1].bounds[1, 0] = 33
    inner = ops.reduce_adapters(random(ROWS, WIDTH)[rows], *named, range(2))
    return ops.add_adapters_gated(inner, random(ROWS, 66, seed=3)[rows], "silu", *named, TargetRange(0, (33, 66)))


def add_adapter_embeddings(rows: torch.Tensor) -> torch.Tensor:
    out, tokens = random(ROWS, WIDTH, seed=3)[rows], (torch.arange(ROWS, device=DEVICE) % 40)[rows]
    ops.add_adapter_embeddings(out, tokens, 3.0, *adapters_of(rows, [(40, WIDTH)], [WIDTH]), 0)
    return out


def add_head_adapters(rows: torch.Tensor, into_latents: bool) -> torch.Tensor:
    """Three heads with 9 keys and 11 values."""
    named = adapters_of(rows, [(LATENT, 3 * 20)], [3 * 20])
    columns = HeadColumns(20, 0, 9) if into_latents else HeadColumns(20, 9, 11)
    sizes = (9, LATENT) if into_latents else (LATENT, 11)
    x, out = (random(ROWS, 3, size, seed=seed)[rows] for seed, size in enumerate(sizes))
    ops.add_head_adapters(x, out, *named, 0, columns, into_latents)
    return out


def mix_adapted_experts(rows: torch.Tensor) -> torch.Tensor:
    count, width = 7, 10
    named = adapters_of(rows, [(count * WIDTH, count * 2 * width), (count * width, count * WIDTH)], [2 * width, WIDTH])
    out, added = (random(ROWS, WIDTH, seed=seed)[rows] for seed in (3, 4))
    routed = moe.route(random(ROWS, count, dtype=torch.float32)[rows], RULE)
    parts = random(count, 2 * width, WIDTH, seed=5, scale=0.2), random(count, WIDTH, width, seed=6, scale=0.2)
    ops.mix_adapted_experts(out, random(ROWS, WIDTH)[rows], *routed, *parts, "silu", added, *named, ExpertTargets(0, 1))
    return out


def add_rms_norm(rows: torch.Tensor) -> torch.Tensor:
    residual = random(ROWS, WIDTH, seed=1)[rows]
    return torch.cat((ops.add_rms_norm(random(ROWS, WIDTH)[rows], residual, random(WIDTH, seed=2), 1e-6), residual))


def norm_add_norm(rows: torch.Tensor) -> torch.Tensor:
    residual, post, weight = random(ROWS, WIDTH, seed=1)[rows], random(WIDTH, seed=2), random(WIDTH, seed=3)
    normed = ops.norm_add_norm(random(ROWS, WIDTH)[rows], post, residual, weight, 1e-6, 0.5)
    return torch.cat((normed, residual))


def route(rows: torch.Tensor, scoring: str = "softmax") -> torch.Tensor:
    rule = moe.RouteRule(7, 3, scoring=scoring)
    routed = ops.route.variant(exact=True)(random(ROWS, 7, dtype=torch.float32)[rows], rule)
    return torch.cat((routed.ids.double(), routed.weights.double()), dim=1)


def experts(rows: torch.Tensor) -> torch.Tensor:
    routed = moe.route(random(ROWS, 7, dtype=torch.float32), RULE)
    gate_up, down = random(7, 26, WIDTH, seed=1), random(7, WIDTH, 13, seed=2)
    mix = ops.experts.variant(exact=True)
    return mix(random(ROWS, WIDTH)[rows], routed.ids[rows], routed.weights[rows], gate_up, down, "silu",
               random(ROWS, WIDTH, seed=3)[rows])


def scaled_experts(rows: torch.Tensor, rounds: bool = False) -> torch.Tensor:
    routed = moe.route(random(ROWS, 7, dtype=torch.float32), RULE)
    made = [ScaledFormat("fp8").make(random(7, *shape, seed=1)).weight for shape in ((48, 96), (96, 24))]
    return ops.scaled_experts.variant(exact=True)(random(ROWS, 96)[rows], routed.ids[rows], routed.weights[rows], *made,
                                                  "silu", random(ROWS, 96, seed=3)[rows], rounds)


def gated_norm(rows: torch.Tensor, gate_first: bool = True) -> torch.Tensor:
    y, z = random(ROWS, WIDTH), random(ROWS, WIDTH, seed=1)
    return ops.gated_norm.variant(exact=True)(y[rows], z[rows], random(WIDTH, seed=2), 25, 1e-6, gate_first)


def rope_write(rows: torch.Tensor) -> torch.Tensor:
    qkv, positions = random(ROWS, 6 * 16)[rows], torch.arange(ROWS, device=DEVICE)[rows]
    cos, sin = random(ROWS, 8, seed=1), random(ROWS, 8, seed=2)
    caches = [torch.zeros(ROWS // 16 + 1, 16, 1, 16, dtype=DTYPE, device=DEVICE) for _ in range(2)]
    ops.rope_write(qkv, positions, cos, sin, positions, *caches, random(16, seed=3), random(16, seed=4))
    return torch.cat((qkv, *(cache.view(-1, 16)[positions] for cache in caches)), dim=1)


def paged_attention(rows: torch.Tensor, window: int = 0) -> torch.Tensor:
    """Every token row is a request of its own, with a context of another length."""
    cache, table = random(20, 16, 2, 16, seed=1), torch.arange(20)[None].expand(len(rows), -1)
    lengths, ones = 1 + 2 * rows, torch.ones(len(rows), dtype=torch.int64)
    starts = torch.arange(len(rows) + 1)
    return ops.paged_attention(random(ROWS, 4, 16)[rows], cache, cache.flip(0), table, starts, lengths, ones, 0.25,
                               window, 20.0)


def drawn(operation: Operation[..., Any], has_kernel: bool) -> Call:
    """The sampler works on one logit row at a time where no kernel draws."""
    logits, place = random(ROWS, 203, dtype=torch.float32), torch.arange(ROWS, device=DEVICE)
    keys = SamplingKeys(torch.full((ROWS,), 0.8, device=DEVICE), place + 3, place * 0)

    def call(rows: torch.Tensor) -> torch.Tensor:
        parts = rows.split(len(rows) if has_kernel else 1)
        made = [operation(logits[part], part, 5 + part, keys, True) for part in parts]
        return torch.cat([part if isinstance(part, torch.Tensor) else part[0] for part in made])

    return call


def report_tokens(rows: torch.Tensor) -> torch.Tensor:
    """Log-probabilities of tokens and of the likeliest ones, and the two numbers that all others follow from."""
    logits, tokens = random(ROWS, 203, dtype=torch.float32), torch.arange(ROWS, device=DEVICE) * 7 % 203
    found = ops.operations()["report_tokens"](logits[rows], tokens[rows], 5)
    return torch.cat([found.ids.to(found.values.dtype), found.values, found.most[:, None], found.norm[:, None]], dim=1)


LATENT, ROPE = 20, 6  # dimensions of a cache entry of latent attention


def latent_cache(rows: torch.Tensor) -> tuple[torch.Tensor, TokenContexts]:
    """A cache of 20 pages, and token rows that are requests of their own, with contexts of other lengths."""
    stop, table = 1 + 2 * rows, torch.arange(20, device=DEVICE)[None].expand(len(rows), -1).contiguous()
    own = torch.arange(len(rows), device=DEVICE)
    return random(20, 16, LATENT + ROPE, seed=1), TokenContexts(table, own, torch.zeros_like(stop), stop)


def dense_latent_attention(rows: torch.Tensor) -> torch.Tensor:
    """The longest context among the rows says how many positions there may be."""
    cache, contexts = latent_cache(rows)
    attend = ops.dense_latent_attention.variant(exact=True)
    q = random(ROWS, 3, LATENT + ROPE)[rows]
    return attend(q, cache, contexts, int(contexts.stop.max()), 0.3, LATENT)


def latent_attention(rows: torch.Tensor) -> torch.Tensor:
    """Every third position of a context that has more than 70 of them. A context with fewer is attended whole, with the
    bits that it has where there is no choice."""
    cache, contexts = latent_cache(rows)
    listed = torch.arange(70, device=DEVICE)[None] * (1 + 2 * (contexts.stop > 70)[:, None])
    positions = torch.where(listed < contexts.stop[:, None], listed, -1)
    out = ops.latent_attention.variant(exact=True)(random(ROWS, 3, LATENT + ROPE)[rows], cache, contexts, positions,
                                                   0.3, LATENT)
    is_whole = contexts.stop <= 70
    assert torch.equal(out[is_whole], dense_latent_attention(rows)[is_whole])
    return out


def choose_positions(rows: torch.Tensor) -> torch.Tensor:
    _, contexts = latent_cache(rows)
    chosen = torch.empty(len(rows), 37, dtype=torch.int64, device=DEVICE)
    weights, keys = random(ROWS, 5, seed=2, dtype=torch.float32)[rows], random(20, 16, 11, seed=3)
    ops.choose_positions.variant(exact=True)(random(ROWS, 5, 11)[rows], weights, keys, contexts, chosen)
    return chosen


def rope_rows(rows: torch.Tensor) -> RopeRows:
    return RopeRows(torch.arange(ROWS, device=DEVICE)[rows], random(ROWS, ROPE, seed=4, dtype=torch.float32))


def write_latents(rows: torch.Tensor) -> torch.Tensor:
    cache, keys = (torch.zeros(ROWS // 16 + 1, 16, width, dtype=DTYPE, device=DEVICE) for width in (LATENT + ROPE, 11))
    index = IndexInputs(5, random(11, seed=5), random(11, seed=6), 0.2, False, keys)
    norms, compressed = (random(13, seed=7), random(LATENT, seed=8)), random(ROWS, 13 + LATENT + ROPE + 11 + 5)
    q, weights = ops.write_latents.variant(exact=True)(compressed[rows], *norms, 1e-6, rope_rows(rows), rows, cache,
                                                       index)
    return torch.cat((q, weights, cache.flatten(0, 1)[rows], keys.flatten(0, 1)[rows]), dim=1)


def rotate_queries(rows: torch.Tensor) -> torch.Tensor:
    q, index_q = (torch.zeros(len(rows), *shape, dtype=DTYPE, device=DEVICE) for shape in ((3, LATENT + ROPE), (5, 11)))
    ops.rotate_queries(random(ROWS, 3 * (9 + ROPE) + 5 * 11)[rows], rope_rows(rows), q, 9, index_q, True)
    return torch.cat((q.flatten(1), index_q.flatten(1)), dim=1)


def head_products(rows: torch.Tensor) -> torch.Tensor:
    out = torch.empty(len(rows), 3, LATENT, dtype=DTYPE, device=DEVICE)
    ops.head_products.variant(exact=True)(random(ROWS, 3, 9)[rows], random(3, 9, LATENT, seed=1).transpose(1, 2), out)
    return out


def block_attention(rows: torch.Tensor) -> torch.Tensor:
    """Every second of the whole blocks of four tokens, up to 30 of them."""
    _, contexts = latent_cache(rows)
    places = torch.arange(30, device=DEVICE)[None] * (1 + (contexts.stop > 120)[:, None].long())
    chosen = torch.where(places < contexts.stop[:, None] // 4, places, -1)
    caches = [random(20, 16, 2, 18, seed=seed) for seed in (1, 2)]
    return ops.block_attention.variant(exact=True)(random(ROWS, 6, 18)[rows], *caches, contexts, chosen, 0.3,
                                                   TokenBlocks(4, 0))


def write_block_keys(rows: torch.Tensor) -> torch.Tensor:
    """Token rows are requests of their own, each with the keys of the tokens before it in the cache."""
    _, contexts = latent_cache(rows)
    cache, none = random(20, 16, 11, seed=3), torch.zeros_like(rows)
    slots = rows + 16 * 10  # beside what is read
    rope = RopeRows(rows, random(ROWS, ROPE, seed=4, dtype=torch.float32))
    ops.write_block_keys(random(ROWS, 11)[rows], random(11, seed=5, dtype=torch.float32), 1e-6, rope, slots, none,
                         contexts, cache, TokenBlocks(4, 0))
    return cache.flatten(0, 1)[slots]


def write_pooled_keys(rows: torch.Tensor) -> torch.Tensor:
    """Token rows are requests of their own, each with what the tokens before it left in the cache."""
    _, contexts = latent_cache(rows)
    caches, none = [random(20, 16, 11, seed=seed) for seed in (3, 4)], torch.zeros_like(rows)
    slots = rows + 16 * 10  # beside what is read
    weights = PoolWeights(random(11, seed=5), random(11, seed=6), random(4, 11, seed=7), 1e-6, 0.3)
    made = ops.write_pooled_keys.variant(exact=True)(random(ROWS, 25)[rows], weights, PoolCells(
        slots, rows, none, *caches), contexts, TokenBlocks(4, 0))
    return torch.cat((made.to(DTYPE), *(cache.flatten(0, 1)[slots] for cache in caches)), dim=1)


def write_keys_values(rows: torch.Tensor) -> torch.Tensor:
    caches = [torch.zeros(ROWS // 16 + 1, 16, 2, 18, dtype=DTYPE, device=DEVICE) for _ in range(2)]
    ops.write_keys_values(random(ROWS, 2, 18)[rows], random(ROWS, 2, 18, seed=1)[rows], rows, *caches)
    return torch.cat([cache.flatten(0, 1)[rows] for cache in caches], dim=1)


def join_streams(rows: torch.Tensor) -> torch.Tensor:
    streams, gain = random(ROWS, 3 * WIDTH, seed=1)[rows], random(3 * WIDTH, seed=2, dtype=torch.float32)
    return torch.cat((ops.join_streams(random(ROWS, WIDTH)[rows], random(ROWS, 3, seed=3)[rows], streams, gain, 1e-6,
                                       3), streams))


def stream_gates(rows: torch.Tensor) -> torch.Tensor:
    return torch.cat(ops.stream_gates.variant(exact=True)(random(ROWS, WIDTH, scale=3)[rows], 3, True), dim=1)


def mix_streams(rows: torch.Tensor) -> torch.Tensor:
    wide = [random(ROWS, 3 * WIDTH, seed=seed)[rows] for seed in range(2)]
    return ops.mix_streams.variant(exact=True)(*wide, 3)


def gate_values(rows: torch.Tensor) -> torch.Tensor:
    wide = [random(ROWS, 3 * WIDTH, seed=seed)[rows] for seed in range(2)]
    made = ops.gate_values.variant(exact=True)(*wide, random(ROWS, WIDTH, seed=3)[rows], 3)
    return ops.add_silu.variant(exact=True)(made, wide[0])


def hyper_streams(rows: torch.Tensor, num_rounds: int = 5, writes: bool = True) -> torch.Tensor:
    rule = StreamRule(4, 1e-5, 1e-6, post_factor=2.0, num_rounds=num_rounds, writes=writes)
    streams, wide = random(ROWS, 4 * WIDTH, seed=1)[rows], {"dtype": torch.float32}
    logits, base = random(ROWS, rule.num_logits, **wide)[rows], random(rule.num_logits, seed=2, **wide)
    scale = random(len(rule.parts), seed=3, **wide)
    read, *weights = ops.read_streams.variant(exact=True)(streams, logits, scale, base, rule)
    if writes:
        ops.write_streams(streams, random(ROWS, WIDTH, seed=4)[rows], *weights)
    return torch.cat((read, *weights, streams), dim=1)


SHOWN: dict[str, list[Call]] = {
    "rms_norm": [lambda rows: ops.rms_norm(random(ROWS, WIDTH)[rows], random(WIDTH, seed=1), 1e-6)],
    "reduce_adapters": [add_adapters],
    "add_adapters": [add_adapters],
    "add_adapters_gated": [add_adapters_gated],
    "add_adapter_embeddings": [add_adapter_embeddings],
    "add_head_adapters": [lambda rows: add_head_adapters(rows, True), lambda rows: add_head_adapters(rows, False)],
    "mix_adapted_experts": [mix_adapted_experts],
    "add_rms_norm": [add_rms_norm],
    "norm_add_norm": [norm_add_norm],
    "exact_gated_norm": [gated_norm, lambda rows: gated_norm(rows, False)],
    "silu_mul": [lambda rows: ops.silu_mul(random(ROWS, 2 * WIDTH, scale=3)[rows])],
    "gelu_tanh_mul": [lambda rows: ops.gelu_tanh_mul(random(ROWS, 2 * WIDTH, scale=3)[rows])],
    "limited_silu_mul": [lambda rows: ops.limited_silu_mul(random(ROWS, 2 * WIDTH, scale=3)[rows], 2.0)],
    "relu2": [lambda rows: ops.relu2(random(ROWS, WIDTH)[rows])],
    "sigmoid_scale": [
        lambda rows: ops.sigmoid_scale(random(ROWS, WIDTH)[rows], random(ROWS, WIDTH, seed=1)[rows]),
        lambda rows: ops.sigmoid_scale(random(ROWS, WIDTH)[rows], random(ROWS, 1, seed=1)[rows]),
    ],
    "gelu_scale": [lambda rows: ops.gelu_scale(random(ROWS, WIDTH)[rows], random(ROWS, WIDTH, seed=1)[rows])],
    "cap_logits": [lambda rows: ops.cap_logits(random(ROWS, WIDTH, dtype=torch.float32, scale=9)[rows], 5.0)],
    "exact_linear": [product(ops.linear.variant(exact=True)), product(ops.linear.variant(exact=True), bias=True)],
    "exact_prepare_linear": [prepared_product],
    "exact_scaled_linear": [scaled_product(ops.scaled_linear.variant(exact=True)),
                            scaled_product(ops.scaled_linear.variant(exact=True), 96)],
    "exact_scaled_wide": [scaled_product(ops.scaled_wide.variant(exact=True))],
    "exact_linear_wide": [product(ops.linear_wide.variant(exact=True))],
    "exact_gated_linear": [product(ops.gated_linear.variant(exact=True), "silu"),
                           product(ops.gated_linear.variant(exact=True), "gelu_pytorch_tanh")],
    "exact_relu2_linear": [product(ops.relu2_linear.variant(exact=True))],
    "exact_linear_add": [linear_add],
    "exact_route": [route, lambda rows: route(rows, "sigmoid")],
    "exact_experts": [experts],
    "exact_scaled_experts": [scaled_experts, lambda rows: scaled_experts(rows, True)],
    "rope_write": [rope_write],
    "paged_attention": [paged_attention, lambda rows: paged_attention(rows, 40)],
    "exact_dense_latent_attention": [dense_latent_attention],
    "exact_latent_attention": [latent_attention],
    "exact_choose_positions": [choose_positions],
    "exact_write_latents": [write_latents],
    "rotate_queries": [rotate_queries],
    "exact_head_products": [head_products],
    "exact_block_attention": [block_attention],
    "write_block_keys": [write_block_keys],
    "exact_write_pooled_keys": [write_pooled_keys],
    "write_keys_values": [write_keys_values],
    "join_streams": [join_streams],
    "exact_stream_gates": [stream_gates],
    "exact_mix_streams": [mix_streams],
    "exact_gate_values": [gate_values],
    "exact_add_silu": [gate_values],
    "exact_read_streams": [hyper_streams, lambda rows: hyper_streams(rows, 0),
                           lambda rows: hyper_streams(rows, 0, writes=False)],
    "write_streams": [hyper_streams, lambda rows: hyper_streams(rows, 0)],
    "choose_scaled": [drawn(ops.operations()["choose_scaled"], ON_CARD)],
    "draw_tokens": [drawn(ops.operations()["draw_tokens"], True)],
    "report_tokens": [report_tokens],
}
# Shown by whole engines: the sampler's chunks need rows of requests (tests/engine/test_exact_mode.py).
SHOWN_BY_ENGINES = {"sample_chunk"}
ON_CPU_ONLY = {"rope_write", "paged_attention", "exact_prepare_linear"}


def own_operations() -> dict[str, Operation[..., Any]]:
    return {name: operation for name, operation in ops.operations().items()
            if operation.reference.__module__.startswith("outrider.")}


def test_every_operation_says_how_it_is_exact() -> None:
    """A new row of the table is exact by itself, with a proof here; replaced by another; or refused, in words."""
    for name, operation in own_operations().items():
        match operation.exact:
            case Exactness.ROW_BY_ROW:
                assert name in SHOWN or name in SHOWN_BY_ENGINES, f"show in this file that {name} is exact"
            case NotExact(reason):
                assert operation.exact is not ops.operation.UNDECLARED, f"{name} declares nothing"
                with pytest.raises(ValueError, match=re.escape(reason)):
                    operation.variant(exact=True)
            case Operation() as replacement:
                is_shown = replacement.exact is Exactness.ROW_BY_ROW and replacement.name in SHOWN
                assert is_shown or replacement.exact is Exactness.NO_ARITHMETIC
                assert operation.variant(exact=True) is replacement and operation.variant(exact=False) is operation


def test_an_operation_from_outside_is_refused_until_it_declares(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ops.operation, "_operations", {})
    with pytest.raises(ValueError, match="exact=True: toy has no exact form .it declares no exact variant"):
        Operation(lambda x: x, name="toy").variant(exact=True)


CALLS = [pytest.param(call, id=f"{name}-{i}") for name, calls in SHOWN.items() for i, call in enumerate(calls)
         if not (ON_CARD and name in ON_CPU_ONLY)]


@pytest.mark.parametrize("call", CALLS)
@settings(max_examples=12, deadline=None)
@given(data=st.data())
def test_a_token_row_has_the_same_bits_among_any_others(call: Call, data: st.DataObject) -> None:
    count = data.draw(st.sampled_from([1, 2, 3, 4, 5, 8, 9, 16, 17, 33, 64, 65, 128, ROWS]))
    start = data.draw(st.integers(0, ROWS - 1))
    rows = (torch.arange(count, device=DEVICE) * 11 + start) % ROWS
    place = data.draw(st.integers(0, count - 1))
    among, alone = call(rows), call(rows[place : place + 1])
    parts = among.shape[0] // count  # results that one call returns, one below the other
    picked = among.view(parts, count, *among.shape[1:])[:, place]
    assert torch.equal(picked, alone.view(picked.shape)), f"row {place} of {count}"


@pytest.mark.skipif(ON_CARD, reason="the card's attention has tests of its own")
@pytest.mark.parametrize("window", [0, 37])
@settings(max_examples=15, deadline=None)
@given(cuts=st.lists(st.integers(1, 299), max_size=4), mates=st.integers(0, 3))
def test_attention_has_the_same_bits_for_prompts_and_decoding(window: int, cuts: list[int], mates: int) -> None:
    """A prompt of 300 tokens in one call, and cut into calls that have batch mates."""
    k_cache, v_cache, q = random(40, 16, 2, 16, seed=1), random(40, 16, 2, 16, seed=2), random(300, 4, 16, seed=3)

    def attend(first: int, end: int, mates: int) -> torch.Tensor:
        lens = [end - first, *[1] * mates]
        starts = torch.tensor([0, *lens]).cumsum(0)
        lengths, live = torch.tensor([end, *[9 + 70 * i for i in range(mates)]]), torch.tensor(lens)
        queries = torch.cat((q[first:end], random(mates, 4, 16, seed=4)))
        table = torch.arange(40)[None].expand(1 + mates, -1)
        return ops.paged_attention(queries, k_cache, v_cache, table, starts, lengths, live, 0.3, window)[: end - first]

    edges = sorted({0, *cuts, 300})
    parts = [attend(first, end, mates) for first, end in zip(edges, edges[1:], strict=False)]
    assert torch.equal(torch.cat(parts), attend(0, 300, 0))


@pytest.mark.skipif(ON_CARD, reason="GGUF bits are kept on a CPU only")
@pytest.mark.parametrize("bits", [8, 24])
@pytest.mark.parametrize("kind", KINDS)
def test_products_with_gguf_bits_are_exact_for_any_number_of_rows(kind: str, bits: int) -> None:
    if not native.available():
        pytest.skip(native.reason())
    shape = 50, 256 // KINDS[kind].block * KINDS[kind].block_bytes
    stored = torch.randint(0, 60, shape, generator=torch.Generator().manual_seed(0)).to(torch.uint8)
    matrix, x = PackedMatrix([QuantizedRows(kind, stored).pack()], None, bits), random(ROWS, 256)
    whole = native.product(x, matrix)
    for count in (1, 2, 3, 5, 8, 9, 17, 64, 65, 128):
        assert torch.equal(native.product(x[3 : 3 + count], matrix), whole[3 : 3 + count]), count


@pytest.mark.skipif(ON_CARD, reason="one thread of a CPU computes another part")
def test_bits_do_not_depend_on_the_number_of_threads() -> None:
    before, rows = torch.get_num_threads(), torch.arange(ROWS)
    for name, calls in SHOWN.items():
        for call in calls:
            torch.set_num_threads(1)
            one = call(rows)
            torch.set_num_threads(3)
            several = call(rows)
            torch.set_num_threads(before)
            assert torch.equal(one, several), name
