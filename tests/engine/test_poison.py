"""A page never shows another owner's bytes: free pages hold NaN in all engine tests, and here every way to meet one."""

from __future__ import annotations

import operator

import pytest
import torch

from outrider.cache.manager import CacheManager
from outrider.core import NULL_PAGE, PageChanges
from outrider.core.params import SamplingParams
from outrider.mixers.pool import DevicePool
from tests.engine.harness import CONFIGS, Ask, Rig, prompt_of, tiny_model, tokens_of

# Lengths around page boundaries, so that pages are owned with nothing, little and all but one slot in use.
ASKS = [
    Ask(prompt_of(length, length), SamplingParams(seed=length, max_tokens=7))
    for length in (1, 3, 15, 16, 17, 31, 33, 40)
]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])
@pytest.mark.parametrize("family", CONFIGS)
def test_poisoned_pages_never_reach_an_output(family: str, dtype: torch.dtype) -> None:
    settings = {"num_pages": 13, "max_model_len": 64, "enable_prefix_caching": False, "max_num_batched_tokens": 20}
    model = tiny_model(family, dtype)
    with Rig(model, **settings) as poisoned, Rig(model, poison=False, **settings) as clean:
        assert tokens_of(poisoned.run(ASKS)) == tokens_of(clean.run(ASKS))
        assert poisoned.num_poisoned > 0
        assert_recycled(poisoned)


def assert_recycled(rig: Rig) -> None:
    """Pages went from owner to owner, and their unused slots still held NaN at the end."""
    writes = [write for batch in rig.batches for write in batch.cache.pages.table_writes]
    granted = [page for write in writes for page in write.pages if page != NULL_PAGE]
    assert max(granted.count(page) for page in set(granted)) > 1
    assert rig.step.pool.data.isnan().any()


@pytest.mark.parametrize("family", CONFIGS)
def test_nobody_writes_the_null_page(family: str) -> None:
    """Padded rows and dropped columns point there, and kernels may read it: it must stay finite."""
    with Rig(tiny_model(family), pad_requests=(8,), pad_tokens=(80,)) as rig:
        rig.run(ASKS)
        assert rig.runner.num_padded_steps == len(rig.batches)
        assert (rig.step.pool.data[NULL_PAGE] == 0).all()


def test_a_page_that_changes_group_is_cleared() -> None:
    """The second line: where masks fail, another group's bytes would be read as something else."""
    settings = {"num_pages": 7, "max_model_len": 64, "enable_prefix_caching": False}
    short, long = (Ask(prompt_of(length, length), SamplingParams(seed=1, max_tokens=7)) for length in (3, 50))
    with Rig(tiny_model("gemma3"), **settings) as rig:
        rig.run([short] * 3)  # a page for each of them, in each of the two groups
        assert not [page for batch in rig.batches for page in batch.cache.pages.cleared]
        rig.run([long])  # needs four of the group without a window
        cleared = [page for batch in rig.batches for page in batch.cache.pages.cleared]
        assert cleared and NULL_PAGE not in cleared


def test_the_pool_gets_the_changes_of_pages_as_the_cache_manager_made_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """A change of another kind is a field of them, and nothing between the two has to know it."""
    made: list[PageChanges] = []
    applied: list[PageChanges] = []
    take, apply = CacheManager.take_changes, DevicePool.apply

    def take_and_note(cache: CacheManager) -> PageChanges:
        made.append(take(cache))
        return made[-1]

    def note_and_apply(pool: DevicePool, changes: PageChanges) -> None:
        applied.append(changes)
        apply(pool, changes)

    monkeypatch.setattr(CacheManager, "take_changes", take_and_note)
    monkeypatch.setattr(DevicePool, "apply", note_and_apply)
    with Rig(tiny_model("gemma3"), num_pages=7, max_model_len=64) as rig:
        rig.run(ASKS[:3])
        assert made and len(made) == len(applied) and all(map(operator.is_, made, applied))
