"""Every kind of cache: a request has the text and the log-probabilities that it has without a cache, whether its prefix
comes from the device, the host's memory or, in another engine, from files."""

from __future__ import annotations

from pathlib import Path

import pytest

from outrider.cache import observed_pool
from tests.tiers.rigs import HOST_BYTES, KINDS, PAGE, answers_of, asks_of, assert_equal, cache_of, cached_of, stats_of

LENGTHS = (3 * PAGE - 1, 3 * PAGE, 3 * PAGE + 1, 4 * PAGE + 5)


@pytest.mark.parametrize("name", KINDS)
def test_prefixes_come_back_from_host_and_disk(name: str, tmp_path: Path) -> None:
    kind = KINDS[name]
    asks = asks_of(kind, LENGTHS)
    with kind.open(tmp_path, enable_prefix_caching=False) as rig:
        expected = answers_of(rig.run_one_by_one(asks))
    tiers = {"host_cache_memory": HOST_BYTES, "disk_cache_dir": str(tmp_path / "cache")}
    with kind.open(tmp_path, **tiers) as rig:
        assert_equal(answers_of(rig.run_one_by_one(asks)), expected)
        assert not stats_of(rig).num_loads
        for _ in range(2):  # the whole prompt is a hit, and it is one again
            rig.engine.rest()  # empties the device's cache
            outputs = rig.run_one_by_one(asks)
            assert_equal(answers_of(outputs), expected)
            step = max(group.page_tokens for group in cache_of(rig).groups if group.is_target)
            assert cached_of(outputs) == [(length - 1) // step * step for length in LENGTHS]
        assert stats_of(rig).num_loaded["host"] and not stats_of(rig).num_loaded["disk"]
        assert not stats_of(rig).num_failed
    with kind.open(tmp_path, **tiers) as rig:
        outputs = rig.run(asks)
        assert_equal(answers_of(outputs), expected)
        assert min(cached_of(outputs)) > 0 and stats_of(rig).num_loaded["disk"] and not stats_of(rig).num_failed
        assert_equal(answers_of(rig.run(asks)), expected)  # from the device


@pytest.mark.parametrize("name", ["full", "mamba2, mtp"])
@pytest.mark.parametrize("num_pages", [None, 24])
def test_batches_that_store_one_page_each(name: str, num_pages: int | None, tmp_path: Path,
                                          monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages that wait for a later batch are stored before others take their place."""
    monkeypatch.setattr(observed_pool, "MOST_STORE_BYTES", 1)
    kind = KINDS[name]
    asks = asks_of(kind, LENGTHS)
    with kind.open(tmp_path, enable_prefix_caching=False) as rig:
        expected = answers_of(rig.run_one_by_one(asks))
    settings = {} if num_pages is None else {"num_pages": num_pages}
    with kind.open(tmp_path, host_cache_memory=HOST_BYTES, **settings) as rig:
        for _ in range(3):
            assert_equal(answers_of(rig.run_one_by_one(asks)), expected)
            rig.engine.rest()
        assert stats_of(rig).num_loaded["host"] and not stats_of(rig).num_failed
        cache_of(rig).check_integrity()
