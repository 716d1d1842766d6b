"""F5: a persistent index buffer of FlexAttention was sized by the longest context where the batch's query tiles were
meant. Here it is sized by tiles and pages, and what is written into it is compared with a naive mask: uncompiled
attention ignores the indices, so right outputs alone prove nothing."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from outrider.cache.kinds import SlidingSpec
from outrider.core import Limits
from outrider.drafters.autoregressive import AutoregressiveDrafter
from outrider.drafters.draft_model import DraftModelNetwork
from outrider.mixers.batch import BatchView, DecodeQueries, LengthBound, MixedQueries, Queries
from outrider.mixers.paged.backend import AttentionLayer, KeyValueCache, PagedMixer
from outrider.mixers.paged.flex_backend import FlexBackend, FlexExtents, Plan, make_block_mask
from outrider.mixers.paged.torch_backend import TorchBackend
from tests.drafters.checkpoints import make_drafter
from tests.drafters.latent_rig import latent_of
from tests.engine import flex_cases
from tests.engine.flex_cases import CPU, DIM, FEW_PAGES, HEADS, KV_HEADS, WINDOW, Case, layout_of, random_case
from tests.engine.harness import CONFIGS, Ask, Rig, greedy, prompt_of, random_model, tiny_model, tokens_of
from tests.engine.masks import ChunkedMask, DocumentMask

MIB = 1 << 20


def assert_mask(case: Case, backend: FlexBackend, layer: AttentionLayer, view: BatchView) -> Plan:
    """Every tile lists the pages of its own request alone, among them all that its queries see, once and in order; and
    the mask inside them is the naive one."""
    (group,) = case.layout.groups_of(layer.index)
    backend.attach(len(case.pool.data), CPU)
    plan = backend.plan(view, group)
    cache = KeyValueCache(**case.pool.layer(layer.index))
    apart = len(case.pool.data[0]) // (2 * KV_HEADS * DIM * group.page_tokens) * 2
    mask = make_block_mask(layer, cache, plan, 1)
    counts, indices, size = mask.kv_num_blocks[0, 0], mask.kv_indices[0, 0], plan.tiles.size
    assert counts.shape == (len(plan.tiles.request),) and indices.shape[0] == len(counts)
    assert (counts < indices.shape[1]).all(), "a kernel reads one index ahead"
    assert len(counts) >= 2, "a single tile would be compiled apart"
    place_of = {int(place): token for token, place in enumerate(plan.tiles.place) if plan.tiles.token_is_live[token]}
    assert len(place_of) == int(view.live.sum())
    for tile, count in enumerate(counts.tolist()):
        tokens = [place_of[q] for q in range(tile * size, (tile + 1) * size) if q in place_of]
        if not tokens:
            assert count == 0
            continue
        (request,) = {int(view.request_of[token]) for token in tokens}
        table = view.page_tables[group.index][request].tolist()
        listed = [table.index(block // apart) for block in indices[tile, :count].tolist()]
        assert listed == list(range(listed[0], listed[0] + count)), "not a run of the request's own pages"
        for token in tokens:
            seen = case.visible(layer, token)
            assert {key // group.page_tokens for key in seen} <= set(listed)
            cells = torch.arange(group.page_tokens)
            slots = torch.tensor([table[column] for column in listed])[:, None] * apart * group.page_tokens + cells
            shown = mask.mask_mod(0, 0, plan.tiles.place[token], slots)  # type: ignore[arg-type]
            keys = (torch.tensor(listed)[:, None] * group.page_tokens + cells)[shown]
            assert sorted(keys.tolist()) == sorted(seen), token
    return plan


@pytest.mark.parametrize("page_tokens", [16, 32, 128])
@pytest.mark.parametrize("index", [0, 1])
def test_f5_the_block_mask_is_the_naive_one(page_tokens: int, index: int) -> None:
    for seed in range(3):
        case = random_case(seed, page_tokens)
        for mask in ({}, {"mask": ChunkedMask(24)}, {"mask": ChunkedMask(1)}, {"mask": DocumentMask()}):
            assert_mask(case, FlexBackend(), case.layer(index, **mask), case.view)


@pytest.mark.parametrize("window", [1, 16, 17, 128])
def test_f5_the_block_mask_of_any_window(window: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flex_cases, "WINDOW", window)
    for seed in range(3):
        case = random_case(seed, 16)
        assert_mask(case, FlexBackend(), case.layer(1), case.view)


@pytest.mark.parametrize("index", [0, 1])
def test_f5_captured_batches_have_the_same_mask(index: int) -> None:
    """The host knows only how many tiles there can be, and buffers are shared."""
    limits = Limits(max_requests=8, max_batched_tokens=1024, max_len=192, max_drafts=3, vocab_size=10)
    backend = FlexBackend()
    backend.prepare_capture(CPU, limits)
    for seed in range(4):
        case = random_case(seed, 16, spans=False)
        most = max(m.scheduled for m in case.members)
        queries: Queries = DecodeQueries(4) if most <= 4 else MixedQueries(4)
        view = replace(case.view, queries=queries, max_length=LengthBound(limits.max_len),
                       extra_keys=BatchView.extra_keys)
        plan = assert_mask(case, backend, case.layer(index), view)
        (group,) = case.layout.groups_of(index)
        extents = FlexExtents.from_limits(group, limits)
        assert backend._buffers[group.index].shape == (extents.tiles, extents.columns)
        assert plan.pages.data_ptr() == backend._buffers[group.index].data_ptr()


@pytest.mark.parametrize("short_of", ["tiles", "columns"])
def test_f5_a_step_that_the_index_buffer_cannot_hold_is_refused(short_of: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A captured graph reads the buffer that it was captured with: a new one would leave its indices as they were."""
    limits = Limits(max_requests=8, max_batched_tokens=1024, max_len=192, max_drafts=3, vocab_size=10)
    case = random_case(0, 16, spans=False)
    (group,) = case.layout.groups_of(0)
    backend, whole = FlexBackend(), FlexExtents.from_limits(group, limits)
    backend.prepare_capture(CPU, limits)
    backend.attach(len(case.pool.data), CPU)
    view = replace(case.view, queries=MixedQueries(4), max_length=LengthBound(limits.max_len),
                   extra_keys=BatchView.extra_keys)
    assert backend.plan(view, group).pages.shape[1] == whole.columns
    small = replace(whole, tiles=1) if short_of == "tiles" else replace(whole, columns=whole.columns - 1)
    monkeypatch.setattr(FlexExtents, "from_limits", lambda *_: small)
    with pytest.raises(ValueError, match="and the index buffer of group 0 has room for .* FlexExtents.from_limits"):
        backend.plan(view, group)


