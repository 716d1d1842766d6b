"""Planning of groups: equal pages, little padding, every layer in one place."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.cache.groups import MAX_PADDING, PAGE_TOKENS, CacheLayout, CacheSpec, LayerCache, plan_groups
from outrider.cache.kinds import FullSpec, SlidingSpec

FULL = FullSpec(num_kv_heads=1, head_dim=256, itemsize=2)
SLIDING = SlidingSpec(num_kv_heads=1, head_dim=256, itemsize=2, window=512)


def layers(*specs: CacheSpec) -> list[LayerCache]:
    return [LayerCache(index, spec) for index, spec in enumerate(specs)]


def shapes(layout: CacheLayout) -> list[tuple[type, int, int]]:
    return [(type(g.spec), len(g.layers), g.page_tokens) for g in layout.groups]


def check(layout: CacheLayout, claims: list[LayerCache]) -> None:
    """What every plan must satisfy."""
    placed = sorted(layer for group in layout.groups for layer in group.layers)
    assert placed == sorted(claim.layer for claim in claims if claim.reads is None), "a layer is lost or doubled"
    spec_of = {layer.layer: layer.spec for layer in claims}
    for index, group in enumerate(layout.groups):
        assert group.index == index and group.page_tokens in PAGE_TOKENS
        assert len(group.layers) <= group.num_members
        assert all(spec_of[layer] == group.spec for layer in group.layers)
        assert group.num_members * group.page_tokens * group.spec.token_bytes <= layout.page_bytes
        for part, layer in enumerate(group.layers):
            assert layout.places[layer] == ((index, part),)
    assert 0 <= layout.padding < 1


def test_layers_of_one_spec_are_one_group() -> None:
    layout = plan_groups(layers(*[FULL] * 16), 32)
    assert shapes(layout) == [(FullSpec, 16, 32)]
    assert layout.page_bytes == 16 * 32 * FULL.token_bytes
    assert layout.padding == 0


def test_gemma3_has_pages_of_different_tokens_and_equal_bytes() -> None:
    claims = layers(*[FULL if i % 6 == 5 else SLIDING for i in range(26)])
    layout = plan_groups(claims)
    check(layout, claims)
    assert shapes(layout) == [(SlidingSpec, 22, 16), (FullSpec, 4, 64)]
    assert layout.padding < 0.06


def test_25_sliding_and_5_full_layers_are_six_groups_of_5() -> None:
    claims = layers(*[FULL if i % 6 == 5 else SLIDING for i in range(30)])
    layout = plan_groups(claims)
    check(layout, claims)
    assert shapes(layout) == [(SlidingSpec, 5, 16)] * 5 + [(FullSpec, 5, 16)]
    assert layout.padding == 0


@pytest.mark.parametrize(
    "specs",
    [
        [SlidingSpec(8, 256, 2, 1024)] * 25 + [FullSpec(2, 512, 2)] * 5,
        [FullSpec(8, 128, 2)] * 32 + [FullSpec(8, 64, 2)],
        [FullSpec(8, 128, 2)] * 36 + [FullSpec(8, 64, 2)] * 28,
        [FullSpec(3, 64, 2)] * 5 + [SlidingSpec(5, 80, 2, 64)] * 7,
        [FullSpec(8, 128, 2)] * 61 + [SlidingSpec(8, 128, 2, 128)] * 19 + [FullSpec(4, 128, 2)] * 3,
    ],
    ids=["wide full heads", "a smaller head", "a draft model", "nothing divides", "three specs"],
)
def test_different_geometries_waste_less_than_a_tenth(specs: list[CacheSpec]) -> None:
    claims = layers(*specs)
    layout = plan_groups(claims)
    check(layout, claims)
    assert layout.padding <= MAX_PADDING


def test_padding_is_unused_bytes_over_pool_bytes_at_equal_context() -> None:
    # 1 full layer of 3 units a token and 1 sliding of 1: pages of 48 units, the sliding one uses 32 of them.
    layout = plan_groups(layers(FullSpec(3, 8, 1), SlidingSpec(1, 8, 1, 64)))
    assert shapes(layout) == [(FullSpec, 1, 16), (SlidingSpec, 1, 32)]
    context = 32 * 16
    used = context * sum(g.spec.token_bytes for g in layout.groups)
    held = sum(context // g.page_tokens * layout.page_bytes for g in layout.groups)
    assert layout.padding == pytest.approx(1 - used / held)


def test_readers_map_to_the_owners_place_and_have_no_pages() -> None:
    claims = [
        LayerCache(0, SLIDING), LayerCache(1, FULL), LayerCache(2, SLIDING, reads=0), LayerCache(3, FULL, reads=1),
    ]
    layout = plan_groups(claims)
    check(layout, claims)
    assert layout.places[2] == layout.places[0] != layout.places[3] == layout.places[1]


def test_the_page_size_is_the_least_any_group_has() -> None:
    for size in PAGE_TOKENS:
        assert min(g.page_tokens for g in plan_groups(layers(FULL, SLIDING, SLIDING), size).groups) >= size


def test_what_cannot_be_planned_is_refused() -> None:
    with pytest.raises(ValueError, match="page_size must be one of .*got 24"):
        plan_groups(layers(FULL), 24)
    with pytest.raises(ValueError, match="declares no cache"):
        plan_groups([])


SPECS = st.one_of(
    st.builds(FullSpec, st.sampled_from([1, 2, 8]), st.sampled_from([64, 80, 128]), st.just(2)),
    st.builds(SlidingSpec, st.sampled_from([1, 4]), st.sampled_from([64, 96]), st.just(2), st.sampled_from([128, 512])),
)


@settings(max_examples=20)
@given(st.lists(st.tuples(SPECS, st.integers(1, 7)), min_size=1, max_size=3), st.sampled_from(PAGE_TOKENS))
def test_any_model_gets_a_plan(parts: list[tuple[CacheSpec, int]], page_tokens: int) -> None:
    claims = layers(*[spec for spec, count in parts for _ in range(count)])
    check(plan_groups(claims, page_tokens), claims)
