"""The Triton kernels of latent attention and its indexer against their torch twins: odd sizes, several requests and any
number of token rows each, dead token rows, strided inputs, and NaN wherever nothing may be read.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="needs the triton package")

from outrider.kernels import latent, latent_inputs
from outrider.kernels.gpu.index import choice as index_choice
from outrider.kernels.gpu.index.scores import ScoreConfig
from outrider.kernels.gpu.latent import attention as latent_attention
from outrider.kernels.gpu.latent import enter_latents
from outrider.kernels.gpu.latent import head_products as products_kernel
from outrider.kernels.gpu.latent import inputs as inputs_kernel
from outrider.kernels.gpu.latent import values as latent_values
from outrider.kernels.gpu.latent.attention import LatentConfig
from outrider.kernels.latent import NOT_CHOSEN, TokenContexts
from outrider.kernels.latent_inputs import IndexInputs, RopeRows
from tests.kernels.conftest import HAS_CARD

PAGE = 4
FIRST = (True, False)  # how a rope finds the dimensions that rotate: pairs, and the first of an index key
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2}


def spread(*shape: int, device: torch.device, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(device, dtype)


def make_contexts(device: torch.device, lens: list[tuple[int, int, int]], columns: int) -> TokenContexts:
    """lens: (token rows, first position, length) of each request. Its last token row is dead, those before it see up to
    the end, one position less each."""
    request_of, first, stop = [], [], []
    for request, (rows, begin, length) in enumerate(lens):
        for row in range(rows):
            is_dead = row == rows - 1 and rows > 1
            request_of.append(request)
            first.append(begin)
            stop.append(0 if is_dead else max(0, length - (rows - 2 - row if rows > 1 else 0)))
    table = (1 + torch.randperm(len(lens) * columns, generator=torch.Generator().manual_seed(3))).view(len(lens), -1)
    made = (torch.tensor(values, device=device) for values in (request_of, first, stop))
    return TokenContexts(table.int().to(device), *made)


def make_cache(contexts: TokenContexts, width: int, dtype: torch.dtype, integers: bool = False) -> torch.Tensor:
    """[pages, PAGE, width] with NaN in every cell that no token row sees, and after every entry."""
    device, columns = contexts.first.device, contexts.page_table.shape[1]
    pages = torch.full((1 + contexts.page_table.numel(), PAGE, width + 3), torch.nan, device=device, dtype=dtype)
    for request, table in enumerate(contexts.page_table.long()):
        own = contexts.request_of == request
        begin, end = int(contexts.first[own].min()), int(contexts.stop[own].max())
        values = spread(columns * PAGE, width, device=device, dtype=dtype, seed=request)
        values = values.round() if integers else values
        for position in range(begin, end):
            pages[table[position // PAGE], position % PAGE, :width] = values[position]
    return pages[..., :width]


def make_sinks(heads: int, device: torch.device, has_sinks: bool = True) -> torch.Tensor | None:
    """About as large as scores, far below all of them, and far above."""
    made = torch.tensor([0.4, -300.0, 2.0, 300.0, -1.0], device=device).repeat(1 + heads // 5)[:heads]
    return made if has_sinks else None


LENS = [(1, 0, 19), (5, 0, 23), (3, 3, 9), (2, 0, 1), (1, 5, 5), (7, 2, 30), (1, 0, 2)]


@pytest.mark.parametrize(("heads", "latent_dim", "rope_dim"), [(3, 12, 8), (70, 20, 4)])
@pytest.mark.parametrize(("q_tile", "splits", "has_sinks"), [(1, 1, True), (1, 3, False), (4, 2, True)])
def test_whole_contexts(device: torch.device, dtype: torch.dtype, heads: int, latent_dim: int, rope_dim: int,
                        q_tile: int, splits: int, has_sinks: bool) -> None:
    contexts = make_contexts(device, LENS, columns=8)
    cache = make_cache(contexts, latent_dim + rope_dim, dtype)
    q = spread(len(contexts.first), heads, latent_dim + rope_dim, device=device, dtype=dtype)
    config = LatentConfig(16, q_tile, 16, 4, 1)
    given = (q, cache, contexts, 32, 0.3, latent_dim, make_sinks(heads, device, has_sinks))
    wanted = latent.dense_latent_attention(*given)
    out = latent_attention.dense_latent_attention(*given, config=config, num_splits=splits, pdl=False)
    torch.testing.assert_close(out, wanted, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
    assert (out[contexts.stop <= contexts.first] == 0).all()
    chosen = latent_attention.dense_latent_attention(*given, pdl=False)
    torch.testing.assert_close(chosen, wanted, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


def test_sinks_are_one_more_key_without_a_value(device: torch.device) -> None:
    contexts = make_contexts(device, [(1, 2, 9)], columns=4)
    cache = make_cache(contexts, 10, torch.float64)
    q = spread(1, 5, 10, device=device, dtype=torch.float64)
    sinks = make_sinks(5, device)
    assert sinks is not None
    entries = cache[contexts.page_table[0].long()].flatten(0, 1)[2:9]
    scores = torch.cat((q[0] @ entries.T * 0.3, sinks[:, None].double()), dim=1)
    wanted = scores.softmax(dim=1)[:, :-1] @ entries[:, :7]
    found = latent.dense_latent_attention(q, cache, contexts, 16, 0.3, 7, sinks)
    torch.testing.assert_close(found[0], wanted)
    assert wanted[3].abs().max() < 1e-30 < wanted[2].abs().min(), "a sink far above all scores takes all weight"
    with pytest.raises(ValueError, match="sinks"):
        latent_attention.dense_latent_attention(q.float(), cache.float(), contexts, 16, 0.3, 7, sinks[:4], pdl=False)


def make_choice(device: torch.device, integer: torch.dtype) -> tuple[TokenContexts, torch.Tensor]:
    """Contexts, and up to 20 positions of each token row, of which some have to choose."""
    contexts, num_choosing = make_contexts(device, LENS, columns=8), 0
    positions = torch.full((len(contexts.first), 20), NOT_CHOSEN, dtype=integer, device=device)
    for row, (begin, end) in enumerate(zip(contexts.first.tolist(), contexts.stop.tolist(), strict=True)):
        taken = sorted(range(begin, end), key=lambda position: position * 7 % 11)[:20]
        positions[row, : len(taken)] = torch.tensor(sorted(taken), dtype=integer)
        num_choosing += end - begin > 20
    assert 0 < num_choosing < len(positions)
    return contexts, positions


@pytest.mark.parametrize(("heads", "q_tile", "splits"), [(3, 1, 1), (16, 1, 3), (5, 4, 2)])
def test_chosen_positions(device: torch.device, dtype: torch.dtype, heads: int, q_tile: int, splits: int) -> None:
    """Token rows that choose beside such that attend to everything, in one tile too."""
    contexts, positions = make_choice(device, torch.int64 if heads == 16 else torch.int32)
    cache = make_cache(contexts, 16, dtype)
    q = spread(len(contexts.first), heads, 16, device=device, dtype=dtype)
    sinks = make_sinks(heads, device, heads != 3)
    wanted = latent.latent_attention(q, cache, contexts, positions.long(), 0.3, 12, sinks)
    config = LatentConfig(16, q_tile, 16, 4, 1)
    out = latent_attention.latent_attention(q, cache, contexts, positions, 0.3, 12, sinks, config=config,
                                            num_splits=splits, pdl=False)
    torch.testing.assert_close(out, wanted, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


@pytest.mark.parametrize("is_dense", [True, False])
@pytest.mark.parametrize(("tokens", "splits", "columns"), [(1, 1, 4), (4, 3, 16)])
def test_values_of_few_token_rows(device: torch.device, dtype: torch.dtype, tokens: int, splits: int, columns: int,
                                  is_dense: bool) -> None:
    """Attention and the product of its result in one, also for a token row that sees nothing."""
    contexts = make_contexts(device, [(tokens, 2, 30)], columns=16)
    cache = make_cache(contexts, 20, dtype)
    q = spread(tokens, 3, 20, device=device, dtype=dtype, seed=5)
    to_values = spread(3, 9, 12, device=device, dtype=dtype, seed=6)[:, 2:]
    positions = None
    if not is_dense:
        positions = torch.full((tokens, 7), NOT_CHOSEN, device=device)
        scores = torch.rand(tokens, 64, device=device)
        positions[:] = latent.best_positions(scores, contexts, 7)
    config = LatentConfig(16, 1, 16, 4, 1)
    given = (q, cache, contexts, positions, 64, 0.3, to_values, make_sinks(3, device, is_dense))
    found = latent_values.latent_values(*given, config=config, num_splits=splits, columns=columns, pdl=False)
    wide = [t.double() for t in (q, cache, to_values)]
    wanted = latent.latent_values(*wide[:2], contexts, positions, 64, 0.3, wide[2], given[-1])
    torch.testing.assert_close(found.double(), wanted, atol=2 * TOLERANCE[dtype], rtol=2 * TOLERANCE[dtype])
    assert latent_values.takes_few(*given) == (tokens == 1) and (tokens == 1 or not found[-1].any())


def choose(contexts: TokenContexts, q: torch.Tensor, weights: torch.Tensor, keys: torch.Tensor, top_k: int,
           **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """The kernels' choice, into rows between others, and the twin's."""
    wanted = torch.full((len(q), top_k), -99, device=q.device)
    latent.choose_positions(q.double(), weights.double(), keys.double(), contexts, wanted)
    buffer = torch.full((len(q) + 4, top_k), -99, dtype=torch.int64, device=q.device)
    index_choice.choose_positions(q, weights, keys, contexts, buffer[2:-2], pdl=False, **options)
    assert (buffer[:2] == -99).all() and (buffer[-2:] == -99).all(), "rows of nobody"
    return buffer[2:-2], wanted


@pytest.mark.parametrize(("rows", "splits"), [(1, 3), (4, 2)])
@pytest.mark.parametrize("integers", [False, True], ids=["numbers", "ties"])
def test_the_choice_is_the_twins(device: torch.device, rows: int, splits: int, integers: bool) -> None:
    """With ties; token rows of several requests in a tile."""
    lens = [*LENS, (6, 0, 61), (9, 7, 64), (3, 0, 9)]  # the last rows see 7, 8 and 9 positions
    contexts = make_contexts(device, lens, columns=16)
    keys = make_cache(contexts, 6, torch.float32, integers)
    q = spread(len(contexts.first), 5, 6, device=device, dtype=torch.float32)
    weights = spread(len(q), 5, device=device, dtype=torch.float32, seed=9)
    if integers:
        q, weights = q.round(), weights.round()
    chosen, wanted = choose(contexts, q, weights, keys, 7, config=ScoreConfig(rows, 16, 4, 1), segment=16, room=64,
                            num_splits=splits)
    assert torch.equal(chosen, wanted)
    assert (chosen[:, -1] >= 0).sum() > 15 and (chosen[:, 0] == NOT_CHOSEN).any()
    counters = torch.zeros(len(q), latent.NUM_COUNTERS, dtype=torch.int32, device=device)
    again, _ = choose(contexts, q, weights, keys, 7, counters=counters, config=ScoreConfig(rows, 16, 4, 1), segment=64,
                      room=32)
    assert torch.equal(again, wanted) and counters.any()


def test_equal_scores_go_to_lower_positions(device: torch.device) -> None:
    contexts = make_contexts(device, [(3, 1, 50)], columns=16)
    keys = make_cache(contexts, 6, torch.float32) * 0  # NaN stays where nothing may be read
    q, weights = torch.ones(3, 4, 6, device=device), -torch.ones(3, 4, device=device)
    chosen, wanted = choose(contexts, q, weights, keys, 9, segment=16, config=ScoreConfig(1, 16, 4, 1))
    assert torch.equal(chosen, wanted) and chosen[0].tolist() == list(range(1, 10))


@pytest.mark.parametrize(("room", "sample"), [(16, 32), (128, 32)], ids=["listed", "few enough"])
@pytest.mark.parametrize(("bits", "spread_bits"), [(0x3F800000, 3), (0x3F800000, 300), (-0x40800000, 5000), (5, 4)])
def test_scores_that_differ_in_their_last_bits_are_told_apart(device: torch.device, bits: int, spread_bits: int,
                                                              room: int, sample: int) -> None:
    """Around 1, -1 and among the smallest numbers there are; beside infinities. Candidates that have no room in a list
    are found as well."""
    numbers = torch.arange(5 * 80, device=device).view(5, 80) * 7919 % spread_bits
    scores = (bits + numbers).to(torch.int32).view(torch.float32)
    scores[:, 8::9], scores[:, 3::17] = -torch.inf, torch.inf
    scores[0, 10:50] = -torch.inf
    first, stop = (torch.tensor(ends, device=device) for ends in ([10, 0, 3, 9, 4], [50, 70, 69, 22, 4]))
    contexts = TokenContexts(torch.zeros(1, 1, device=device), torch.zeros(5, device=device), first, stop)
    chosen = torch.full((5, 13), -99, device=device)
    counters = torch.zeros(5, latent.NUM_COUNTERS, dtype=torch.int32, device=device)
    index_choice.choose_by_scores(scores, counters, contexts, chosen, segment=16, room=room, sample=sample,
                                  num_splits=2, pdl=False)
    assert torch.equal(chosen, latent.best_positions(scores, contexts, 13))
    assert counters.any() == (room == 16)


@pytest.mark.parametrize("room", [16, 128], ids=["listed", "few enough"])
def test_both_zeros_are_equal_scores(device: torch.device, room: int) -> None:
    """A head's negative weight times no match is -0.0: positions then decide, as among all equal scores."""
    scores = torch.zeros(2, 80, device=device)
    scores[:, ::2] = -0.0
    scores[1, 3::5] = 1.0
    first, stop = torch.tensor([0, 5], device=device), torch.tensor([70, 80], device=device)
    contexts = TokenContexts(torch.zeros(1, 1, device=device), torch.zeros(2, device=device), first, stop)
    chosen = torch.full((2, 25), -99, device=device)
    counters = torch.zeros(2, latent.NUM_COUNTERS, dtype=torch.int32, device=device)
    index_choice.choose_by_scores(scores, counters, contexts, chosen, segment=16, room=room, sample=32, num_splits=2,
                                  pdl=False)
    assert torch.equal(chosen, latent.best_positions(scores, contexts, 25))


