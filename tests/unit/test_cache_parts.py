"""A layer's cache parts, as its specs declare them: other shapes, other types, in one group or in several."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from outrider.cache.groups import LayerCache, plan_groups
from outrider.cache.kinds import FullKind, FullSpec, PagedSpec, Part, register_kind
from outrider.mixers.pool import DevicePool

CPU = torch.device("cpu")


@dataclass(frozen=True)
class LatentSpec(PagedSpec):
    """A latent in bytes with a scale for each token: no pair of anything."""

    size: int

    @property
    def parts(self) -> tuple[Part, ...]:
        return Part("latent", (self.size,), 1, "uint8"), Part("scale", (), 4, "float32")


@dataclass(frozen=True)
class IndexSpec(PagedSpec):
    size: int
    name: str = "index"

    @property
    def parts(self) -> tuple[Part, ...]:
        return (Part(self.name, (self.size,), 4),)


register_kind(LatentSpec, FullKind)
register_kind(IndexSpec, FullKind)


def pool_of(*claims: LayerCache, num_pages: int = 3) -> DevicePool:
    return DevicePool(plan_groups(list(claims)), num_pages, torch.float32, CPU)


def test_parts_have_the_shapes_and_types_of_their_declaration() -> None:
    pool = pool_of(LayerCache(0, LatentSpec(24)), LayerCache(1, LatentSpec(24)))
    parts = pool.layer(1)
    assert {name: (part.dtype, tuple(part.shape)) for name, part in parts.items()} == {
        "latent": (torch.uint8, (3, 16, 24)), "scale": (torch.float32, (3, 16)),
    }


def test_every_part_of_every_layer_has_its_own_bytes() -> None:
    pool = pool_of(LayerCache(0, LatentSpec(24)), LayerCache(1, LatentSpec(24)), LayerCache(2, FullSpec(1, 4, 4)))
    views = [part for layer in range(3) for part in pool.layer(layer).values()]
    assert len(views) == 6
    for group in (views[:4], views[4:]):  # pages of another group are other pages
        for view in group:
            pool.data.zero_()
            view.fill_(1)
            assert [other is view for other in group] == [bool(other.bool().all()) for other in group]
            assert [other is view for other in group] == [bool(other.bool().any()) for other in group]


def test_a_layer_may_keep_parts_in_two_groups() -> None:
    pool = pool_of(LayerCache(0, LatentSpec(24)), LayerCache(0, IndexSpec(8)), LayerCache(1, LatentSpec(24), reads=0))
    assert pool.layer(0).keys() == {"latent", "scale", "index"}
    assert len(pool.layout.groups) == 2 and pool.layout.groups_of(0) == pool.layout.groups
    assert pool.layout.places[1] == pool.layout.places[0], "who reads another's cache finds all of its parts"


def test_two_parts_of_one_name_are_refused() -> None:
    with pytest.raises(ValueError, match="layer 0 declares two cache parts with the same name \\(index, index\\)"):
        pool_of(LayerCache(0, IndexSpec(8)), LayerCache(0, IndexSpec(4)))


def test_a_spec_without_a_kind_is_refused_by_name() -> None:
    @dataclass(frozen=True)
    class Unknown(IndexSpec):
        pass

    with pytest.raises(ValueError, match="Unknown has no cache kind"):
        plan_groups([LayerCache(0, Unknown(8))]).groups[0].kind  # noqa: B018


# Parts that are kept once for each page

TAIL, FLAG = Part("tail", (5,), 4, "float32"), Part("valid", (), 1, "bool")


def drafted(*, whole_parts: bool = False) -> DevicePool:
    """Two groups of the target; the drafter's layer is in neither."""
    target = [LayerCache(0, FullSpec(1, 4, 4)), LayerCache(1, FullSpec(2, 4, 4))]
    spec = FullSpec(1, 2, 4)
    own = [LayerCache(2, spec, page_parts=(TAIL, FLAG)), LayerCache(3, spec, page_parts=(FLAG,))]
    return DevicePool(plan_groups(target, drafter=own, whole_parts=whole_parts), 4, torch.float32, CPU)


def test_parts_of_pages_lie_behind_the_layers_in_the_pages_of_every_group() -> None:
    pool = drafted()
    parts = [*pool.page_parts(2).values(), *pool.page_parts(3).values()]
    assert [(part.dtype, tuple(part.shape)) for part in parts] == [
        (torch.float32, (4, 5)), (torch.bool, (4,)), (torch.bool, (4,))]
    assert pool.page_parts(0) == {} and pool.layout.page_bytes % 1024 == 0
    layers = [part for layer in range(4) for part in pool.layer(layer).values()]
    for view in parts:
        pool.data.zero_()
        view.fill_(1)
        assert all(bool(other.bool().any()) == (other is view) for other in [*parts, *layers])


def test_two_parts_of_pages_of_one_name_are_refused() -> None:
    with pytest.raises(ValueError, match="layer 0 declares two page parts with the name valid"):
        plan_groups([LayerCache(0, FullSpec(1, 4, 4), page_parts=(FLAG, FLAG))])


def test_bytes_of_parts_of_pages_count_as_used() -> None:
    layout = drafted().layout
    used = sum((group.used_bytes + 5 * 4 + 2) / group.page_tokens for group in layout.groups)
    assert layout.padding == 1 - used / sum(layout.page_bytes / group.page_tokens for group in layout.groups)


def test_a_backend_may_ask_for_pages_that_are_multiples_of_every_part() -> None:
    layout = drafted(whole_parts=True).layout
    sizes = {group.page_tokens * part.num_bytes for group in layout.groups for part in group.spec.parts}
    assert all(layout.page_bytes % size == 0 for size in sizes)


def test_a_copied_page_is_given_back_whole_at_any_number() -> None:
    pool = drafted()
    pool.data.view(torch.uint8).random_(0, 256, generator=torch.Generator().manual_seed(1))
    wanted = pool.data[1].view(torch.uint8).tolist()
    copied = pool.copy_page(1)
    pool.poison(torch.tensor([1, 3]))
    assert copied.tolist() == wanted, "the copy is not a view"
    pool.restore_page(3, copied)
    assert pool.data[3].view(torch.uint8).tolist() == wanted and pool.data[1].isnan().all()
