"""A tier of pages in the host's memory, from outside the package: a page pool that says which pages move, and a device
pool that moves them. Nothing between the two knows of it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch

from outrider.cache.pages import PageKey, PagePool
from outrider.core import PageChanges
from outrider.mixers.pool import DevicePool
from tests.drafters.checkpoints import make_drafter
from tests.engine.harness import Ask, Rig, greedy, prompt_of, tiny_model, tokens_of

NUM_PAGES = 9
FIRST = Ask(prompt_of(41, 70), greedy(6))
ASKS = [FIRST, *(Ask(prompt_of(seed, 65), greedy(6)) for seed in (42, 43))]


@dataclass(slots=True)
class TierChanges(PageChanges):
    saved: list[tuple[int, int]] = field(default_factory=list)  # pages and the host's slots, before anything else
    restored: list[tuple[int, int]] = field(default_factory=list)  # the host's slots and pages, after all else


class TieredPool(PagePool):
    """Evicted pages go to slots of the host. A page that is found there has a number beyond the device's until it is
    held."""

    def __init__(self, num_pages: int) -> None:
        super().__init__(num_pages)
        self._changes: TierChanges = TierChanges()
        self._slots: dict[PageKey, int] = {}
        self._keys: list[PageKey] = []  # by slot

    def take_changes(self) -> PageChanges:
        changes, self._changes = self._changes, TierChanges()
        return changes

    def allocate(self, group: int, *, is_overwritten: bool = False) -> int:
        if not self._num_blank:
            page = next(iter(self._cached))
            key = self._key[page]
            if key is not None and key not in self._slots:
                self._changes.saved.append((page, len(self._keys)))
                self._slots[key] = len(self._keys)
                self._keys.append(key)
        return super().allocate(group, is_overwritten=is_overwritten)

    def find(self, key: PageKey) -> int | None:
        page = super().find(key)
        return self.num_pages + self._slots[key] if page is None and key in self._slots else page

    def is_held(self, page: int) -> bool:
        return page < self.num_pages and super().is_held(page)

    def hold_all(self, pages: Iterable[int]) -> list[int]:
        found = list(pages)
        super().hold_all(page for page in found if page < self.num_pages)  # first: what is held is not evicted
        return [page if page < self.num_pages else self._bring_back(page - self.num_pages) for page in found]

    def _bring_back(self, slot: int) -> int:
        page = self.allocate(self._keys[slot][0], is_overwritten=True)
        self.publish(page, self._keys[slot])
        self._changes.restored.append((slot, page))
        return page


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> dict[int, torch.Tensor]:
    """The host's slots."""
    slots: dict[int, torch.Tensor] = {}
    plain = DevicePool.apply

    def apply(pool: DevicePool, changes: PageChanges) -> None:
        assert isinstance(changes, TierChanges)
        for page, slot in changes.saved:
            slots[slot] = pool.copy_page(page)
        plain(pool, changes)
        for slot, page in changes.restored:
            pool.restore_page(page, slots[slot])

    monkeypatch.setattr("outrider.engine.make_scheduler.PagePool", TieredPool)
    monkeypatch.setattr(DevicePool, "apply", apply)
    return slots


@pytest.mark.parametrize("kind", [None, "mtp"])
def test_pages_that_were_evicted_come_back_from_the_host(
    kind: str | None, host: dict[int, torch.Tensor], tmp_path: Path
) -> None:
    model = tiny_model("llama")
    speculative = None if kind is None else make_drafter(kind, "llama", tmp_path).speculative(3)
    with Rig(model, num_pages=60, speculative_config=speculative) as rig:
        expected = tokens_of(rig.run_one_by_one(ASKS))
        assert not host, "nothing was evicted"
    with Rig(model, num_pages=NUM_PAGES, speculative_config=speculative) as rig:
        assert tokens_of(rig.run_one_by_one(ASKS)) == expected
        assert rig.scheduler.cache.pool.num_evicted > 0 and host
        again = rig.run_one_by_one(ASKS)
        assert tokens_of(again) == expected
        assert [output.metrics.num_cached_tokens for output in again] == [64, 64, 64]


def test_without_the_tier_they_are_computed_again() -> None:
    with Rig(tiny_model("llama"), num_pages=NUM_PAGES) as rig:
        rig.run_one_by_one(ASKS)
        assert rig.run([FIRST])[0].metrics.num_cached_tokens < 64