@pytest.mark.parametrize("kind", ["even", "only high ones are seen", "no high ones are seen"])
def test_a_sample_that_misleads_changes_nothing(device: torch.device, kind: str) -> None:
    """High scores where no sample looks, and only there where it does."""
    generator = torch.Generator().manual_seed(5)
    scores = torch.randn(2, 1040, generator=generator).to(device)
    in_sample = (torch.arange(1040, device=device) % 64 < 8)[None]
    if kind != "even":
        scores += 100 * (in_sample if kind == "only high ones are seen" else ~in_sample)
    first, stop = torch.tensor([0, 0], device=device), torch.tensor([1024, 1039], device=device)
    contexts = TokenContexts(torch.zeros(1, 1, device=device), torch.zeros(2, device=device), first, stop)
    chosen = torch.full((2, 64), -99, device=device)
    counters = torch.zeros(2, latent.NUM_COUNTERS, dtype=torch.int32, device=device)
    index_choice.choose_by_scores(scores, counters, contexts, chosen, segment=128, room=256, sample=128, pdl=False)
    assert torch.equal(chosen, latent.best_positions(scores, contexts, 64))
    is_listed = (counters >= 64) & (counters <= 256)
    assert is_listed.all() if kind == "even" else not is_listed.any()


@pytest.mark.parametrize("rows", [1, 4])
def test_the_choice_by_fp8_keys_is_the_twins(device: torch.device, rows: int) -> None:
    """Scales and keys are NaN wherever nothing may be read."""
    contexts = make_contexts(device, [*LENS, (9, 7, 64)], columns=16)
    numbers = make_cache(contexts, 6, torch.float32)
    keys, scales = (made.view(*numbers.shape[:2], -1) for made in latent_inputs.to_fp8(numbers.reshape(-1, 6)))
    scales = torch.where(numbers[..., :1].isnan(), torch.nan, scales)
    q = spread(len(contexts.first), 5, 6, device=device, dtype=torch.float32)
    weights = spread(len(q), 5, device=device, dtype=torch.float32, seed=9)
    wanted, chosen = (torch.full((len(q), 7), -99, device=device) for _ in range(2))
    latent.choose_positions(q.double(), weights.double(), keys, contexts, wanted, scales)
    config = ScoreConfig(rows, 16, 4, 1)
    index_choice.choose_positions(q, weights, keys, contexts, chosen, scales, config=config, segment=16, pdl=False)
    assert torch.equal(chosen, wanted) and scales.isnan().any()
    rounded = torch.full_like(wanted, -99)
    latent.choose_positions(q, weights, torch.nan_to_num(keys.float() * scales), contexts, rounded)
    exact = torch.full_like(wanted, -99)
    latent.choose_positions(q, weights, numbers, contexts, exact)
    assert torch.equal(rounded, wanted) and not torch.equal(exact, wanted)