@pytest.mark.parametrize("page_tokens", [16, 32, 64, 128])
@pytest.mark.parametrize("max_batched_tokens", [256, 2048, 8192, 262144])
@pytest.mark.parametrize("max_len", [512, 4096, 131072])
def test_f5_buffers_hold_every_step_and_stay_small(page_tokens: int, max_batched_tokens: int, max_len: int) -> None:
    limits = Limits(max_requests=256, max_batched_tokens=max_batched_tokens, max_len=max_len, max_drafts=3,
                    vocab_size=10)
    total = 0
    for group in layout_of(page_tokens).groups:
        extents = FlexExtents.from_limits(group, limits)
        # The most tiles: every request but one has a single token, or all have as many as drafts allow.
        rest = max_batched_tokens - limits.max_requests + 1
        assert extents.tiles >= limits.max_requests - 1 + -(-rest // 128)
        assert extents.tiles >= limits.max_requests
        width = -(-max_len // group.page_tokens)
        if isinstance(group.spec, SlidingSpec):
            width = min(width, -(-(WINDOW + 127) // group.page_tokens) + 1)
        assert extents.columns > width
        total += extents.tiles * extents.columns * 4
    if max_batched_tokens <= 8192:
        assert total < 64 * MIB


@pytest.mark.parametrize("page_tokens", [16, 64])
def test_f5_outputs_equal_the_torch_backend(page_tokens: int) -> None:
    for seed in range(2):
        for index, mask in itertools.product((0, 1), ({}, {"mask": ChunkedMask(24)})):
            outs = []
            for backend in (FlexBackend(), TorchBackend()):
                case = random_case(seed, page_tokens)
                layer, generator = case.layer(index, **mask), torch.Generator().manual_seed(seed)
                shape = (case.view.num_tokens, KV_HEADS, DIM)
                q, k, v = (torch.randn((shape[0], heads, DIM), dtype=torch.float64, generator=generator)
                           for heads in (HEADS, KV_HEADS, KV_HEADS))
                bound = PagedMixer([layer], case.pool, backend).bind(case.view)[index]
                offset = torch.arange(len(q)) - case.view.query_starts[case.view.request_of]
                outs.append(bound(q, k, v)[offset < case.view.live[case.view.request_of]])
            torch.testing.assert_close(outs[0], outs[1], rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("family", ["llama", pytest.param("sliding", marks=pytest.mark.long), "gemma3"])
def test_f5_engines_give_the_tokens_of_the_torch_backend(family: str) -> None:
    model = tiny_model(family)
    asks = [Ask(prompt_of(seed, length), greedy(10)) for seed, length in enumerate((5, 40, 17, 60))]
    outs = []
    for backend in ("torch", "flex"):
        with Rig(model, attention_backend=backend, num_pages=FEW_PAGES, pad_requests=(4, 8), pad_tokens=(16, 64),
                 speculative_config={"method": "ngram", "num_speculative_tokens": 2}) as rig:
            outs.append(tokens_of(rig.run(asks)))
            assert rig.step.backend.name == backend and rig.num_poisoned > 0
    assert outs[0] == outs[1]


class Changing:
    """A mask that reads state."""

    def __init__(self) -> None:
        self.limit = 3

    def __call__(self, causal: Any, query: Any, keys: Any) -> Any:
        return causal & (keys < self.limit)


@dataclass
class Thawed:
    limit: int = 3

    def __call__(self, causal: Any, query: Any, keys: Any) -> Any:
        return causal


@dataclass(frozen=True)
class Holding:
    table: Any

    def __call__(self, causal: Any, query: Any, keys: Any) -> Any:
        return causal & self.table[keys]


LIMITS = [3]


@dataclass(frozen=True)
class ReadingModule:
    def __call__(self, causal: Any, query: Any, keys: Any) -> Any:
        return causal & (torch.minimum(keys, keys) < LIMITS[0])


@dataclass(frozen=True)
class ReadingClass:
    limit = 3

    def __call__(self, causal: Any, query: Any, keys: Any) -> Any:
        return causal & (keys < self.limit)


def test_masks_that_can_change_are_refused_by_name() -> None:
    case = random_case(0, 16)
    limit = [3]

    def closure(causal: Any, query: Any, keys: Any) -> Any:
        return causal & (keys < limit[0])

    for mask, message in ((Changing(), "Changing is not a frozen dataclass"),
                          (Thawed(), "Thawed is a dataclass that is not frozen"),
                          (Holding(torch.ones(3)), "Holding holds table, a Tensor"),
                          (closure, "closure is not a frozen dataclass"),
                          (ReadingModule(), "ReadingModule reads the variable LIMITS"),
                          (ReadingClass(), "ReadingClass reads the variable limit")):
        with pytest.raises(ValueError, match=message):
            PagedMixer([case.layer(0, mask=mask)], case.pool, FlexBackend())


def test_backends_without_masks_refuse_them_by_name() -> None:
    from outrider.mixers.paged.native_backend import NativeBackend

    case = random_case(0, 16)
    with pytest.raises(ValueError, match="layer 0 has the mask ChunkedMask, which attention_backend='native'"):
        PagedMixer([case.layer(0, mask=ChunkedMask(8))], case.pool, NativeBackend())


def test_flex_refuses_large_pools_on_a_cpu() -> None:
    with pytest.raises(ValueError, match="num_pages may be at most 1024, got 5000"):
        Rig(tiny_model("llama"), attention_backend="flex", num_pages=5000)


def test_flex_refuses_pages_that_it_cannot_read_when_the_engine_starts() -> None:
    """A layer of a draft model in pages as large as those of a latent cache: where a page ends there is a rest."""
    draft = random_model(CONFIGS["llama"] | {"vocab_size": 24}, torch.float64, seed=0)
    target = latent_of("deepseek_v32")
    drafter = AutoregressiveDrafter("draft_model", DraftModelNetwork(draft, target.num_layers, 24), 1)
    with pytest.raises(ValueError, match="'flex' needs pages whose distance is a multiple of .* use 'torch'"):
        Rig(target, drafter=drafter, attention_backend="flex", page_size=64, num_pages=40)


def test_flex_reads_pages_that_keep_parts_of_a_drafter(tmp_path: Path) -> None:
    """A page that keeps the hidden state of a head is still a multiple of each layer's part."""
    speculative, ask = make_drafter("eagle", "llama", tmp_path).speculative(2), Ask(prompt_of(3, 20), greedy(5))
    found = []
    for backend in ("torch", "flex"):
        with Rig(tiny_model("llama"), speculative_config=speculative, attention_backend=backend) as rig:
            found.append(tokens_of(rig.run([ask])))
            assert rig.engine.stats.num_draft_tokens > 0
    assert found[0] == found[1]
