"""Caches beyond the device's memory on the card: prefixes that come back over streams of their own have the bits that
they were stored with, while other requests run and free pages are poisoned."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="needs the triton package")

from outrider.cache.media import MediaStats
from outrider.cache.with_media import CacheWithMedia
from tests.gpu.rig import GpuRig, asks, assert_same_tokens, loaded, reference
from tests.gpu.test_engines import DRAFTERS, HYBRIDS, TIE, folder_of
from tests.gpu.test_exact import bits_of, with_logprobs

HOST_BYTES = 64 << 20
CASES = [("llama", "itself"), ("gemma4_shared", "assistant"), ("nemotron_h", "mtp"), ("qwen3_5", "mtp"),
         ("deepseek_v32", "mtp")]


def stats_of(rig: GpuRig) -> MediaStats:
    cache = rig.engine.scheduler.cache
    assert isinstance(cache, CacheWithMedia)
    return cache.media.stats


@pytest.mark.gpu
@pytest.mark.parametrize(("family", "drafter"), [
    pytest.param(family, drafter, id=family, marks=pytest.mark.together(family)) for family, drafter in CASES])
def test_tokens_equal_the_reference_from_host_and_disk(family: str, drafter: str, tmp_path: Path) -> None:
    folder = folder_of(family)
    tie = 10 * TIE if family in HYBRIDS else TIE
    settings = {"source": folder, "speculative_config": DRAFTERS[drafter](family), "host_cache_memory": HOST_BYTES,
                "disk_cache_dir": str(tmp_path / "cache")}
    for places in (("host", "host"), ("disk", "host")):  # an engine that stores, then one that finds its files
        with GpuRig(loaded(folder), **settings) as rig:
            rig.run(asks())
            for _ in range(3):
                rig.engine.rest()  # empties the device's cache
                before = dict(stats_of(rig).num_loaded)
                assert_same_tokens(rig.run(asks()), reference(folder), asks(), tie=tie)
            assert all(stats_of(rig).num_loaded[place] for place in places)
            assert stats_of(rig).num_loaded["host"] > before["host"] and not stats_of(rig).num_failed
            assert rig.num_poisoned > 0


@pytest.mark.gpu
@pytest.mark.parametrize(("family", "drafter"), [
    pytest.param(family, drafter, id=family, marks=pytest.mark.together(f"{family} exact"))
    for family, drafter in CASES if family != "qwen3_5"])
def test_bits_are_those_of_a_request_without_a_cache(family: str, drafter: str) -> None:
    model, folder = loaded(folder_of(family), torch.bfloat16), folder_of(family)
    with GpuRig(model, source=folder, exact=True, enable_prefix_caching=False) as rig:
        alone = bits_of([rig.run([ask])[0] for ask in with_logprobs()])
    with GpuRig(model, source=folder, exact=True, speculative_config=DRAFTERS[drafter](family),
                host_cache_memory=HOST_BYTES) as rig:
        for _ in range(4):
            assert bits_of(rig.run(with_logprobs())) == alone
            rig.engine.rest()
        assert stats_of(rig).num_loaded["host"] > 0 and not stats_of(rig).num_failed