def test_scores_stay_within_the_budget(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    contexts = make_contexts(device, [(9, 0, 64), (1, 0, 40)], columns=16)
    keys = make_cache(contexts, 6, torch.float32)
    q = spread(10, 4, 6, device=device, dtype=torch.float32)
    weights = spread(10, 4, device=device, dtype=torch.float32, seed=9)
    monkeypatch.setattr(index_choice, "MAX_SCORES", 3 * 64)
    made: list[torch.Size] = []
    empty = torch.empty

    def counted(*size: Any, **options: Any) -> torch.Tensor:
        made.append(torch.Size(size))
        return empty(*size, **options)

    monkeypatch.setattr(torch, "empty", counted)
    chosen, wanted = choose(contexts, q, weights, keys, 5, config=ScoreConfig(2, 16, 4, 1))
    assert torch.equal(chosen, wanted)
    assert max(size.numel() for size in made if len(size) == 2 and size[1] == 64) == 3 * 64


@pytest.mark.parametrize(("q_size", "has_index", "in_pairs", "scaled", "form"), [
    (7, True, False, False, (True, False)), (5, True, True, False, (False, True)), (0, False, False, False, FIRST),
    (6, False, False, False, (False, False)), (7, True, False, True, FIRST), (7, True, False, True, (False, True)),
])
def test_latents_are_written(device: torch.device, dtype: torch.dtype, q_size: int, has_index: bool, in_pairs: bool,
                             scaled: bool, form: tuple[bool, bool]) -> None:
    tokens, latent_dim, rot, dim, heads = 9, 12, 4, 10, 5
    width = q_size + latent_dim + rot + (dim + heads) * has_index
    compressed = spread(tokens, width + 2, device=device, dtype=dtype)[:, :width]
    norms = [1 + 0.1 * spread(size, device=device, dtype=dtype, seed=size) for size in (q_size, latent_dim, dim, dim)]
    table = spread(20, rot, device=device, dtype=torch.float32)
    rope = RopeRows(torch.arange(3, 3 + tokens, device=device), table, *form)
    slots = torch.tensor([4, 9, -1, 22, 5, 30, -1, 12, 7], device=device)

    def run(write: Any, **options: Any) -> tuple[torch.Tensor, ...]:
        sizes = (latent_dim + rot, dim)
        caches = [torch.full((8, PAGE, size), torch.nan, device=device, dtype=dtype) for size in sizes]
        scales = torch.full((8, PAGE, 1), torch.nan, device=device) if scaled else None
        keys = caches[1].to(torch.float8_e4m3fn) if scaled else caches[1]
        index = IndexInputs(heads, norms[2], norms[3], 0.25, in_pairs, keys, scales, eps=0.1) if has_index else None
        made = write(compressed, norms[0] if q_size else None, norms[1], 1e-6, rope, slots, caches[0], index, **options)
        return (*made, caches[0], keys.float() * (1.0 if scales is None else scales))

    wanted = run(latent_inputs.write_latents)
    for ours, theirs in zip(run(inputs_kernel.write_latents, pdl=False), wanted, strict=True):
        torch.testing.assert_close(ours, theirs, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype], equal_nan=True)
    assert wanted[2][0].isnan().all(), "dead token rows write nothing"
    assert wanted[3].isnan().all(dim=2).sum() == 32 - 7 * has_index


