"""Decode attention that reads pages once for several requests, against the plain reference; and how packs are made,
against a plain statement of the rules. Requests share the pages of a common beginning; whatever no live query may see
is poisoned."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import pytest
import torch

triton = pytest.importorskip("triton", reason="needs the triton package")

from outrider.kernels.gpu.attention import splits as attention_splits
from outrider.kernels.gpu.attention.merge import MIN_COUNTERS, counters_for
from outrider.kernels.gpu.attention.sharing import SharedPages, find_shared
from outrider.kernels.gpu.attention.splits import MOST_SPLITS, DecodeConfig, SplitList, list_splits
from tests.kernels.test_triton_attention import Batch, assert_close, decode, expected, make_batch

SMALL = DecodeConfig(block_n=16, max_rows=16)
PAGE = 16
LEAST = 32  # tokens that requests must share


@dataclass(frozen=True)
class Sharer:
    """A request whose first `shared` tokens lie in pages of the request `of`."""

    length: int
    of: int = -1
    shared: int = 0
    scheduled: int = 1
    live: int = 1


def make_shared(device: torch.device, dtype: torch.dtype, requests: list[Sharer], **shape: int) -> Batch:
    batch = make_batch(device, dtype, [(r.length, r.scheduled, r.live) for r in requests], page_size=PAGE, **shape)
    table = batch.page_table
    for index, request in enumerate(requests):
        if request.of >= 0:
            table[index, : request.shared // PAGE] = table[request.of, : request.shared // PAGE]
    return batch


def find(batch: Batch, least: int = LEAST) -> SharedPages:
    bound = (batch.page_table.shape[1] - 1) * PAGE
    return find_shared(batch.page_table, batch.lengths, batch.live, PAGE, max_length=bound, least=least)


def list_for(batch: Batch, shared: SharedPages | None) -> SplitList:
    num_heads, head_dim = batch.q.shape[1:]
    with (mock.patch.object(attention_splits, "least_listed_split", return_value=32),
          mock.patch.object(attention_splits, "_LEAST_PACK_SPLIT", 32)):
        return list_splits(
            batch.lengths, batch.live, num_heads, batch.k_cache.shape[2], head_dim, batch.k_cache.element_size(),
            max_query=int(batch.query_starts.diff().max()), max_length=(batch.page_table.shape[1] - 1) * PAGE,
            shared=shared, config=SMALL,
        )


def attend(batch: Batch, splits: SplitList, **options: Any) -> torch.Tensor:
    actual = decode(batch, splits=splits, config=None, **options)
    assert not bool(counters_for(batch.q.device, MIN_COUNTERS).any()), "a split did not arrive"
    return actual


def members(splits: SplitList) -> list[list[int]]:
    """The requests of each pack."""
    assert splits.packs is not None
    packs: dict[int, list[int]] = {}
    for request, first in zip(splits.packs.order.tolist(), splits.packs.pack_firsts.tolist(), strict=True):
        if first >= 0:
            packs.setdefault(first, []).append(request)
    return list(packs.values())


def check_list(batch: Batch, splits: SplitList) -> None:
    """Every key of every request is read once, and a pack only reads columns in which page tables are equal."""
    packs = splits.packs
    assert packs is not None
    items = splits.items[: int(splits.count)].tolist()
    assert len(set(items)) == len(items) <= len(splits.items)
    order, packed, num_splits = packs.order.tolist(), packs.first_keys.tolist(), packs.num_pack_splits.tolist()
    assert sorted(order) == list(range(len(order)))
    table, contexts = batch.page_table.tolist(), (batch.lengths - batch.live).tolist()
    for pack in members(splits):
        first = pack[0]
        assert 2 <= len(pack) <= packs.plan.size and len({num_splits[r] for r in pack}) == 1
        assert max(packed[r] for r in pack) == packed[first] and 1 <= num_splits[first] <= packs.plan.num_splits
        for request in pack:
            assert LEAST <= packed[request] <= contexts[request] and packed[request] % PAGE == 0
            assert table[request][: packed[request] // PAGE] == table[first][: packed[request] // PAGE]
    own = {item // MOST_SPLITS.value for item in items if item >= 0}
    assert own == set(range(len(order))), "each request has a split of its own"
    of_packs = sorted(-1 - item for item in items if item < 0)
    places = {order.index(pack[0]): num_splits[pack[0]] for pack in members(splits)}
    assert of_packs == [place * MOST_SPLITS.value + split for place in sorted(places) for split in range(places[place])]


TWO_FAMILIES = [
    Sharer(200), Sharer(170, scheduled=3, live=2), Sharer(230, of=0, shared=128), Sharer(0, scheduled=0, live=0),
    Sharer(200, of=1, shared=96), Sharer(150, of=0, shared=144), Sharer(40, live=0), Sharer(129, of=0, shared=128),
    Sharer(190, of=1, shared=160, scheduled=3, live=3), Sharer(90), Sharer(64, of=0, shared=16),
]


def test_sharers_are_packed_and_give_the_same_result(device: torch.device, dtype: torch.dtype) -> None:
    batch = make_shared(device, dtype, TWO_FAMILIES, heads=2, kv_heads=2)
    splits = list_for(batch, find(batch))
    assert sorted(sorted(pack) for pack in members(splits)) == [[0, 2, 5, 7], [1, 4, 8]]
    check_list(batch, splits)
    assert_close(attend(batch, splits), expected(batch))


def test_a_batch_without_sharers_has_the_bits_of_a_plain_list(device: torch.device, dtype: torch.dtype) -> None:
    batch = make_shared(device, dtype, [replace(r, of=-1) for r in TWO_FAMILIES], heads=2, kv_heads=1)
    splits = list_for(batch, find(batch))
    assert members(splits) == [] and int(splits.count) == int(list_for(batch, None).count)
    actual = attend(batch, splits)
    assert_close(actual, expected(batch))
    assert torch.equal(actual, decode(batch, splits=list_for(batch, None), config=None))


def test_a_request_shares_no_page_that_its_queries_do_not_see_whole(device: torch.device, dtype: torch.dtype) -> None:
    """Two requests with the same pages to their ends. The last one has the pages of the third but for the first page:
    it shares nothing, and parts the third from the others."""
    requests = [Sharer(66, scheduled=3, live=3), Sharer(66, of=0, shared=80, scheduled=3, live=3),
                Sharer(130, of=0, shared=64), Sharer(130, of=2, shared=128)]
    batch = make_shared(device, dtype, requests, heads=2, kv_heads=2)
    batch.page_table[3, 0] = make_shared(device, dtype, [*requests[:3], Sharer(130)]).page_table[3, 0]
    batch.k_cache[batch.page_table[3, 0]] = 1.0
    batch.v_cache[batch.page_table[3, 0]] = 2.0
    splits = list_for(batch, find(batch))
    assert splits.packs is not None and splits.packs.first_keys.tolist() == [48, 48, 0, 0]
    check_list(batch, splits)
    assert_close(attend(batch, splits), expected(batch))


def test_a_family_within_a_family_is_packed_for_itself(device: torch.device, dtype: torch.dtype) -> None:
    """All begin with 48 tokens; the requests 1, 3 and 5 and the requests 2, 4 and 6 have 192 in common."""
    requests = [Sharer(260), Sharer(260, of=0, shared=48), Sharer(260, of=0, shared=48)]
    requests += [Sharer(250 + n, of=1 + n % 2, shared=192) for n in range(4)]
    batch = make_shared(device, dtype, requests, heads=2, kv_heads=2)
    splits = list_for(batch, find(batch))
    check_list(batch, splits)
    assert splits.packs is not None
    assert all(splits.packs.first_keys[r] == 192 for r in range(1, 7))
    assert_close(attend(batch, splits), expected(batch))


def test_padding_changes_no_bit(device: torch.device, dtype: torch.dtype) -> None:
    batch = make_shared(device, dtype, TWO_FAMILIES, heads=1, kv_heads=1)
    plain = attend(batch, list_for(batch, find(batch)))
    extra, tail, pad = 7, batch.query_starts[-1:].expand(7), torch.nn.functional.pad
    padded = replace(
        batch, q=torch.cat((batch.q, batch.q * float("nan"))), query_starts=torch.cat((batch.query_starts, tail)),
        lengths=pad(batch.lengths, (0, extra)), live=pad(batch.live, (0, extra)),
        page_table=torch.cat((batch.page_table, torch.zeros_like(batch.page_table)[:1].expand(extra, -1))),
    )
    result = attend(padded, list_for(padded, find(padded)))
    assert torch.equal(result[: len(plain)], plain) and bool((result[len(plain) :] == 0).all())


def test_softcap_and_requests_of_another_kernel(device: torch.device, dtype: torch.dtype) -> None:
    """A request with a prompt has no live token here: nobody shares its pages, and its rows get zeros."""
    batch = make_shared(device, dtype, [*TWO_FAMILIES[:8], Sharer(230, of=0, shared=128, live=0)], heads=2, kv_heads=2)
    splits = list_for(batch, find(batch))
    assert all(8 not in pack for pack in members(splits)) and len(members(splits)) == 2
    assert_close(attend(batch, splits, softcap=2.0), expected(batch, softcap=2.0))


def random_requests(random_: random.Random, count: int, max_query: int) -> list[Sharer]:
    requests: list[Sharer] = []
    for index in range(count):
        scheduled = random_.randint(0, max_query)
        live = random_.randint(0, scheduled)
        of = random_.randrange(-1, index) if index else -1
        shared = random_.randrange(0, requests[of].length // PAGE + 1) * PAGE if of >= 0 else 0
        if of >= 0 and (requests[of].live == 0 or not shared):
            of, shared = -1, 0  # a request that is dead has poisoned pages
        length = max(scheduled, shared + random_.randint(1, 90)) if scheduled else 0
        requests.append(Sharer(length, of, shared if length > shared else 0, scheduled, live))
    return requests


@pytest.mark.parametrize(("group", "dim"), [(1, 16), (2, 20), (4, 16), (7, 16), (8, 64)])
@pytest.mark.parametrize("max_query", [1, 2])
@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.long), pytest.param(2, marks=pytest.mark.long)])
def test_random_batches_equal_the_reference(
    device: torch.device, dtype: torch.dtype, group: int, dim: int, max_query: int, seed: int,
) -> None:
    requests = random_requests(random.Random(f"{group} {dim} {max_query} {seed}"), 12, max_query)
    batch = make_shared(device, dtype, requests, heads=group, kv_heads=1, dim=dim)
    splits = list_for(batch, find(batch))
    if int(batch.query_starts.diff().max()) * group > 8:  # no two requests fit into a tile of 16 rows
        assert splits.packs is None
        return
    check_list(batch, splits)
    assert_close(attend(batch, splits), expected(batch))


@pytest.mark.long
@pytest.mark.parametrize("dim", [128, 256, 512])
def test_wide_heads(device: torch.device, dtype: torch.dtype, dim: int) -> None:
    batch = make_shared(device, dtype, TWO_FAMILIES[:6], heads=4, kv_heads=1, dim=dim)
    splits = list_for(batch, find(batch))
    assert splits.packs is None or members(splits)
    assert_close(attend(batch, splits), expected(batch))


def test_many_requests_are_put_into_one_order(device: torch.device) -> None:
    """More requests than one program looks at: every request has its place, and sharers are neighbours."""
    generator = random.Random(5)
    families = [generator.randrange(6) for _ in range(70)]
    table = torch.arange(70 * 6, dtype=torch.int32, device=device).view(70, 6) + 1000
    for request, family in enumerate(families):
        if family:
            table[request, :3] = torch.arange(3, dtype=torch.int32) + family * 3
    lengths = torch.full((70,), 6 * PAGE, dtype=torch.int32, device=device)
    shared = find_shared(table, lengths, torch.ones_like(lengths), PAGE, max_length=96, least=LEAST)
    order = [families[request] for request in shared.order.tolist()]
    assert sorted(shared.order.tolist()) == list(range(70))
    for place, tokens in enumerate(shared.shared.tolist()):
        same = place > 0 and order[place] == order[place - 1] != 0
        assert tokens == (3 * PAGE if same else 0)
    assert sum(tokens > 0 for tokens in shared.shared.tolist()) == len([f for f in families if f]) - 5


def test_windows_and_key_starts_share_nothing(device: torch.device, dtype: torch.dtype) -> None:
    batch = make_shared(device, dtype, TWO_FAMILIES)
    shared, given = find(batch), {"max_query": 3, "max_length": 160, "config": SMALL}
    for options in ({"window": 2000}, {"key_starts": batch.live}):
        with pytest.raises(ValueError, match="shared is for layers that see all keys"):
            list_splits(batch.lengths, batch.live, 4, 2, 16, 4, shared=shared, **given, **options)
