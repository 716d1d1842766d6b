"""Splits layers into groups. Layers of one group share a page table, and every group's page has the same bytes.

Layers with equal specs are split into groups with equal numbers of layers. Each group gets a power-of-two number of
tokens for a page, so that the pages of all groups have equal bytes with as little padding as possible. Tensors that are
kept once for each page follow the layers, at the same place in the pages of every group. Recurrent layers have no
group: their states are stored by batch row, and a checkpoint takes as many pages as it needs. A target with only
recurrent layers has one group without layers, whose pages only mark its prefixes."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

from outrider.cache.kinds import (
    CHECKPOINT_INTERVAL,
    CacheType,
    FullSpec,
    Kind,
    MarkerSpec,
    PagedSpec,
    Part,
    RecurrentKind,
    RecurrentSpec,
    kind_of,
)
from outrider.core import PAGE_TOKENS

GROUP_COST = 0.01  # a further group (a table, host work each step) costs as much as this share of padding
MAX_PADDING = 0.10  # the plan avoids more, and start-up warns of more
CHECKPOINT_PAGES = 512  # pages of a checkpoint, where no layer that keeps tokens sets the size of a page
PAGE_UNIT = 1024  # bytes: pages with parts of their own have a multiple of this, so that aligned kernels stay aligned


CacheSpec = PagedSpec | RecurrentSpec


@dataclass(frozen=True)
class LayerCache:
    """One cache that a layer declares: pages that it writes, another layer's pages that it only reads, or a recurrent
    state in every row. A layer may declare several, whose tensors must have different names."""

    layer: int
    spec: CacheSpec
    reads: int | None = None  # the layer whose cache this one reads instead of keeping its own
    page_parts: tuple[Part, ...] = ()  # tensors kept once for each page, which move with the page

    @property
    def is_recurrent(self) -> bool:
        return isinstance(self.spec, RecurrentSpec)

    def stored_as(self, cache_type: CacheType) -> LayerCache:
        """Return this declaration with keys and values stored as `cache_type`. Recurrent states keep their type."""
        return self if isinstance(self.spec, RecurrentSpec) else replace(self, spec=self.spec.stored_as(cache_type))


@dataclass(frozen=True)
class Group:
    """Layers that share one page table. `layers[i]` is member i, and has the i-th part of every page of the group."""

    index: int
    spec: PagedSpec
    layers: tuple[int, ...]
    num_members: int  # number of layers, plus unused places where the split is not even
    page_tokens: int
    is_target: bool = True  # some layers are the target's, so that a prefix hit needs the group's pages

    @cached_property
    def kind(self) -> Kind:
        return kind_of(self.spec, self.page_tokens)

    @property
    def used_bytes(self) -> int:
        return len(self.layers) * self.page_tokens * self.spec.token_bytes


class Place(NamedTuple):
    """The place of one cache of a layer: its group, and its part of each page of the group."""

    group: int
    member: int


class PlacedPart(NamedTuple):
    """A tensor that a layer keeps once for each page of every group, and its place in a page."""

    layer: int
    part: Part
    start: int  # byte of a page at which it begins


@dataclass(frozen=True)
class CacheLayout:
    """The groups of a model, and the place of each cache of each layer. A layer that reads another layer's cache has
    the places of that layer."""

    groups: tuple[Group, ...]
    places: dict[int, tuple[Place, ...]]
    page_bytes: int
    recurrent: RecurrentKind = RecurrentKind()
    page_parts: tuple[PlacedPart, ...] = ()

    def groups_of(self, layer: int) -> tuple[Group, ...]:
        return tuple(self.groups[place.group] for place in self.places[layer])

    @property
    def keeps_only_keys(self) -> bool:
        """Whether every layer keeps keys and values of tokens, and nothing else."""
        return not self.recurrent.layers and all(isinstance(group.spec, FullSpec) for group in self.groups)

    @property
    def has_full_attention(self) -> bool:
        """Whether some layer of the target keeps keys and values of all tokens."""
        return any(type(group.spec) is FullSpec and group.is_target for group in self.groups)

    @property
    def padding(self) -> float:
        """Return the share of the pool's bytes that stays unused if all groups with layers hold equally long
        contexts."""
        part_bytes = sum(placed.part.num_bytes for placed in self.page_parts)
        keeping = [group for group in self.groups if group.layers]
        used = sum((group.used_bytes + part_bytes) / group.page_tokens for group in keeping)
        held = sum(self.page_bytes / group.page_tokens for group in keeping)
        return 1 - used / held if keeping else 0.0


def plan_groups(target: list[LayerCache], page_tokens: int = 16, checkpoint_interval: int = CHECKPOINT_INTERVAL,
                drafter: Sequence[LayerCache] = (), *, whole_parts: bool = False) -> CacheLayout:
    """Split the layers of a model and its drafter into groups. `page_tokens`: the smallest page that a group may have,
    in tokens. A drafter's layers join groups of the target if their specs are equal. `whole_parts`: whether the bytes
    of a page must be a multiple of the size of every part (`Backend.needs_whole_parts`)."""
    layers = [*target, *drafter]
    if page_tokens not in PAGE_TOKENS:
        raise ValueError(f"page_size must be one of {PAGE_TOKENS}, got {page_tokens}")
    buckets: dict[PagedSpec, list[int]] = {}
    recurrent: list[tuple[int, RecurrentSpec]] = []
    for layer in layers:
        match layer.spec:
            case RecurrentSpec():
                recurrent.append((layer.layer, layer.spec))
            case _ if layer.reads is None:
                buckets.setdefault(layer.spec, []).append(layer.layer)
    if not buckets and not recurrent:
        raise ValueError("the model declares no cache: its layers must return at least one cache spec")
    layout = CacheLayout((), {}, _marker_page_bytes(recurrent))
    if buckets:
        layout = _best_split(buckets, [t for t in PAGE_TOKENS if t >= page_tokens])
    own = {layer.layer for layer in drafter}
    groups = tuple(replace(group, is_target=not own.issuperset(group.layers)) for group in layout.groups)
    if not any(group.is_target for group in groups):
        groups += (Group(len(groups), MarkerSpec(), (), 0, page_tokens),)
    places = dict(layout.places)
    for layer in layers:
        if layer.reads is not None:
            places[layer.layer] = places[layer.reads]
    for index in places:
        names = [part.name for place in places[index] for part in groups[place.group].spec.parts]
        if len(set(names)) < len(names):
            raise ValueError(f"layer {index} declares two cache parts with the same name ({', '.join(names)}): rename "
                             "one of them in the layer's cache spec")
    page_parts, page_bytes = _place_page_parts(layers, layout, whole_parts)
    size = max(group.page_tokens for group in groups if group.is_target)
    kind = RecurrentKind(tuple(recurrent), size, page_bytes, max(checkpoint_interval // size, 1) * size)
    return CacheLayout(groups, places, page_bytes, kind, page_parts)


def _place_page_parts(layers: Sequence[LayerCache], layout: CacheLayout,
                      whole_parts: bool) -> tuple[tuple[PlacedPart, ...], int]:
    """Place the parts that are kept once for each page after the parts that are kept for each token. Returns the places
    and the bytes of a whole page. Every group's pages have these places: pages have equal sizes, so leaving them out in
    some groups would save nothing."""
    placed: list[PlacedPart] = []
    end = layout.page_bytes
    for layer in layers:
        for part in layer.page_parts:
            if any((layer.layer, part.name) == (other.layer, other.part.name) for other in placed):
                raise ValueError(f"layer {layer.layer} declares two page parts with the name {part.name}: rename one "
                                 "of them")
            start = _rounded_up(end, part.itemsize)
            placed.append(PlacedPart(layer.layer, part, start))
            end = start + part.num_bytes
    unit = PAGE_UNIT
    if whole_parts:
        sizes = math.lcm(*(group.page_tokens * part.num_bytes for group in layout.groups for part in group.spec.parts))
        unit = sizes if layout.page_bytes % sizes == 0 else unit
    return tuple(placed), _rounded_up(end, unit) if placed else end


def _marker_page_bytes(recurrent: Sequence[tuple[int, RecurrentSpec]]) -> int:
    return _rounded_up(-(-sum(spec.row_bytes for _, spec in recurrent) // CHECKPOINT_PAGES), PAGE_UNIT)


def _rounded_up(number: int, unit: int) -> int:
    return -(-number // unit) * unit


def _best_split(buckets: dict[PagedSpec, list[int]], sizes: list[int]) -> CacheLayout:
    if len(buckets) == 1:
        (layers,) = buckets.values()
        return _split(buckets, len(layers), (sizes[0],))
    best: tuple[tuple[bool, float], CacheLayout] | None = None
    for count in range(1, max(map(len, buckets.values())) + 1):
        for tokens in itertools.product(sizes, repeat=len(buckets)):
            layout = _split(buckets, count, tokens)
            # Rounded: float noise must not choose between equal plans.
            cost = (layout.padding > MAX_PADDING, round(layout.padding + GROUP_COST * len(layout.groups), 9))
            if best is None or cost < best[0]:
                best = (cost, layout)
    assert best is not None
    return best[1]


def _split(buckets: dict[PagedSpec, list[int]], count: int, tokens: tuple[int, ...]) -> CacheLayout:
    """Make a layout with groups of at most `count` layers. Groups of bucket i have pages of tokens[i] tokens."""
    groups: list[Group] = []
    places: dict[int, tuple[Place, ...]] = {}
    for (spec, layers), page_tokens in zip(buckets.items(), tokens, strict=True):
        num_groups = -(-len(layers) // count)
        num_members = -(-len(layers) // num_groups)
        for start in range(0, len(layers), num_members):
            members = tuple(layers[start : start + num_members])
            for member, layer in enumerate(members):
                places[layer] = (*places.get(layer, ()), Place(len(groups), member))
            groups.append(Group(len(groups), spec, members, num_members, page_tokens))
    page_bytes = max(g.num_members * g.page_tokens * g.spec.token_bytes for g in groups)
    return CacheLayout(tuple(groups), places, page_bytes)