@pytest.mark.parametrize("has_starts", [False, True])
def test_ranges(device: torch.device, has_starts: bool) -> None:
    made = torch.tensor([[3, 9, 0, 7, 2, 5], [4, -1, 7, 8, -1, 2], [0, 0, 1, 1, 2, 2]], device=device)
    lengths = torch.tensor([8, 4, 9], device=device)
    starts = torch.tensor([1, 0, 3], device=device) if has_starts else None
    wanted = latent.visible_ranges(*made, lengths, starts)
    for ours, theirs in zip(inputs_kernel.visible_ranges(*made, lengths, starts, pdl=False), wanted, strict=True):
        assert torch.equal(ours, theirs)
    assert wanted[1].tolist() == [4, 0, 1, 4, 0, 6]


def test_a_rope_finds_the_dimensions_that_rotate(device: torch.device) -> None:
    """In pairs or halves, at the beginning or at the end: the result begins with them, in halves."""
    angles = torch.tensor([[0.3, 1.1]], device=device)
    rope = RopeRows(torch.zeros(1, dtype=torch.int64, device=device), torch.cat((angles.cos(), angles.sin()), dim=1))
    x = torch.arange(6.0, device=device)[None, None]
    forms = [(True, False, (0, 2), (1, 3), (4, 5)), (False, False, (0, 1), (2, 3), (4, 5)),
             (True, True, (2, 4), (3, 5), (0, 1)), (False, True, (2, 3), (4, 5), (0, 1))]
    for in_pairs, at_end, low, high, rest in forms:
        turned = torch.polar(torch.ones_like(angles), angles) * torch.complex(x[0, :, [*low]], x[0, :, [*high]])
        wanted = torch.cat((turned.real, turned.imag, x[0, :, [*rest]]), dim=1)
        torch.testing.assert_close(rope.turn(x, in_pairs=in_pairs, at_end=at_end)[0], wanted)


