"""A place for cached pages from outside the package: an object store, which several engines share."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from outrider import feature_list
from outrider.config import EngineConfig
from outrider.feature_list import FeatureEntry, register_feature
from outrider.features.tiers.tiers_in_engine import TiersInEngine
from outrider.features.tiers.tiers_on_device import TiersOnDevice
from tests.drafters.checkpoints import make_drafter
from tests.engine.harness import Ask, Rig, greedy, prompt_of, random_model, tiny_model, tokens_of
from tests.engine.recurrent_rig import HYBRIDS

NUM_PAGES = 9
FIRST = Ask(prompt_of(41, 70), greedy(6))
ASKS = [FIRST, *(Ask(prompt_of(seed, 65), greedy(6)) for seed in (42, 43))]


@dataclass
class ObjectStore:
    """A PageMedium that keeps every page."""

    name: str = "objects"
    objects: dict[bytes, bytes] = field(default_factory=dict)
    num_loaded: int = 0

    def contains(self, key: bytes) -> bool:
        return key in self.objects

    def keys(self) -> list[bytes]:
        return list(self.objects)

    def store(self, key: bytes, payload: memoryview, *, boundary: bool = False) -> bool:
        self.objects[key] = bytes(payload)
        return True

    def load(self, key: bytes, into: memoryview) -> bool:
        into[:] = self.objects[key]
        self.num_loaded += 1
        return True

    def touch(self, key: bytes) -> None:
        pass

    def close(self) -> None:
        pass


@pytest.fixture
def store() -> Iterator[ObjectStore]:
    """A store that all engines use which start from now on."""
    store = ObjectStore()

    def worker(config: EngineConfig) -> TiersOnDevice:
        return TiersOnDevice(config, lambda domain, page_bytes: [store])

    register_feature(FeatureEntry("objects", worker=worker, engine=partial(TiersInEngine, names=[store.name])))
    yield store
    feature_list._registered.pop("objects")


def settings_of(kind: str | None, tmp_path: Path) -> dict[str, Any]:
    return {} if kind is None else {"speculative_config": make_drafter(kind, "llama", tmp_path).speculative(3)}


@pytest.mark.parametrize("kind", [None, "mtp"])
def test_pages_that_were_evicted_come_back(kind: str | None, store: ObjectStore, tmp_path: Path) -> None:
    settings = settings_of(kind, tmp_path)
    with Rig(tiny_model("llama"), num_pages=60, **settings) as rig:
        expected = tokens_of(rig.run_one_by_one(ASKS))
    store.objects.clear()
    with Rig(tiny_model("llama"), num_pages=NUM_PAGES, **settings) as rig:
        assert tokens_of(rig.run_one_by_one(ASKS)) == expected
        assert rig.scheduler.cache.pool.num_evicted > 0 and not store.num_loaded
        again = rig.run_one_by_one(ASKS)
        assert tokens_of(again) == expected and store.num_loaded
        assert [output.metrics.num_cached_tokens for output in again] == [64, 64, 64]


@pytest.mark.parametrize("family", ["mamba2", "gated_delta"])
def test_another_engine_finds_pages_and_recurrent_states(family: str, store: ObjectStore) -> None:
    model = random_model(HYBRIDS[family], torch.float64, 3)
    with Rig(model) as rig:
        expected = tokens_of(rig.run_one_by_one(ASKS))
    with Rig(model) as rig:
        again = rig.run_one_by_one(ASKS)
        assert tokens_of(again) == expected and store.num_loaded
        assert all(output.metrics.num_cached_tokens >= 48 for output in again)


def test_without_the_store_they_are_computed_again() -> None:
    with Rig(tiny_model("llama"), num_pages=NUM_PAGES) as rig:
        rig.run_one_by_one(ASKS)
        assert rig.run([FIRST])[0].metrics.num_cached_tokens < 64
