"""Requests of one captured step with different numbers of drafts, on the card: tokens against the reference."""

from __future__ import annotations

from unittest import mock

import pytest

from outrider.runner.graphs.keys import GraphKeys
from tests.engine.harness import choose_drafts
from tests.engine.varied_drafts import UnequalDrafts, sizes_apart
from tests.gpu.conftest import HAS_CARD
from tests.gpu.rig import TIE, GpuRig, asks, assert_same_tokens, loaded, reference
from tests.gpu.test_engines import DRAFTERS, HYBRIDS, folder_of


@pytest.mark.parametrize(("family", "drafter"), [
    pytest.param(family, drafter, marks=pytest.mark.together(family))
    for family, drafter in (("llama", "itself"), ("nemotron_h", "mtp"), ("qwen3_next", "mtp"), ("deepseek_v32", "mtp"))
])
def test_tokens_equal_the_reference(family: str, drafter: str) -> None:
    """Every size is captured when it is met: no wider graph stands in for it."""
    folder = folder_of(family)
    with (sizes_apart(3), mock.patch.object(GraphKeys, "wider", staticmethod(lambda *given: None)),
          GpuRig(loaded(folder), source=folder, speculative_config=DRAFTERS[drafter](family)) as rig):
        choose_drafts(rig.engine.scheduler, UnequalDrafts(rig.engine.limits.max_drafts))
        for _ in range(2):
            assert_same_tokens(rig.run(asks()), reference(folder), asks(), tie=10 * TIE if family in HYBRIDS else TIE)
        assert rig.engine.stats.num_draft_tokens > 0
        if HAS_CARD:
            sizes = [key for key in rig.runner.graphs.captured if not key.has_prompts and key.has_drafts]
            assert rig.runner.num_replays > 0 and any(key.tokens % key.requests for key in sizes)