@pytest.mark.parametrize(("index_heads", "in_pairs", "form"), [(0, False, (False, False)), (5, False, FIRST),
                                                               (17, True, (False, True))])
def test_queries_are_rotated(device: torch.device, dtype: torch.dtype, index_heads: int, in_pairs: bool,
                             form: tuple[bool, bool]) -> None:
    tokens, heads, nope, rot, dim, latent_dim = 5, 11, 6, 4, 10, 12
    queries = spread(tokens, heads * (nope + rot) + index_heads * dim, device=device, dtype=dtype)
    rope = RopeRows(torch.arange(tokens, device=device), spread(20, rot, device=device, dtype=torch.float32), *form)

    def run(rotate: Any, **options: Any) -> list[torch.Tensor]:
        q = torch.full((tokens, heads, latent_dim + rot), torch.nan, device=device, dtype=dtype)
        index_q = torch.full((tokens, index_heads, dim), torch.nan, device=device, dtype=dtype) if index_heads else None
        rotate(queries, rope, q, nope, index_q, in_pairs, **options)
        return [q] if index_q is None else [q, index_q]

    for ours, theirs in zip(run(inputs_kernel.rotate_queries, pdl=False), run(latent_inputs.rotate_queries),
                            strict=True):
        torch.testing.assert_close(ours, theirs, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype], equal_nan=True)


