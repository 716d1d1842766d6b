"""Prefix hashes and hits: what two requests may share, and the longest prefix all groups can serve."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.cache.groups import Group
from outrider.cache.kinds import SlidingKind
from outrider.cache.pages import PagePool
from outrider.cache.prefix import PageHashes, longest_hit
from outrider.core.input_part import InputPart, InputParts
from tests.unit.hash_mixer import make_layout

TOKENS = list(range(100, 140))


def test_a_page_is_known_by_everything_before_it() -> None:
    whole = PageHashes(4, ()).upto(TOKENS, 3)
    assert len(set(whole)) == 3
    for changed in range(12):
        other = list(TOKENS)
        other[changed] += 1
        hashes = PageHashes(4, ()).upto(other, 3)
        equal = [a == b for a, b in zip(whole, hashes, strict=True)]
        assert equal == [page < changed // 4 for page in range(3)]


def test_salt_and_other_keys_are_part_of_the_hash() -> None:
    keys: list[tuple[str, ...]] = [(), ("salt=a",), ("salt=b",), ("salt=a", "adapter=1"), ("adapter=1",)]
    assert len({PageHashes(4, k).upto(TOKENS, 1)[0] for k in keys}) == len(keys)


class Marked(InputPart):
    """An input at one position of a prompt."""

    def __init__(self, position: int) -> None:
        self.position = position

    def page_content(self, start: int, end: int, token_ids: Sequence[int]) -> list[int]:
        return [self.position - start] if start <= self.position < end else []


def test_an_input_is_a_part_of_the_page_that_it_begins_in() -> None:
    """Also at the page's first token and at its last."""
    plain = PageHashes(4, ()).upto(TOKENS, 4)
    for position in range(16):
        hashes = PageHashes(4, (), InputParts([Marked(position)])).upto(TOKENS, 4)
        assert [a == b for a, b in zip(plain, hashes, strict=True)] == [page < position // 4 for page in range(4)]


def test_equal_tokens_in_another_place_are_another_page() -> None:
    hashes = PageHashes(2, ()).upto([5, 6, 5, 6, 5, 6], 3)
    assert len(set(hashes)) == 3


def test_a_chain_grows_as_tokens_settle_and_keeps_its_beginning() -> None:
    hashes = PageHashes(4, ())
    first = list(hashes.upto(TOKENS[:5], 1))
    assert hashes.upto(TOKENS, 5)[:1] == first
    assert hashes.upto(TOKENS, 5) == PageHashes(4, ()).upto(TOKENS, 5)


def test_a_page_that_is_not_full_is_not_hashed() -> None:
    with pytest.raises(AssertionError, match="before it is full"):
        PageHashes(4, ()).upto(TOKENS[:7], 2)


def publish(pool: PagePool, group: Group, columns: set[int], hashes: dict[int, PageHashes]) -> None:
    digests = hashes[group.page_tokens].upto(TOKENS, len(TOKENS) // group.page_tokens)
    for column in columns:
        page = pool.allocate(group.index)
        pool.publish(page, (group.index, digests[column]))


def naive_hit(groups: tuple[Group, ...], cached: list[set[int]], most: int) -> int:
    """Try every length that is a page boundary in all groups."""
    hit = 0
    for length in range(1, most + 1):
        served = True
        for group, columns in zip(groups, cached, strict=True):
            window = group.kind.spec.window if isinstance(group.kind, SlidingKind) else length + 1
            needed = {p // group.page_tokens for p in range(max(0, length - window + 1), length)}
            served &= length % group.page_tokens == 0 and needed <= columns
        if served:
            hit = length
    return hit


@settings(max_examples=150)
@given(
    st.integers(0, 2**32),
    st.lists(st.tuples(st.sampled_from([1, 2, 4, 8]), st.sampled_from([0, 1, 3, 6, 11])), min_size=1, max_size=3),
    st.integers(0, len(TOKENS)),
    st.floats(0.5, 1),
)
def test_a_hit_is_the_longest_prefix_that_all_groups_serve(
    seed: int, shapes: list[tuple[int, int]], most: int, density: float
) -> None:
    rng, groups, pool = Random(seed), make_layout(*shapes).groups, PagePool(200)
    hashes = {group.page_tokens: PageHashes(group.page_tokens, ()) for group in groups}
    cached = []
    for group in groups:
        cached.append({c for c in range(len(TOKENS) // group.page_tokens) if rng.random() < density})
        publish(pool, group, cached[-1], hashes)
    hit = longest_hit(lambda key: pool.find(key) is not None, groups, hashes, TOKENS, most)
    assert hit == naive_hit(groups, cached, most)


def test_lowering_goes_round_until_all_groups_agree() -> None:
    groups = make_layout((2, 3), (4, 0)).groups
    pool, hashes = PagePool(99), {2: PageHashes(2, ()), 4: PageHashes(4, ())}
    publish(pool, groups[0], {0, 1, 5}, hashes)  # serves 12 (column 5 and the missing 4 are in sight: no), 4, 2
    publish(pool, groups[1], {0, 1}, hashes)  # serves 8 and 4
    assert longest_hit(lambda key: pool.find(key) is not None, groups, hashes, TOKENS, 12) == 4