@pytest.mark.parametrize(("tokens", "index_heads"), [(1, 3), (5, 17), (16, 0)])
def test_queries_enter_the_latent_space(device: torch.device, dtype: torch.dtype, tokens: int,
                                        index_heads: int) -> None:
    heads, nope, rot, dim, latent_dim = 5, 6, 4, 10, 76
    queries = spread(tokens, heads * (nope + rot) + index_heads * dim, device=device, dtype=dtype)
    form = FIRST if tokens == 5 else (False, True)
    rope = RopeRows(torch.arange(tokens, device=device), spread(20, rot, device=device, dtype=torch.float32), *form)
    to_latent = spread(heads, nope + 5, latent_dim, device=device, dtype=dtype, seed=1)[:, :nope].transpose(1, 2)

    def run(enter: Any, **options: Any) -> list[torch.Tensor]:
        q = torch.full((tokens, heads, latent_dim + rot), torch.nan, device=device, dtype=dtype)
        index_q = torch.full((tokens, index_heads, dim), torch.nan, device=device, dtype=dtype) if index_heads else None
        given = (queries, rope, q, to_latent, index_q, True)
        assert enter_latents.takes_few(*given)
        enter(*given, **options)
        return [q] if index_q is None else [q, index_q]

    for ours, theirs in zip(run(enter_latents.enter_latents, pdl=False), run(latent_inputs.enter_latents), strict=True):
        torch.testing.assert_close(ours, theirs, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


@pytest.mark.parametrize("tokens", [1, 19, 130 if HAS_CARD else 40])
def test_products_of_heads(device: torch.device, dtype: torch.dtype, tokens: int) -> None:
    """Both uses of one stored weight: by columns into a part of a wider tensor, and by rows."""
    stored = spread(3, 6 + 5, 20, device=device, dtype=dtype)
    q = spread(tokens, 3, 9, device=device, dtype=dtype, seed=1)[..., :6]
    wide = torch.full((tokens, 3, 24), torch.nan, device=device, dtype=dtype)
    products_kernel.head_products(q, stored[:, :6].transpose(1, 2), wide[..., :20], pdl=False)
    torch.testing.assert_close(wide[..., :20], torch.einsum("thn,hnl->thl", q, stored[:, :6]),
                               atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
    assert wide[..., 20:].isnan().all()
    out = torch.empty(tokens, 3, 5, device=device, dtype=dtype)
    products_kernel.head_products(wide[..., :20], stored[:, 6:], out, pdl=False)
    torch.testing.assert_close(out, torch.einsum("thl,hvl->thv", wide[..., :20], stored[:, 6:]),
                               atol=5 * TOLERANCE[dtype], rtol=5 * TOLERANCE[dtype])
